"""`specrl pause`, `resume`, `scale`: send an action to an active run on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from specrl.cli.options import RUNS, RunOrNewest, Runs
from specrl.formats.reports import StatusReport
from specrl.launcher import run_directory
from specrl.launcher.coordinator_client import request_run_action


def pause_run(run: RunOrNewest = None, runs: Runs = RUNS) -> None:
    """Pause a run: start no new rollout and no training step.

    Work in progress is finished. A restart keeps the pause.
    """
    directory = run_directory.find_run(run, runs)
    print_run_state(request_run_action(directory, "POST", "/pause"), f"continue with `specrl resume {directory.path}`")


def unpause_run(run: RunOrNewest = None, runs: Runs = RUNS) -> None:
    """Continue after `specrl pause`. A run whose processes have ended continues with `specrl run --resume`."""
    print_run_state(request_run_action(run_directory.find_run(run, runs), "POST", "/resume"), "")


def scale_run(
    replicas: Annotated[int, typer.Option("--replicas", "-n", metavar="N", min=1, help="Number of replicas.")],
    run: RunOrNewest = None,
    runs: Runs = RUNS,
) -> None:
    """Set the number of generation replicas: start missing ones, or retire the last ones after they drain.

    The number is stored in the run's folder and also applies to `specrl run --resume`. In a cluster, use
    `kubectl scale rljob/NAME --replicas N`.
    """
    print_run_state(
        request_run_action(run_directory.find_run(run, runs), "PUT", "/scale", {"replicas": replicas}),
        f"scaling to {replicas} replicas",
    )


def print_run_state(status: StatusReport, more: str) -> None:
    """Print the progress of a run after an action, followed by `more`."""
    # A paused run keeps its phase, so the phase alone would not show the pause.
    doing = "paused" if status.is_paused else status.phase.value
    typer.echo(f"{status.run}: {doing} at step {status.step} of {status.steps}" + (f"; {more}" if more else ""))
