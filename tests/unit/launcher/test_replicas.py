"""A local run is scaled no further than its machine has memory for."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from tests.run_files import a_run

from specrl.launcher.replicas import GIB, Replicas
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.supervisor import Supervisor
from specrl.launcher.view import PlainView
from specrl.spec import parse_spec


def test_replicas_that_have_no_memory_are_refused_once_and_others_not(tmp_path: Path) -> None:
    spec, told = parse_spec(a_run(tmp_path)), []

    class View(PlainView):
        def message(self, text: str) -> None:
            told.append(text)

    replicas = Replicas(spec, RunDirectory(tmp_path), 1, 2 * GIB, lambda: 5 * GIB)
    supervisor, view = Supervisor([]), View(Console())
    for wanted in (1, 4, 4, 3, 3, 4, 2):
        replicas.keep(wanted, supervisor, view)
    assert told == [
        "available memory must be >= 6.0 GiB for 3 more replicas, got 5.0 GiB; there are 1 still",
        "scaled from 1 replicas to 3",
        "scaled from 3 replicas to 4",
        "scaled from 4 replicas to 2",
    ]
    assert supervisor.restarts() == {f"gen-{number}": 0 for number in range(4)}
