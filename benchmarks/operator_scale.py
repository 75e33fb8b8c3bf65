"""What do a thousand RLJobs cost the operator, and how soon does a request for another replica become a pod?

    make controlplane                              # once
    python -m benchmarks.operator_scale            # 1,000 jobs
    python -m benchmarks.operator_scale --jobs 50

The operator (`scale_operator.py`) runs in a process of its own against Kubernetes' own API server, controller manager
and scheduler, on this machine (tests/e2e/harness). There are no nodes: the jobs' pods are made by the controllers and
wait, so that the operator has as much to keep as with jobs that run, and fewer changes to look at.

    create    all jobs are made as fast as they are taken; ends when each has a status, and so all of its children
    settle    the controllers make their pods, and every change of one is looked at
    idle      each job is touched by an annotation: what a look costs at which nothing is to be done
    scale     some jobs, one after the other, are asked for one replica more: until the API server has its pod

A look is one call of `reconcile`. Its seconds are wall time, beside everything else that this machine does: four
programs of Kubernetes on the same cores. Requests and CPU time do not depend on that. Memory is the operator's most.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.e2e.harness.api import RLJOBS, Api, holds, until
from tests.e2e.harness.assets import CONTROL_PLANE, Assets
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.programs import free_port
from tests.rljob_cases import a_job

from specrl.spec.crd import definition

REPOSITORY = Path(__file__).parents[1]
NAMESPACE = "default"
SCALED = 50
QUIET_S = 20.0
"""Without a look for so long, what was to settle has settled."""
PATIENCE_S = 3600.0


@dataclass(frozen=True)
class Phase:
    """What the operator did in a part of the run. looks: seconds, reads and writes of each."""

    name: str
    looks: list[tuple[float, int, int]]
    seconds: float
    cpu_s: float
    peak_bytes: int


class Operator:
    """The process, and what it reports."""

    def __init__(self, kubeconfig: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.scale_operator", "--context", "", "--port", str(free_port())]
        environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment
        )
        self._began, self._cpu_s = time.monotonic(), 0.0
        self._looks: list[tuple[float, int, int]] = []
        self._last: dict[str, Any] = {}

    def looks(self) -> int:
        """How many it has made in this phase."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._last = json.loads(self._process.stdout.readline())
        self._looks += [tuple(look) for look in self._last["looks"]]
        return len(self._looks)

    def settle(self) -> None:
        """Wait until it has nothing to look at."""
        seen, since = self.looks(), time.monotonic()
        while time.monotonic() - since < QUIET_S:
            time.sleep(1)
            now = self.looks()
            if now != seen:
                seen, since = now, time.monotonic()

    def phase(self, name: str) -> Phase:
        """End a phase, and begin the next."""
        self.looks()
        now, cpu_s, looks = time.monotonic(), self._last["cpu_s"], self._looks
        found = Phase(name, looks, now - self._began, cpu_s - self._cpu_s, self._last["peak_bytes"])
        self._began, self._cpu_s, self._looks = now, cpu_s, []
        return found

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.communicate(timeout=60)


@contextmanager
def cluster() -> Iterator[tuple[Api, Operator]]:
    """A control plane that serves RLJobs, and an operator."""
    assets = Assets.of_environment()
    if missing := assets.missing(*CONTROL_PLANE):
        sys.exit(f"{', '.join(missing)} must be built, got none in {assets.folders}; run `make controlplane`")
    with tempfile.TemporaryDirectory() as scratch:
        plane = ControlPlane(assets, Path(scratch))
        api = plane.start()
        try:
            api.apply(definition())
            name = "apiextensions.k8s.io/v1/customresourcedefinitions"
            until(lambda: holds(api.get(name, "rljobs.specrl.dev"), "Established"), "the CRD is served")
            operator = Operator(plane.kubeconfig)
            try:
                yield api, operator
            finally:
                operator.close()
        finally:
            plane.stop()


