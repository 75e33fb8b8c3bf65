"""`specrl run`: starts a run on this machine, or resumes one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.command_exit import report_outcome
from specrl.cli.options import RUNS, Overrides, Plain, Runs
from specrl.cli.runs.dry_run import show_plan
from specrl.launcher import launch, preflight, run_directory
from specrl.launcher.terminal.view import choose_view


def start_or_resume(  # noqa: PLR0913, PLR0917 - one argument per option
    argument: Annotated[Path | None, typer.Argument(metavar="FILE", help="The same as --file FILE.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Run file (YAML) of a new run.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Resume this run: its folder, or its name in --runs.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    runs: Runs = RUNS,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With FILE: start from this checkpoint of another run, at its next prompts."),
    ] = None,
    plain: Plain = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With FILE: check everything, show what the run would do first, and end.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Keep the coordinator's page up after the end, until Ctrl-C.")
    ] = False,
) -> None:
    """Train on this machine: coordinator, generation replicas and trainer run as processes until the last step.

    Ctrl-C saves the run and stops it; a second Ctrl-C kills it. In both cases, `--resume` continues from the last saved
    state. With --resume, --set may change generation.replicas and generation.kvCacheMib only.
    """
    if sum(given is not None for given in (argument, file, resume)) != 1:
        raise typer.BadParameter("give either FILE for a new run, or --resume RUN")
    file = file or argument
    if checkpoint is not None and file is None:
        raise typer.BadParameter("--checkpoint DIR needs FILE; --resume RUN uses the run's own checkpoints")
    if dry_run:
        if file is None:
            raise typer.BadParameter("--dry-run needs FILE; `specrl checkpoint list RUN` shows what a run resumes from")
        show_plan(preflight.load_run(file, overrides), runs, checkpoint)
        return
    view = choose_view(Console(), plain)
    if file is not None:
        launched = launch.start_run(preflight.load_run(file, overrides), runs, view, serve, checkpoint)
    else:
        assert resume is not None
        launched = launch.resume_run(run_directory.find_run(resume, runs), overrides, view, serve)
    report_outcome(launched, view)
