"""`specrl status`: shows the progress or the result of a run. It changes nothing."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from specrl.cli.command_exit import INTERRUPTED_CODE, print_error
from specrl.cli.options import RUNS, AsJson, RunOrNewest, Runs
from specrl.errors import RunInvalid
from specrl.formats.reports import Phase, StatusReport, StepReport, list_reward_names
from specrl.launcher import run_directory
from specrl.launcher.coordinator_client import CoordinatorReports
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.run_state import read_run_state
from specrl.launcher.stored_reports import read_http_address, read_stored_steps
from specrl.launcher.terminal.rows import StepTable, make_printable, step_notices
from specrl.launcher.terminal.run_follower import RunFollower
from specrl.launcher.terminal.view import View, choose_view, describe_page, live_area, summary_panel
from specrl.rpc.run_token import find_token

TURN_S = 0.5  # between two requests to the coordinator with --watch


def show_run_status(
    run: RunOrNewest = None,
    runs: Runs = RUNS,
    steps: Annotated[int, typer.Option(metavar="N", min=0, help="Show the last N steps.")] = 10,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep watching until the run ends, or Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the phase, the progress and the last steps of a run and, after its end, its summary.

    For an active run, the figures come from its coordinator; otherwise from its folder. docs/scripting.md explains the
    fields of --json, which a run has from its first second on.
    """
    if watch and as_json:
        raise typer.BadParameter("give either --watch or --json")
    directory = run_directory.find_run(run, runs)
    if watch:
        try:
            watch_run(directory, choose_view(Console(), is_plain=False), steps)
        except KeyboardInterrupt as interrupt:
            print_error("no longer watching; the run goes on")
            raise typer.Exit(INTERRUPTED_CODE) from interrupt
    live, reports = read_run_status(directory, directory.has_launcher(), 0 if as_json else steps)
    found = read_run_state(directory, live)
    if as_json:
        typer.echo(found.model_dump_json(by_alias=True, indent=2))
        return
    if live is None and not directory.status_file.exists() and not found.error:
        doing = "is still starting" if found.running else "never started"
        raise RunInvalid(f"RUN must have a status, got {directory.path}, which {doing}; see {directory.logs_folder}")
    shown = reports if not watch else []  # with --watch the steps are already on the screen
    print_run_status(Console(), directory, found, shown)
    if not found.running and found.phase is not Phase.FINISHED:
        typer.echo(f"not running; resume with `specrl run --resume {directory.path}`")


def watch_run(directory: RunDirectory, view: View, steps: int) -> None:
    """Show an active run until it, its launcher or the user ends this. One that is starting is waited for."""
    while (address := read_http_address(directory)) is None and directory.has_launcher():
        time.sleep(TURN_S)
    if address is None or not directory.has_launcher():
        return
    token = find_token(directory.path)
    with CoordinatorReports(address, token) as coordinator:
        follower = RunFollower(coordinator, view, history=steps)
        view.show_start(directory.name, {"folder": str(directory.path), "page": describe_page(address, token)})
        try:
            while directory.has_launcher():
                found = follower.show_updates()
                if found is not None and found.phase.is_over:
                    return
                time.sleep(TURN_S)
        finally:
            view.close()


def read_run_status(
    directory: RunDirectory, is_driven: bool, steps: int
) -> tuple[StatusReport | None, list[StepReport]]:
    """Return the coordinator's status and the last `steps` reports.

    The status is None when the run is not running, or when its coordinator does not answer. The reports then come from
    the folder.
    """
    address = read_http_address(directory)
    if is_driven and address is not None:
        with CoordinatorReports(address, find_token(directory.path)) as coordinator:
            # It may be starting or restarting.
            found = coordinator.fetch_status()
            if found is not None:
                return found, coordinator.fetch_steps(after=max(0, found.step - steps)) if steps else []
    reports = read_stored_steps(directory)
    # Not reports[-steps:], which would be all of them for 0.
    return None, reports[len(reports) - min(steps, len(reports)) :]


def print_run_status(console: Console, directory: RunDirectory, found: StatusReport, reports: list[StepReport]) -> None:
    """Print the header, the last steps, and the summary or error."""
    facts = {"folder": str(directory.path)}
    address = read_http_address(directory)
    if address is not None and not found.phase.is_over:  # a page that no process serves any more is not worth showing
        facts["page"] = describe_page(address, find_token(directory.path))
    console.print(live_area(directory.name, facts, found))
    columns = StepTable(console.width, list_reward_names(reports))
    if reports:
        console.print(columns.header_row(), no_wrap=True)
    for report in reports:
        console.print(columns.step_row(report), no_wrap=True)
        for notice in step_notices(report):
            console.print(Text(make_printable(notice), style="yellow"))
    for line in (found.error or "").splitlines():
        console.print(Text(make_printable(line), style="red"))
    if found.summary is not None:
        files = {"metrics": str(directory.metrics_file), "logs": str(directory.logs_folder)}
        console.print(summary_panel(found, files))
