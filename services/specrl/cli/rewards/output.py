"""The output of `specrl rewards grade`: verdicts on stdout, as JSON lines or a table, and progress on stderr.

Invariant: a verdict is written before the next one is shown, without a buffer, so an interruption loses none.
Called by `cli.rewards.command`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from specrl.cli.command_exit import print_error
from specrl.cli.rewards.grading import GradedLine
from specrl.errors import RunInvalid
from specrl.launcher.terminal.rows import make_printable

# Between two lines of progress when stderr is not a terminal.
PLAIN_EVERY_S = 10.0

# Failures that are repeated on stderr and in the summary; the output has all of them.
MAX_SHOWN_FAILURES = 5

# Lines of the table that one reason may take.
MAX_REASON_LINES = 4


@contextmanager
def reserve_stdout() -> Iterator[BinaryIO]:
    """Yield stdout without a buffer, reserved for verdicts.

    Meanwhile file descriptor 1 leads to stderr, so that prints of verifiers and their libraries, in any process, go
    there.
    """
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except OSError:  # a test captures stdout in this process, so it has no file descriptor
        yield sys.stdout.buffer
        return
    own = os.dup(number)  # the real stdout
    os.dup2(sys.stderr.fileno(), number)
    try:
        with open(own, "wb", buffering=0, closefd=False) as file:
            yield file
    finally:
        sys.stdout.flush()
        os.dup2(own, number)
        os.close(own)


class VerdictTally:
    """Counts verdicts for the summary."""

    def __init__(self) -> None:
        self.lines = 0
        self.readable = 0
        self.rewards: list[float] = []
        self.named: dict[str, list[float]] = {}
        """Each of several rewards by name, before weighting."""
        self.no_answer = 0
        self.ungraded: Counter[str] = Counter()
        """Problems by broken rule, without the value that broke it."""
        self.failures: list[str] = []
        """The first `MAX_SHOWN_FAILURES` lines without a verdict, each with its reason."""

    def add(self, graded: GradedLine) -> None:
        """Count a verdict."""
        self.lines += 1
        self.readable += not graded.line.fault
        if graded.reward.value is not None:
            self.rewards.append(graded.reward.value)
            for it in graded.reward.named:
                self.named.setdefault(it.name, []).append(it.reward.value or 0.0)
            self.no_answer += graded.reward.lacks_answer
            return
        self.ungraded[graded.reward.failure.partition(", got ")[0]] += 1
        if len(self.failures) < MAX_SHOWN_FAILURES:
            self.failures.append(f"{graded.line.place}: {graded.reward.failure}")


class JsonVerdicts:
    """Writes one JSON object per verdict."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def show_verdict(self, graded: GradedLine) -> None:
        """Write a verdict."""
        verdict: dict[str, Any] = {
            "reward": graded.reward.value,
            "extracted": graded.reward.extracted or None,
            "reason": graded.reason_text,
            "seconds": round(graded.seconds, 6),
        }
        if graded.reward.named:
            verdict["rewards"] = {it.name: it.reward.value for it in graded.reward.named}
        # Half of a surrogate pair has no UTF-8. `backslashreplace` in `_write_text` turns it into JSON's own escape.
        text = json.dumps({**graded.line.copied, **verdict}, ensure_ascii=False) + "\n"
        _write_text(self._out, text)


