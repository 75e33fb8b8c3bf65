"""`specrl status`: how a run is doing, or did. Reads, and changes nothing."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.options import RUNS, Runs
from specrl.coordinator.report import Phase, Status, StepReport
from specrl.errors import RunInvalid
from specrl.launcher import run_directory
from specrl.launcher.reports import CoordinatorReports, http_address, stored_status, stored_steps
from specrl.launcher.rows import Columns
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.view import live_area, summary_panel

_OVER = (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)


def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run folder or name. Default: the newest.")] = None,
    runs: Runs = RUNS,
    steps: Annotated[int, typer.Option(metavar="N", min=0, help="Show the last N steps.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON, for programs.")] = False,
) -> None:
    """Show phase, progress, last steps and, at the end, the summary of a run.

    A run that is under way is asked; one that is over is read from its folder.
    """
    directory = run_directory.find(run, runs) if run is not None else run_directory.newest(runs)
    is_driven = directory.is_driven()
    found, reports = gather(directory, is_driven)
    if found is None:
        doing = "is starting" if is_driven else "never came to its first phase"
        raise RunInvalid(
            f"a run must have begun to have a status, got {directory.path}, which {doing}; see {directory.logs}"
        )
    if as_json:
        typer.echo(found.model_dump_json(by_alias=True, indent=2))
        return
    show(Console(), directory, found, reports[len(reports) - min(steps, len(reports)) :])
    if not is_driven and found.phase is not Phase.FINISHED:
        typer.echo(f"not running; go on with `specrl run --resume {directory.path}`")


def gather(directory: RunDirectory, is_driven: bool) -> tuple[Status | None, list[StepReport]]:
    """Ask the coordinator of a run that is under way; read the folder when it is not, or does not answer."""
    address = http_address(directory)
    if is_driven and address is not None:
        with CoordinatorReports(address) as coordinator:
            found = coordinator.status()
            if found is not None:
                return found, coordinator.steps(after=0)
    return stored_status(directory), stored_steps(directory)


def show(console: Console, directory: RunDirectory, found: Status, reports: list[StepReport]) -> None:
    """Header, last steps, and summary or error."""
    facts = {"folder": str(directory.path)}
    address = http_address(directory)
    if address is not None and found.phase not in _OVER:
        facts["page"] = address
    console.print(live_area(directory.name, facts, found))
    columns = Columns(console.width)
    if reports:
        console.print(columns.header(), no_wrap=True)
    for report in reports:
        console.print(columns.step(report), no_wrap=True)
    if found.error:
        console.print(found.error, markup=False, style="red")
    if found.summary is not None:
        console.print(summary_panel(found, {"metrics": str(directory.metrics_file), "logs": str(directory.logs)}))
