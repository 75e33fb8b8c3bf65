"""What `specrl run` shows: on a terminal a live area below rows that scroll; elsewhere, or with --plain, lines of text.

    rows (printed once, never changed)     one a step, one a validation, one for every message
    live area (terminal only)              header with replicas and trainer, progress bars

A view is told what is new and draws; it asks nobody and decides nothing. Texts of others are shown as text: never as
markup, never with control characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten
from typing import ClassVar, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specrl.coordinator.report import Phase, ReplicaReport, Status, StepReport, ValidationReport
from specrl.launcher.rows import Columns, counter_lines, plain_step, plain_validation, printable, summary_lines

LONGEST_REASON = 60  # letters of why a replica is in its state; `--json` and the log have all of it

_PHASE_STYLE = {Phase.FINISHED: "green", Phase.FAILED: "red", Phase.STOPPED: "yellow"}


class View(Protocol):
    """Where a run is shown. check_every_s: how often it wants to be told of a check."""

    check_every_s: ClassVar[float]

    def begin(self, title: str, facts: dict[str, str]) -> None:
        """The run's name, and what a user may want to know of it from the first second: folder, page."""

    def show(self, status: Status | None) -> None:
        """The run at this moment; None: the coordinator does not answer (yet)."""

    def check(self, done: int, total: int) -> None:
        """Before the run begins: references that are checked."""

    def step(self, report: StepReport) -> None:
        """A step is done."""

    def validation(self, report: ValidationReport) -> None:
        """A version was validated, and the row of its step has not shown all of it."""

    def message(self, text: str) -> None:
        """Something that happened: a restart, a stop."""

    def end(self, status: Status, facts: dict[str, str]) -> None:
        """The summary of a run that has finished."""

    def close(self) -> None:
        """Leave the terminal as it was found. Idempotent."""


