"""`specrl run`: begin a run on this machine, or go on with one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.endings import conclude
from specrl.cli.options import RUNS, Overrides, Plain, Runs
from specrl.launcher import launch, run_directory
from specrl.launcher.view import view_for
from specrl.spec import load_spec


def run(  # noqa: PLR0913, PLR0917 - one argument per option
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Run file (YAML) of a new run.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with this run: its folder, or its name in --runs.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    runs: Runs = RUNS,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With -f: go on from this checkpoint of another run, with its next prompts."),
    ] = None,
    plain: Plain = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Keep the coordinator's page up after the end, until Ctrl-C.")
    ] = False,
) -> None:
    """Train on this machine: coordinator, generation replicas and trainer as processes, until the last step.

    Ctrl-C saves the run and stops it; a second Ctrl-C kills it. Either way `--resume` goes on from the last thing
    saved. With --resume, `--set generation.replicas=N` is the one change that is possible.
    """
    if (file is None) == (resume is None):
        raise typer.BadParameter("give either -f FILE for a new run, or --resume RUN")
    if checkpoint is not None and file is None:
        raise typer.BadParameter("--checkpoint DIR begins a new run with -f FILE; --resume RUN uses the run's own")
    view = view_for(Console(), plain)
    if file is not None:
        launched = launch.begin(load_spec(file, overrides), runs, view, serve, checkpoint)
    else:
        assert resume is not None
        launched = launch.resume(run_directory.find(resume, runs), overrides, view, serve)
    conclude(launched, view)
