"""`specrl status`: how a run is doing, or did. Reads, and changes nothing."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.options import RUNS, Runs
from specrl.coordinator.report import Phase, Status, StepReport
from specrl.errors import RunInvalid
from specrl.launcher import run_directory
from specrl.launcher.follow import Follower
from specrl.launcher.reports import CoordinatorReports, http_address, stored_status, stored_steps
from specrl.launcher.rows import Columns, step_notices
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.view import View, live_area, summary_panel, view_for

TURN_S = 0.5
_OVER = (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)


def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run folder or name. Default: the newest.")] = None,
    runs: Runs = RUNS,
    steps: Annotated[int, typer.Option(metavar="N", min=0, help="Show the last N steps.")] = 10,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look on until the run is over, or Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON, for programs.")] = False,
) -> None:
    """Show phase, progress, last steps and, at the end, the summary of a run.

    A run that is under way is asked; one that is over is read from its folder.
    """
    directory = run_directory.find(run, runs) if run is not None else run_directory.newest(runs)
    if watch and not as_json:
        look_on(directory, view_for(Console(), is_plain=False), steps)
    is_driven = directory.is_driven()
    found, reports = gather(directory, is_driven, steps)
    if found is None:
        doing = "is starting" if is_driven else "never came to its first phase"
        raise RunInvalid(
            f"a run must have begun to have a status, got {directory.path}, which {doing}; see {directory.logs}"
        )
    if as_json:
        typer.echo(found.model_dump_json(by_alias=True, indent=2))
        return
    show(Console(), directory, found, reports if not watch else [])
    if not is_driven and found.phase is not Phase.FINISHED:
        typer.echo(f"not running; go on with `specrl run --resume {directory.path}`")


def look_on(directory: RunDirectory, view: View, steps: int) -> None:
    """Show a run that is under way until it is over, its launcher ends, or Ctrl-C."""
    address = http_address(directory)
    if address is None or not directory.is_driven():
        return
    with CoordinatorReports(address) as coordinator:
        follower = Follower(coordinator, view, history=steps)
        view.begin(directory.name, {"folder": str(directory.path), "page": address})
        try:
            while directory.is_driven():
                found = follower.turn()
                if found is not None and found.phase in _OVER:
                    return
                time.sleep(TURN_S)
        finally:
            view.close()


def gather(directory: RunDirectory, is_driven: bool, steps: int) -> tuple[Status | None, list[StepReport]]:
    """Ask the coordinator of a run that is under way; read the folder when it is not, or does not answer.

    Returns the status and the last `steps` reports.
    """
    address = http_address(directory)
    if is_driven and address is not None:
        with CoordinatorReports(address) as coordinator:
            found = coordinator.status()
            if found is not None:
                return found, coordinator.steps(after=max(0, found.step - steps)) if steps else []
    reports = stored_steps(directory)
    return stored_status(directory), reports[len(reports) - min(steps, len(reports)) :]


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
        for notice in step_notices(report):
            console.print(notice, markup=False, style="yellow")
    if found.error:
        console.print(found.error, markup=False, style="red")
    if found.summary is not None:
        console.print(summary_panel(found, {"metrics": str(directory.metrics_file), "logs": str(directory.logs)}))