class PlainView:
    """One line for each thing that happens."""

    check_every_s: ClassVar[float] = 10.0

    def __init__(self, console: Console) -> None:
        self._console = console
        self._detail = ""

    def begin(self, title: str, facts: dict[str, str]) -> None:
        self._line(f"run {title}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))

    def show(self, status: Status | None) -> None:
        if status is None:
            return
        detail = f"{status.phase}: {status.detail}" if status.detail not in ("", status.phase) else f"{status.phase}"
        # While it trains, its steps speak for it.
        if detail != self._detail and (status.phase is not Phase.TRAINING or not self._detail.startswith(status.phase)):
            self._line(detail)
            self._detail = detail

    def check(self, done: int, total: int) -> None:
        self._line(f"checking references: {done} of {total}")

    def step(self, report: StepReport) -> None:
        self._line(plain_step(report))

    def validation(self, report: ValidationReport) -> None:
        self._line(plain_validation(report))

    def message(self, text: str) -> None:
        self._line(text)

    def end(self, status: Status, facts: dict[str, str]) -> None:
        for name, value in (*summary_lines(status), *facts.items()):
            self._line(f"{name}: {value}")

    def close(self) -> None:
        return

    def _line(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)


class LiveView:
    """Rows above a live area. Drawn by whoever calls it: there is no thread, so nothing is drawn behind our back."""

    check_every_s: ClassVar[float] = 0.2

    def __init__(self, console: Console) -> None:
        self._console = console
        self._columns = Columns(console.width)
        self._is_headed = False
        self._title, self._facts = "", dict[str, str]()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def begin(self, title: str, facts: dict[str, str]) -> None:
        self._title, self._facts = title, facts
        self._live.start()
        self.show(None)

    def show(self, status: Status | None) -> None:
        self._live.update(live_area(self._title, self._facts, status), refresh=True)

    def check(self, done: int, total: int) -> None:
        self._live.start()
        self._live.update(_bar_table([("checking references", done, total)]), refresh=True)

    def step(self, report: StepReport) -> None:
        self._head()
        self._console.print(self._columns.step(report), no_wrap=True)

    def validation(self, report: ValidationReport) -> None:
        self._head()
        self._console.print(self._columns.validation(report), no_wrap=True)

    def message(self, text: str) -> None:
        self._console.print(Text(printable(text), style="yellow"))

    def end(self, status: Status, facts: dict[str, str]) -> None:
        self.close()
        self._console.print(summary_panel(status, facts))

    def close(self) -> None:
        self._live.stop()

    def _head(self) -> None:
        if not self._is_headed:
            self._is_headed = True
            self._console.print(self._columns.header(), no_wrap=True)


def view_for(console: Console, is_plain: bool) -> View:
    """The live view on a terminal, unless plain text is asked for."""
    return LiveView(console) if console.is_terminal and not is_plain else PlainView(console)


def live_area(title: str, facts: dict[str, str], status: Status | None) -> RenderableType:
    """Header and progress bars of this moment."""
    head = Table.grid(padding=(0, 2))
    head.add_row(Text("run", style="dim"), Text(printable(title), style="bold"))
    for name, value in facts.items():
        head.add_row(Text(name, style="dim"), Text(printable(value)))
    if status is None:
        head.add_row(Text("phase", style="dim"), Text("the coordinator is starting"))
        return Panel(head, border_style="dim")
    phase = Text(f"{status.phase}", style=_PHASE_STYLE.get(status.phase, "cyan"))
    if status.detail != status.phase:
        phase.append(f"  {printable(status.detail)}", style="default")
    head.add_row(Text("phase", style="dim"), phase)
    head.add_row(Text("policy", style="dim"), Text(f"version {status.policy_version}"))
    head.add_row(Text("replicas", style="dim"), _replicas(status))
    head.add_row(Text("trainer", style="dim"), Text(printable(status.trainer)))
    for number, line in enumerate(counter_lines(status)):
        head.add_row(Text("" if number else "events", style="dim"), Text(printable(line), style="yellow"))
    return Panel(Group(head, _bars(status)), border_style="dim")


def _replicas(status: Status) -> Text:
    shown = [
        f"{replica.id} {replica.state} v{replica.policy_version}{_drafter(replica)} ({replica.live_rollouts} live)"
        + (f": {shorten(replica.reason, LONGEST_REASON, placeholder='...')}" if replica.reason else "")
        for replica in status.replicas
    ]
    return Text(printable(", ".join(shown) or "none yet"))


def _drafter(replica: ReplicaReport) -> str:
    return f"/d{replica.drafter_version}" if replica.drafter_version >= 0 else ""


def _bars(status: Status) -> Table:
    """What can be counted now: the present undertaking, the rollouts of the next step, the steps."""
    wanted = [
        (status.detail or "progress", status.done, status.total),
        ("rollouts of the next step", status.rollouts_collected, status.rollouts_wanted),
        ("steps", status.step, status.steps),
    ]
    return _bar_table(wanted)


def _bar_table(wanted: Sequence[tuple[str, int, int]]) -> Table:
    """A bar for everything that can be counted: its name, how much is done, of how much."""
    bars = Table.grid(padding=(0, 2))
    bars.add_column(no_wrap=True, max_width=36, overflow="ellipsis")
    for name, done, total in wanted:
        if total > 0:
            bar = ProgressBar(total=total, completed=min(done, total), width=40)
            bars.add_row(Text(printable(name), style="dim"), bar, Text(f"{done}/{total}"))
    return bars


def summary_panel(status: Status, facts: dict[str, str]) -> Panel:
    """What the run has achieved, and where it lies."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in (*summary_lines(status), *facts.items()):
        grid.add_row(Text(printable(name)), Text(printable(value)))
    title = Text(f" {printable(status.run)}: {status.phase} ")
    return Panel(grid, title=title, border_style=_PHASE_STYLE.get(status.phase, "cyan"), expand=False)