class VerdictTable:
    """Writes verdicts as a table for people, row by row, and a summary. width: columns of the terminal."""

    def __init__(self, out: BinaryIO, width: int) -> None:
        self._out = out
        self._console = Console()  # only knows how lines are wrapped
        # The columns for reward and seconds have fixed widths. Place, extracted answer and reason share the rest.
        rest = max(48, width) - len(f"{'reward':>7}  {'seconds':>8}") - 3 * len("  ")
        self._place = min(rest // 3, 32)  # at 80 columns as wide as a rollout's id
        self._extracted = (rest - self._place) // 3
        self._reason = rest - self._place - self._extracted
        self._write_row("line", "reward", "seconds", "extracted", "reason")

    def show_verdict(self, graded: GradedLine) -> None:
        """Write a verdict."""
        value = graded.reward.value
        reward = "-" if value is None else f"{value:.4g}"
        reason = graded.line.fault or graded.reason_text or "-"
        self._write_row(graded.line.place, reward, f"{graded.seconds:.3f}", graded.reward.extracted or "-", reason)

    def show_summary(self, tally: VerdictTally) -> None:
        """Write the summary after the last row."""
        _write_text(self._out, "\n" + "".join(f"{name:16}  {value}\n" for name, value in _summary_rows(tally)))

    def _write_row(self, place: str, reward: str, seconds: str, extracted: str, reason: str) -> None:
        """Write a row. Its reason goes on in further lines, since the end of a message often says what to change."""
        cells = [
            _fit_end(place.rpartition("/")[2].removeprefix("rollout "), self._place),
            f"{reward:>7}",
            f"{seconds:>8}",
            _fit_width(extracted, self._extracted),
        ]
        before = "  ".join(cells) + "  "
        shown = _fit_width(reason, MAX_REASON_LINES * self._reason).rstrip()
        for part in Text(shown).wrap(self._console, self._reason) or [Text()]:
            _write_text(self._out, (before + part.plain).rstrip() + "\n")
            before = " " * cell_len(before)


@contextmanager
def show_progress(total: int | None) -> Iterator[Callable[[], None]]:
    """Yield a callback that counts one graded line and shows the progress on stderr.

    On a terminal that does not show the verdicts, it moves a bar. Without a terminal, it prints a line every ten
    seconds. total: number of lines; None when only reading them tells.
    """
    console = Console(stderr=True)
    columns = (TextColumn("graded"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    is_hidden = not console.is_terminal or sys.stdout.isatty()
    done = 0
    said = time.monotonic()
    # redirect_stdout: stdout is reserved for verdicts.
    with Progress(*columns, console=console, disable=is_hidden, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("graded", total=total)

        def count_line() -> None:
            nonlocal done, said
            done += 1
            bar.advance(task)
            if not console.is_terminal and time.monotonic() - said >= PLAIN_EVERY_S:
                said = time.monotonic()
                print_error(f"{done}{'' if total is None else f' of {total}'} lines graded")

        yield count_line


def _summary_rows(tally: VerdictTally) -> Iterator[tuple[str, str]]:
    graded = len(tally.rewards)
    yield "graded", f"{graded} of {tally.lines} lines"
    if graded:
        yield "mean reward", f"{sum(tally.rewards) / graded:.4g}"
        if set(tally.rewards) <= {0.0, 1.0}:
            yield "right", _format_share(int(sum(tally.rewards)), graded)
        else:
            yield "range", f"{min(tally.rewards):.4g} to {max(tally.rewards):.4g}"
        yield "no answer found", _format_share(tally.no_answer, graded)
    for name, values in tally.named.items():
        yield f"reward {name}", f"mean {sum(values) / len(values):.4g} of {len(values)} lines"
    for rule, count in tally.ungraded.most_common(MAX_SHOWN_FAILURES):
        yield "ungraded", f"{count}: {_fit_width(rule, 200).rstrip()}"


def _format_share(count: int, total: int) -> str:
    return f"{count} of {total} ({count / total:.1%})"


def _fit_width(text: str, width: int) -> str:
    """Fit text into `width` columns of a terminal: without control characters, and with dots where it is cut."""
    # Cut before measuring, since a completion may be megabytes long.
    shown = make_printable(text[: 4 * width])
    if len(text) <= 4 * width and cell_len(shown) <= width:
        return set_cell_size(shown, width)
    return set_cell_size(shown, width - 3) + "..."


def _fit_end(text: str, width: int) -> str:
    """Fit text as `_fit_width` does, but cut its beginning: the end of a place has the line's number."""
    shown = make_printable(text)
    parts = chop_cells(shown[::-1], width - 3)
    return set_cell_size(shown if cell_len(shown) <= width else "..." + parts[0][::-1], width)


def _write_text(out: BinaryIO, text: str) -> None:
    try:
        # An unbuffered file may write only a part, for example into a pipe.
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        while left:
            left = left[out.write(left) :]
    except BrokenPipeError:  # the reader closed the pipe, as `head` does; the command then ends silently
        raise
    except OSError as error:
        raise RunInvalid(f"stdout must be writable, got {error.strerror}; free space, or write elsewhere") from error
