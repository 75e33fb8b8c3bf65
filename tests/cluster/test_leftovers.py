"""A second cluster beside the first, as another checkout starts it, and what is left of it: nothing.

The second one is `python -m tests.cluster`, which `make cluster` runs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.harness import leftovers
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.footprint import (
    find_links,
    find_namespaces,
    find_processes_in,
    find_traces,
    read_machine_settings,
)
from tests.cluster.harness.kubectl import Kubectl
from tests.e2e.harness.api import Api, is_condition_true, wait_until

ROOT = Path(__file__).resolve().parents[2]
START_S = 600.0


class Started:
    """`python -m tests.cluster` as a process, and what it printed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            command = [sys.executable, "-m", "tests.cluster"]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        self.name = f"{leftovers.PREFIX}{self.process.pid}"

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def kubeconfig(self) -> Path:
        found = re.search(r"export KUBECONFIG=(\S+)", self.said)
        assert found, self.said
        return Path(found[1])

    @property
    def network(self) -> int:
        """Number of its pod network, from the API server's address."""
        found = re.search(r"server: https://10\.(\d+)\.", self.kubeconfig.read_text())
        assert found
        return int(found[1])

    def wait_until_up(self) -> None:
        wait_until(
            lambda: self.process.poll() is not None or "Ctrl-C takes it down" in self.said,
            "the second cluster is up",
            timeout_s=START_S,
            explain=lambda: self.said,
        )
        assert self.process.poll() is None, self.said


@pytest.fixture
def settings_before() -> dict[str, str]:
    return read_machine_settings()


@pytest.fixture
def second(cluster: Cluster, settings_before: dict[str, str], tmp_path: Path) -> Iterator[Started]:
    """A second cluster that is up, while the first one runs."""
    started = Started(tmp_path / "said")
    started.wait_until_up()
    yield started
    started.process.kill()
    started.process.wait()
    leftovers.remove_stale()


def test_two_clusters_run_side_by_side_and_ctrl_c_leaves_nothing(
    admin: Api, second: Started, settings_before: dict[str, str]
) -> None:
    """Nothing of the second remains, and the first goes on."""
    nodes = Kubectl(second.kubeconfig).run("get", "nodes", "--output=name").stdout
    assert nodes == "node/node-0\n"
    namespaces = find_namespaces(second.name)
    assert len(namespaces) >= 3
    network = second.network
    assert find_traces(second.name)
    links = find_links(network)
    assert len(links) == 2
    second.process.send_signal(signal.SIGINT)
    assert second.process.wait(120) == 0, second.said
    assert find_traces(second.name) == []
    assert find_processes_in(namespaces) == []
    # The kernel removes a namespace's links a moment after its last process.
    wait_until(lambda: not links & find_links(network), "its links are gone")
    assert read_machine_settings() == settings_before
    (node,) = admin.list("v1/nodes")
    assert is_condition_true(node, "Ready")


def test_a_killed_harness_leaves_only_what_the_next_start_removes(
    second: Started, settings_before: dict[str, str]
) -> None:
    namespaces = find_namespaces(second.name)
    network = second.network
    links = find_links(network)
    assert len(links) == 2
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.wait()
    wait_until(lambda: find_processes_in(namespaces) == [], "the kernel has killed its processes")
    wait_until(lambda: not links & find_links(network), "its links are gone")
    # Another checkout's start may have removed these already.
    assert {each.split()[0] for each in find_traces(second.name)} <= {"cgroup", "folder"}
    assert read_machine_settings() == settings_before
    leftovers.remove_stale()
    assert find_traces(second.name) == []
