"""A local run is never scaled beyond its machine's memory."""

from __future__ import annotations

from pathlib import Path

from tests.run_files import a_run

from specrl.launcher.memory import GIB
from specrl.launcher.processes.replicas import ReplicaScaler
from specrl.launcher.processes.supervisor import Supervisor
from specrl.launcher.run_directory import RunDirectory
from specrl.spec import parse_spec


def test_only_replicas_that_do_not_fit_into_memory_are_refused_and_only_once(tmp_path: Path) -> None:
    spec = parse_spec(a_run(tmp_path))
    replicas = ReplicaScaler(spec, RunDirectory(tmp_path), 1, 2 * GIB, lambda: 5 * GIB)
    supervisor = Supervisor([])
    told = [replicas.scale_to(wanted, supervisor) for wanted in (1, 4, 4, 3, 3, 4, 2)]
    assert told == [
        None,
        "available memory must be >= 6.0 GiB for 3 more replicas, got 5.0 GiB; keeping 1",
        None,
        "scaled from 1 replicas to 3",
        None,
        "scaled from 3 replicas to 4",
        "scaled from 4 replicas to 2",
    ]
    assert [slot.program.name for slot in supervisor._slots] == [f"gen-{number}" for number in range(4)]
