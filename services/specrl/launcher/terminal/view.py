"""The output of `specrl run`: a live area below scrolling rows on a terminal, plain lines elsewhere or with --plain.

    rows (printed once, never changed)     one per step, one per validation, one per message
    live area (terminal only)              header with replicas and trainer, progress bars

A view draws what it is given. It fetches nothing and decides nothing. Text that others wrote is shown as text: never as
markup, and never with control characters. Called by `launcher`, `RunFollower` and the commands.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import shorten
from typing import ClassVar, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specrl.formats.durations import format_duration
from specrl.formats.reports import Phase, ReplicaReport, StatusReport, StepReport, ValidationReport
from specrl.launcher.terminal.rows import (
    StepTable,
    counter_lines,
    format_step,
    format_validation,
    make_printable,
    summary_lines,
)

MAX_REASON_CHARS = 60  # characters of a replica's reason for its state; `--json` and the log have all of it

QUIET_S = 10.0  # plain output is never silent for longer

_PHASE_STYLE = {Phase.FINISHED: "green", Phase.FAILED: "red", Phase.STOPPED: "yellow"}


class View(Protocol):
    """Where a run is shown. check_every_s: seconds between two updates of the reference check."""

    check_every_s: ClassVar[float]

    def show_start(self, title: str, facts: dict[str, str]) -> None:
        """Show the run's name, and facts that a user needs at once: its folder and its page."""

    def show_status(self, status: StatusReport | None) -> None:
        """Show the run's present status; None: the coordinator does not answer, for example while it starts."""

    def show_check_progress(self, done: int, total: int) -> None:
        """Show how many references have been checked, before the run begins."""

    def show_fetch_progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """Show how much of a model or a data set has been fetched or converted, before the run begins."""

    def show_step(self, report: StepReport, remaining_s: float | None = None) -> None:
        """Show a finished step. remaining_s: estimated seconds until the last step has ended; None: unknown."""

    def show_validation(self, report: ValidationReport) -> None:
        """Show a validation whose results the row of its step does not contain."""

    def show_message(self, text: str) -> None:
        """Show an event, such as a restart or a stop."""

    def show_summary(self, status: StatusReport, facts: dict[str, str]) -> None:
        """Show the summary of a finished run."""

    def close(self) -> None:
        """Restore the terminal. Idempotent."""


