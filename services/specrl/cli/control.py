"""`specrl pause`, `resume`, `scale`: ask something of a run that is under way on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from specrl.cli.options import RUNS, Runs
from specrl.coordinator.report import Status
from specrl.launcher import run_directory
from specrl.launcher.asking import ask
from specrl.launcher.run_directory import RunDirectory

Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run folder or name. Default: the newest.")]


def pause(run: Run = None, runs: Runs = RUNS) -> None:
    """Begin no new rollout and no training step. What is under way is finished; a restart keeps the pause."""
    directory = _find(run, runs)
    tell(ask(directory, "POST", "/pause"), f"go on with `specrl resume {directory.path}`")


def resume(run: Run = None, runs: Runs = RUNS) -> None:
    """Go on after `specrl pause`. A run whose processes have ended goes on with `specrl run --resume`."""
    tell(ask(_find(run, runs), "POST", "/resume"), "")


def scale(
    replicas: Annotated[int, typer.Option("--replicas", "-n", metavar="N", min=1, help="How many there are to be.")],
    run: Run = None,
    runs: Runs = RUNS,
) -> None:
    """Have N generation replicas: start the missing ones, send the last ones away once they have finished.

    The number is written into the run's folder, and holds for `specrl run --resume`, too. In a cluster:
    `kubectl scale rljob/NAME --replicas N`.
    """
    tell(ask(_find(run, runs), "PUT", "/scale", {"replicas": replicas}), f"{replicas} replicas are wanted")


def _find(run: str | None, runs: Runs) -> RunDirectory:
    return run_directory.find(run, runs) if run is not None else run_directory.newest(runs)


def tell(status: Status, more: str) -> None:
    """Where the run stands after it was asked, and `more`."""
    doing = "paused" if status.is_paused else status.phase.value
    typer.echo(f"{status.run}: {doing} at step {status.step} of {status.steps}" + (f"; {more}" if more else ""))