def each(jobs: int, act: Callable[[int], object]) -> None:
    """Do something for every job, four at a time."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in pool.map(act, range(jobs)):
            pass


def measure(jobs: int) -> tuple[list[Phase], list[float]]:
    """All phases, and the seconds from each request for a replica to its pod."""
    with cluster() as (api, operator):
        operator.phase("start")
        each(jobs, lambda number: api.create(job(number)))
        until(lambda: count_begun(api) == jobs, "all jobs have a status", PATIENCE_S)
        phases = [operator.phase("create")]
        until(lambda: len(api.list("apps/v1/statefulsets")) == jobs, "all jobs have replicas", PATIENCE_S)
        until(lambda: count_replicas(api) >= jobs, "all replicas have pods", PATIENCE_S)
        operator.settle()
        phases.append(operator.phase("settle"))
        each(jobs, lambda number: touch(api, number))
        until(lambda: operator.looks() >= jobs, "all jobs are looked at", PATIENCE_S)
        phases.append(operator.phase("idle"))
        latencies_s = [scale(api, number) for number in range(min(SCALED, jobs))]
        phases.append(operator.phase("scale"))
        return phases, latencies_s


def job(number: int) -> dict[str, Any]:
    """A job of three pods, as the smallest users' are."""
    found = a_job({"store": {"sqlite": {}}}, f"job-{number}")
    found["metadata"]["namespace"] = NAMESPACE
    return found


def count_begun(api: Api) -> int:
    """Jobs that the operator has looked at."""
    time.sleep(2)  # a list of all is much to ask
    return sum("status" in found for found in api.list(RLJOBS, NAMESPACE))


def count_replicas(api: Api) -> int:
    """Pods of replicas."""
    time.sleep(5)
    return len(api.list("v1/pods", NAMESPACE, "app.kubernetes.io/component=generation"))


def touch(api: Api, number: int) -> None:
    """Change nothing that matters."""
    api.patch(RLJOBS, f"job-{number}", {"metadata": {"annotations": {"touched": str(time.time())}}}, NAMESPACE)


def scale(api: Api, number: int) -> float:
    """Ask for a second replica; seconds until its pod is there."""
    began = time.monotonic()
    api.scale(RLJOBS, f"job-{number}", NAMESPACE, 2)
    until(lambda: api.find("v1/pods", f"job-{number}-generation-1", NAMESPACE), "the pod", PATIENCE_S)
    return time.monotonic() - began


def percentile(values: list[float], percent: int) -> float:
    """Of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def show(jobs: int, phases: list[Phase], latencies_s: list[float]) -> None:
    """Print what was measured."""
    table = Table(title=f"{jobs} RLJobs, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    for name in ("phase", "s", "looks", "p50 ms", "p99 ms", "reads/look", "writes/look", "CPU ms/look", "MiB"):
        table.add_column(name, justify="right")
    whole = Phase(
        "all",
        [look for phase in phases for look in phase.looks],
        sum(phase.seconds for phase in phases),
        sum(phase.cpu_s for phase in phases),
        max(phase.peak_bytes for phase in phases),
    )
    for phase in (*phases, whole):
        seconds = [look[0] for look in phase.looks]
        if len(seconds) < 2:  # too short to say anything
            table.add_row(phase.name, f"{phase.seconds:.0f}", str(len(seconds)), *["-"] * 6)
            continue
        table.add_row(
            phase.name,
            f"{phase.seconds:.0f}",
            str(len(seconds)),
            *(f"{1000 * percentile(seconds, percent):.0f}" for percent in (50, 99)),
            *(f"{statistics.mean(look[part] for look in phase.looks):.2f}" for part in (1, 2)),
            f"{1000 * phase.cpu_s / len(seconds):.1f}",
            f"{phase.peak_bytes / 2**20:.0f}",
        )
    console = Console()
    console.print(table)
    words = ", ".join(f"p{percent} {percentile(latencies_s, percent):.2f} s" for percent in (50, 99))
    console.print(f"request for a replica to its pod: {words}, {len(latencies_s)} times, one after the other")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="RLJobs (default: %(default)s)")
    options = parser.parse_args()
    show(options.jobs, *measure(options.jobs))


if __name__ == "__main__":
    main()