class PlainView:
    """Prints one line per event, and one about the present activity after ten seconds without an event."""

    check_every_s: ClassVar[float] = QUIET_S

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._detail = ""
        self._clock = clock
        self._started_at = self._printed_at = clock()

    def show_start(self, title: str, facts: dict[str, str]) -> None:
        self.show_message(f"run {title}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))

    def show_status(self, status: StatusReport | None) -> None:
        detail = "the coordinator is starting"
        if status is not None:
            detail = status.detail if status.detail.startswith(status.phase) else f"{status.phase}: {status.detail}"
            detail = detail.removesuffix(": ")
            # While the run trains, its steps are printed instead of every change of the status, until it stops.
            is_step = status.phase is Phase.TRAINING and self._detail.startswith(status.phase)
            is_step = is_step and not status.detail.startswith("stopping")
            if detail != self._detail and not is_step:
                self.show_message(detail)
                self._detail = detail
        if self._clock() - self._printed_at >= QUIET_S:
            amounts = "" if status is None else "".join(f", {text}" for text in _list_amounts(status))
            self.show_message(f"{detail}{amounts} ({self._clock() - self._started_at:.0f} s since the start)")

    def show_check_progress(self, done: int, total: int) -> None:
        self.show_message(f"checking references: {done} of {total}")

    def show_fetch_progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self.show_message(f"{what}: {format_bytes(done_bytes)} of {format_bytes(total_bytes)}")

    def show_step(self, report: StepReport, remaining_s: float | None = None) -> None:
        left = "" if remaining_s is None else f" about {format_duration(remaining_s)} left"
        self.show_message(format_step(report) + left)

    def show_validation(self, report: ValidationReport) -> None:
        self.show_message(format_validation(report))

    def show_summary(self, status: StatusReport, facts: dict[str, str]) -> None:
        for name, value in (*summary_lines(status), *facts.items()):
            self.show_message(f"{name}: {value}")

    def close(self) -> None:
        return

    def show_message(self, text: str) -> None:
        self._printed_at = self._clock()
        self._console.print(Text(make_printable(text)), soft_wrap=True)


def _list_amounts(status: StatusReport) -> Iterator[str]:
    """Yield what has changed in a phase that takes long, in words."""
    if status.total:
        yield f"{status.done} of {status.total}"
    if status.rollouts_wanted:
        graded = f" ({status.rollouts_grading} being graded)" if status.rollouts_grading else ""
        yield f"{status.rollouts_collected} of {status.rollouts_wanted} rollouts of the next step{graded}"
    if status.replicas:
        yield "replicas " + " ".join(f"{item.id} {item.state} ({item.live_rollouts} live)" for item in status.replicas)
    yield f"trainer {status.trainer}"


class LiveView:
    """Rows above a live area. It is drawn by the calling thread only, so nothing is drawn between two calls."""

    check_every_s: ClassVar[float] = 0.2

    def __init__(self, console: Console) -> None:
        self._console = console
        self._columns: StepTable | None = None
        """Made with the first row, which tells the names of the rewards."""
        self._title = ""
        self._facts = dict[str, str]()
        self._remaining_s: float | None = None
        # auto_refresh would start a thread. transient: the area disappears when it is closed.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def show_start(self, title: str, facts: dict[str, str]) -> None:
        self._title = title
        self._facts = facts
        self._live.start()
        self.show_status(None)

    def show_status(self, status: StatusReport | None) -> None:
        is_known = self._remaining_s is not None and status is not None and status.phase is Phase.TRAINING
        left = {"time left": f"about {format_duration(self._remaining_s or 0)}"} if is_known else {}
        self._live.update(live_area(self._title, self._facts | left, status), refresh=True)

    def show_check_progress(self, done: int, total: int) -> None:
        self._live.start()
        self._live.update(_bar_table([("checking references", done, total)]), refresh=True)

    def show_fetch_progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self._live.start()
        # In MiB, since the numbers are written beside the bar.
        total_mib = max(1, total_bytes >> 20)
        bars = _bar_table([(f"{what} (MiB)", done_bytes >> 20, total_mib)])
        self._live.update(bars, refresh=True)

    def show_step(self, report: StepReport, remaining_s: float | None = None) -> None:
        self._remaining_s = remaining_s
        self._console.print(self._print_header_once(report.rewards).step_row(report), no_wrap=True)

    def show_validation(self, report: ValidationReport) -> None:
        self._print_header_once(report.rewards)
        self._console.print(Text(make_printable(f"      {format_validation(report)}"), style="cyan"))

    def show_message(self, text: str) -> None:
        self._console.print(Text(make_printable(text), style="yellow"))

    def show_summary(self, status: StatusReport, facts: dict[str, str]) -> None:
        self.close()
        self._console.print(summary_panel(status, facts))

    def close(self) -> None:
        self._live.stop()

    def _print_header_once(self, rewards: Iterable[str]) -> StepTable:
        """Print the table's header before its first row. rewards: names of those that this row has."""
        if self._columns is None:
            self._columns = StepTable(self._console.width, rewards)
            self._console.print(self._columns.header_row(), no_wrap=True)
        return self._columns


def format_bytes(count: int) -> str:
    """Write a number of bytes in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def choose_view(console: Console, is_plain: bool) -> View:
    """Return the live view on a terminal, unless plain text is asked for; otherwise the plain view."""
    return LiveView(console) if console.is_terminal and not is_plain else PlainView(console)


def describe_page(address: str, token: str | None) -> str:
    """Return the address of a run's page. On a terminal it has the token, with which the page may show rollouts.

    Not in a file or a pipe: others may read those. A browser does not send the part after # to anybody.
    """
    return f"{address}/#token={token}" if token and sys.stdout.isatty() else address


def live_area(title: str, facts: dict[str, str], status: StatusReport | None) -> RenderableType:
    """Render the header and progress bars for a status; None: the coordinator does not answer yet."""
    head = Table.grid(padding=(0, 2))
    head.add_row(Text("run", style="dim"), Text(make_printable(title), style="bold"))
    for name, value in facts.items():
        head.add_row(Text(name, style="dim"), Text(make_printable(value)))
    if status is None:
        head.add_row(Text("phase", style="dim"), Text("the coordinator is starting"))
        return Panel(head, border_style="dim")
    phase = Text(f"{status.phase}", style=_PHASE_STYLE.get(status.phase, "cyan"))
    # Details such as "stopped; ..." begin with the phase.
    detail = status.detail.removeprefix(status.phase)
    if detail:
        between = "  " if detail == status.detail else ""
        phase.append(f"{between}{make_printable(detail)}", style="default")
    head.add_row(Text("phase", style="dim"), phase)
    head.add_row(Text("policy", style="dim"), Text(f"version {status.policy_version}"))
    head.add_row(Text("replicas", style="dim"), _replica_text(status))
    head.add_row(Text("trainer", style="dim"), Text(make_printable(status.trainer)))
    if status.rollouts_grading:
        grading = f"grading {status.rollouts_grading} rollouts of the next step"
        head.add_row(Text("verifiers", style="dim"), Text(grading))
    if status.isolations:
        sandboxes = ", ".join(f"{section} {isolation}" for section, isolation in status.isolations.items())
        head.add_row(Text("isolation", style="dim"), Text(make_printable(sandboxes)))
    for number, line in enumerate([*status.notices, *status.warnings]):
        head.add_row(Text("" if number else "notices", style="dim"), Text(make_printable(line), style="yellow"))
    for number, line in enumerate(counter_lines(status)):
        head.add_row(Text("" if number else "events", style="dim"), Text(make_printable(line), style="yellow"))
    bars = _bar_table(
        [
            (status.detail or "progress", status.done, status.total),
            ("rollouts of the next step", status.rollouts_collected, status.rollouts_wanted),
            ("steps", status.step, status.steps),
        ]
    )
    return Panel(Group(head, bars), border_style="dim")


def _replica_text(status: StatusReport) -> Text:
    shown = [
        f"{replica.id} {replica.state} v{replica.policy_version}{_drafter_suffix(replica)} "
        f"({replica.live_rollouts} live)"
        + (f": {shorten(replica.reason, MAX_REASON_CHARS, placeholder='...')}" if replica.reason else "")
        for replica in status.replicas
    ]
    return Text(make_printable(", ".join(shown) or "none"))


def _drafter_suffix(replica: ReplicaReport) -> str:
    return f"/d{replica.drafter_version}" if replica.drafter_version >= 0 else ""


def _bar_table(wanted: Sequence[tuple[str, int, int]]) -> Table:
    """Render a bar per (name, done, total). Entries with a total of 0 are left out."""
    bars = Table.grid(padding=(0, 2))
    bars.add_column(no_wrap=True, max_width=36, overflow="ellipsis")
    for name, done, total in wanted:
        if total > 0:
            bar = ProgressBar(total=total, completed=min(done, total), width=40)
            bars.add_row(Text(make_printable(name), style="dim"), bar, Text(f"{done}/{total}"))
    return bars


def summary_panel(status: StatusReport, facts: dict[str, str]) -> Panel:
    """Render what a finished run achieved and where its files are."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in (*summary_lines(status), *facts.items()):
        grid.add_row(Text(make_printable(name)), Text(make_printable(value)))
    title = Text(f" {make_printable(status.run)}: {status.phase} ")
    return Panel(grid, title=title, border_style=_PHASE_STYLE.get(status.phase, "cyan"), expand=False)
