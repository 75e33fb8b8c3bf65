"""Measures what a thousand RLJobs cost the operator, and how soon a request for another replica becomes a pod.

    make controlplane                              # once
    python -m benchmarks.operator_scale            # 1,000 jobs
    python -m benchmarks.operator_scale --jobs 50

The operator (`scale_operator.py`) runs in its own process against Kubernetes' own API server, controller manager and
scheduler on this machine (tests/e2e/harness). There are no nodes: the controllers create the jobs' pods, which stay
pending. So the operator keeps as many objects as with running jobs, but sees fewer changes of them.

    create    creates all jobs as fast as possible; ends when each has a status, and so all its children
    settle    the controllers create the pods, and the operator reconciles every change
    idle      each job is touched by an annotation: the cost of a reconciliation that changes nothing
    scale     some jobs, one after the other, get one replica more; ends when the API server has the pod

Seconds of a reconciliation are wall time, on cores that four programs of Kubernetes share. Requests and CPU time do not
depend on that. Memory is the operator's peak.
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
from tests.e2e.harness.api import RLJOBS, Api, is_condition_true, wait_until
from tests.e2e.harness.assets import CONTROL_PLANE, Assets
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.programs import free_port
from tests.rljob_cases import a_job

from specrl.spec.rljob.crd import build_definition

REPOSITORY = Path(__file__).parents[1]
NAMESPACE = "default"
SCALED = 50
QUIET_S = 20.0
"""If the operator reconciles nothing for so long, the phase has settled."""
PATIENCE_S = 3600.0


@dataclass(frozen=True)
class Phase:
    """Work of the operator in a phase. looks: seconds, reads and writes of each reconciliation."""

    name: str
    looks: list[tuple[float, int, int]]
    seconds: float
    cpu_s: float
    peak_bytes: int


class Operator:
    """The operator's process and its reports."""

    def __init__(self, kubeconfig: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.scale_operator", "--context", "", "--port", str(free_port())]
        environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=environment
        )
        self._began = time.monotonic()
        self._cpu_s = 0.0
        self._looks: list[tuple[float, int, int]] = []
        self._last: dict[str, Any] = {}

    def looks(self) -> int:
        """Reconciliations of this phase so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._last = json.loads(self._process.stdout.readline())
        self._looks += [tuple(look) for look in self._last["looks"]]
        return len(self._looks)

    def settle(self) -> None:
        """Wait until the operator has nothing to reconcile."""
        seen = self.looks()
        since = time.monotonic()
        while time.monotonic() - since < QUIET_S:
            time.sleep(1)
            now = self.looks()
            if now != seen:
                seen = now
                since = time.monotonic()

    def phase(self, name: str) -> Phase:
        """End a phase and begin the next."""
        self.looks()
        now = time.monotonic()
        cpu_s = self._last["cpu_s"]
        looks = self._looks
        found = Phase(name, looks, now - self._began, cpu_s - self._cpu_s, self._last["peak_bytes"])
        self._began = now
        self._cpu_s = cpu_s
        self._looks = []
        return found

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate(timeout=60)


@contextmanager
def cluster() -> Iterator[tuple[Api, Operator]]:
    """Start a control plane with the RLJob CRD, and the operator."""
    assets = Assets.of_environment()
    if missing := assets.missing(*CONTROL_PLANE):
        sys.exit(f"{', '.join(missing)} must be built, got none in {assets.folders}; run `make controlplane`")
    with tempfile.TemporaryDirectory() as scratch:
        plane = ControlPlane(assets, Path(scratch))
        api = plane.start()
        try:
            api.apply(build_definition())
            name = "apiextensions.k8s.io/v1/customresourcedefinitions"
            wait_until(
                lambda: is_condition_true(api.get(name, "rljobs.specrl.dev"), "Established"), "the CRD is served"
            )
            operator = Operator(plane.kubeconfig)
            try:
                yield api, operator
            finally:
                operator.close()
        finally:
            plane.stop()


def each(jobs: int, act: Callable[[int], object]) -> None:
    """Call a function for every job, four at a time."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in pool.map(act, range(jobs)):
            pass


def measure(jobs: int) -> tuple[list[Phase], list[float]]:
    """Run all phases. Returns also the seconds from each request for a replica to its pod."""
    with cluster() as (api, operator):
        operator.phase("start")
        each(jobs, lambda number: api.create(job(number)))
        wait_until(lambda: count_begun(api) == jobs, "all jobs have a status", PATIENCE_S)
        phases = [operator.phase("create")]
        wait_until(lambda: len(api.list("apps/v1/statefulsets")) == jobs, "all jobs have replicas", PATIENCE_S)
        wait_until(lambda: count_replicas(api) >= jobs, "all replicas have pods", PATIENCE_S)
        operator.settle()
        phases.append(operator.phase("settle"))
        each(jobs, lambda number: touch(api, number))
        wait_until(lambda: operator.looks() >= jobs, "all jobs are looked at", PATIENCE_S)
        phases.append(operator.phase("idle"))
        latencies_s = [scale(api, number) for number in range(min(SCALED, jobs))]
        phases.append(operator.phase("scale"))
        return phases, latencies_s


def job(number: int) -> dict[str, Any]:
    """Make a job with three pods, like those of the smallest users."""
    found = a_job({"store": {"sqlite": {}}}, f"job-{number}")
    found["metadata"]["namespace"] = NAMESPACE
    return found


def count_begun(api: Api) -> int:
    """Count the jobs that the operator has reconciled."""
    time.sleep(2)  # a list of all jobs is expensive
    return sum("status" in found for found in api.list(RLJOBS, NAMESPACE))


def count_replicas(api: Api) -> int:
    """Count the pods of replicas."""
    time.sleep(5)
    return len(api.list("v1/pods", NAMESPACE, "app.kubernetes.io/component=generation"))


def touch(api: Api, number: int) -> None:
    """Change an annotation that nothing depends on."""
    api.patch(RLJOBS, f"job-{number}", {"metadata": {"annotations": {"touched": str(time.time())}}}, NAMESPACE)


def scale(api: Api, number: int) -> float:
    """Ask for a second replica. Returns the seconds until its pod exists."""
    began = time.monotonic()
    api.scale(RLJOBS, f"job-{number}", NAMESPACE, 2)
    wait_until(lambda: api.find("v1/pods", f"job-{number}-generation-1", NAMESPACE), "the pod", PATIENCE_S)
    return time.monotonic() - began


def percentile(values: list[float], percent: int) -> float:
    """Median and 95th percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def show(jobs: int, phases: list[Phase], latencies_s: list[float]) -> None:
    """Print the measurements."""
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
        if len(seconds) < 2:  # too short for a rate
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
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="RLJobs (default: %(default)s)")
    options = parser.parse_args()
    show(options.jobs, *measure(options.jobs))


if __name__ == "__main__":
    main()
