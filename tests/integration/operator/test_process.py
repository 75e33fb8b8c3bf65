"""The operator as a process, against an API server in memory behind HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from tests.integration.operator.operator_process import PATIENCE_S, Process
from tests.stand_ins.api_server import CORE, FakeApiServer
from tests.stand_ins.api_server_http import HttpApiServer
from tests.unit.operator.builders import an_rljob

from specrl_operator.api import CONFIG_MAP, JOB_SET, LEASE, RLJOB, STATEFUL_SET, condition_of


@pytest.fixture
def server() -> Iterator[HttpApiServer]:
    served = HttpApiServer(FakeApiServer(CORE | {JOB_SET.api_version}))
    served.watch_s = 0.5
    yield served
    served.close()


@pytest.fixture
def start(server: HttpApiServer, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(server, tmp_path / f"operator-{len(started)}", *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def ask(process: Process, path: str) -> httpx2.Response:
    return httpx2.get(process.address() + path, verify=False, timeout=PATIENCE_S, trust_env=False)  # no TLS here


def test_jobs_are_driven_as_they_come_change_and_go(server: HttpApiServer, start: Callable[..., Process]) -> None:
    fake = server.fake
    fake.put(an_rljob(name="first"))
    operator = start()
    operator.until(lambda: "first-trainer" in fake.of(JOB_SET))
    assert ask(operator, "/healthz").status_code == ask(operator, "/readyz").status_code == 200
    fake.put(an_rljob(name="second"))
    operator.until(lambda: "second-generation" in fake.of(STATEFUL_SET))
    fake.delete(CONFIG_MAP, fake.of(CONFIG_MAP)["second-run"])
    operator.until(lambda: "second-run" in fake.of(CONFIG_MAP))
    job = fake.of(RLJOB)["second"]
    job["spec"]["generation"]["replicas"] = 3
    fake.put(job)
    operator.until(lambda: fake.of(STATEFUL_SET)["second-generation"]["spec"]["replicas"] == 3)
    operator.until(lambda: 'type="Accepted"' in ask(operator, "/metrics").text)
    assert (
        'specrl_rljob_condition{name="second",namespace="rl",status="True",type="Accepted"} 1.0'
        in ask(operator, "/metrics").text
    )
    fake.delete(RLJOB, fake.of(RLJOB)["second"])
    operator.until(lambda: 'name="second"' not in ask(operator, "/metrics").text)
    assert operator.stop() == 0
    assert fake.of(LEASE)["specrl-operator"]["spec"]["holderIdentity"] == ""


def test_of_two_one_acts_and_the_other_follows_it(server: HttpApiServer, start: Callable[..., Process]) -> None:
    fake = server.fake
    first = start()
    first.until(lambda: '"leadership_won"' in first.log)
    second = start()
    second.until(lambda: '"operator_started"' in second.log)
    fake.put(an_rljob(name="one"))
    first.until(lambda: "one-trainer" in fake.of(JOB_SET))
    assert "child_created" not in second.log
    assert first.stop() == 0
    fake.put(an_rljob(name="two"))
    second.until(lambda: "two-trainer" in fake.of(JOB_SET))


def test_a_lease_that_is_lost_ends_the_process(server: HttpApiServer, start: Callable[..., Process]) -> None:
    operator = start()
    operator.until(lambda: '"leadership_won"' in operator.log)
    lease = server.fake.of(LEASE)["specrl-operator"]
    lease["spec"]["holderIdentity"] = "stranger"
    server.fake.put(lease)
    assert operator.process.wait(PATIENCE_S) == 1
    assert '"leadership_lost"' in operator.log


def test_a_namespace_is_watched_alone(server: HttpApiServer, start: Callable[..., Process]) -> None:
    fake = server.fake
    elsewhere = an_rljob(name="theirs")
    elsewhere["metadata"]["namespace"] = "elsewhere"
    fake.put(elsewhere)
    fake.put(an_rljob(name="mine"))
    operator = start("--namespace", "rl")
    operator.until(lambda: "mine-trainer" in fake.of(JOB_SET))
    assert "status" not in fake.of(RLJOB)["theirs"]
    assert not [name for name in fake.of(CONFIG_MAP) if name.startswith("theirs")]


def test_a_job_that_cannot_be_read_harms_no_other(server: HttpApiServer, start: Callable[..., Process]) -> None:
    fake = server.fake
    fake.put(an_rljob({"schedule": {"groupSize": 0}}, name="broken"))
    fake.put(an_rljob(name="sound"))
    operator = start()
    operator.until(lambda: "sound-trainer" in fake.of(JOB_SET))
    operator.until(lambda: condition_of(fake.of(RLJOB)["broken"].get("status", {}), "Accepted") != {})
    assert condition_of(fake.of(RLJOB)["broken"]["status"], "Accepted")["reason"] == "SpecInvalid"
    assert operator.process.poll() is None


def test_without_a_cluster_it_says_so(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "specrl_operator.main"],
        env=os.environ | {"KUBECONFIG": str(tmp_path / "none"), "KUBERNETES_SERVICE_HOST": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert found.returncode == 2
    assert "set KUBECONFIG" in found.stderr
