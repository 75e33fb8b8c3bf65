"""What `specrl rewards grade` prints: verdicts on stdout, as JSON lines or as a table, and progress on stderr.

Invariant: a verdict has left this process before the next one is shown, so that an interruption loses none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specrl.cli.endings import complain
from specrl.cli.rewards.grading import Graded
from specrl.errors import RunInvalid
from specrl.launcher.rows import printable

PLAIN_EVERY_S = 10.0
"""Between two lines of progress where stderr is no terminal."""
SHOWN = 5
"""Failures that are spelled out; the output has all of them."""


@contextmanager
def own_stdout() -> Iterator[BinaryIO]:
    """Stdout without a buffer, for verdicts alone.

    What verifiers and their libraries print meanwhile, in any process, goes to stderr.
    """
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except OSError:  # captured in this process
        yield sys.stdout.buffer
        return
    own = os.dup(number)
    os.dup2(sys.stderr.fileno(), number)
    try:
        with open(own, "wb", buffering=0, closefd=False) as file:
            yield file
    finally:
        sys.stdout.flush()
        os.dup2(own, number)
        os.close(own)


class Verdicts(Protocol):
    """Where verdicts are shown."""

    def show(self, graded: Graded) -> None:
        """The next verdict, in the order of the lines."""

    def end(self, tally: Tally) -> None:
        """All were shown."""


class Tally:
    """What a summary needs of the verdicts."""

    def __init__(self) -> None:
        self.lines = 0
        self.readable = 0
        self.rewards: list[float] = []
        self.no_answer = 0
        self.ungraded: Counter[str] = Counter()
        """By the rule that was broken, without what was got instead."""
        self.failures: list[str] = []
        """The first `SHOWN` of the lines without a verdict, each with its reason."""

    def add(self, graded: Graded) -> None:
        """Count a verdict."""
        self.lines += 1
        self.readable += not graded.line.fault
        if graded.reward.value is not None:
            self.rewards.append(graded.reward.value)
            self.no_answer += graded.reward.lacks_answer
            return
        self.ungraded[graded.reward.failure.partition(", got ")[0]] += 1
        if len(self.failures) < SHOWN:
            self.failures.append(f"{graded.line.place}: {graded.reward.failure}")


class JsonLines:
    """One JSON object for each line."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def show(self, graded: Graded) -> None:
        """Write it."""
        verdict = {
            "reward": graded.reward.value,
            "extracted": graded.reward.extracted or None,
            "reason": graded.reason,
            "seconds": round(graded.seconds, 6),
        }
        # Half of a surrogate pair has no UTF-8; a backslash makes it the escape that JSON has for it.
        text = json.dumps({**graded.line.copied, **verdict}, ensure_ascii=False) + "\n"
        _write(self._out, text)

    def end(self, tally: Tally) -> None:
        """The lines are all."""


class Rows:
    """A table for people, row by row, and a summary. width: columns of the terminal."""

    def __init__(self, out: BinaryIO, width: int) -> None:
        self._out = out
        rest = max(48, width) - len(f"{'reward':>7}  {'seconds':>8}") - 3 * len("  ")
        self._place = min(rest // 4, 32)
        self._extracted = (rest - self._place) // 3
        self._reason = rest - self._place - self._extracted
        self._row("line", "reward", "seconds", "extracted", "reason")

    def show(self, graded: Graded) -> None:
        """Write it."""
        value = graded.reward.value
        reward = "-" if value is None else f"{value:.4g}"
        reason = graded.line.fault or graded.reason or "-"
        self._row(graded.line.place, reward, f"{graded.seconds:.3f}", graded.reward.extracted or "-", reason)

    def end(self, tally: Tally) -> None:
        """The summary, after the last row."""
        _write(self._out, "\n" + "".join(f"{name:16}  {value}\n" for name, value in _summary(tally)))

    def _row(self, place: str, reward: str, seconds: str, extracted: str, reason: str) -> None:
        cells = [
            _cut(place.rpartition("/")[2], self._place),
            f"{reward:>7}",
            f"{seconds:>8}",
            _cut(extracted, self._extracted),
            _cut(reason, self._reason),
        ]
        _write(self._out, "  ".join(cells).rstrip() + "\n")


class Counted:
    """Progress on stderr: a bar on a terminal that does not show the verdicts; elsewhere a line every ten seconds.

    total: lines there are; None where only reading tells.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done, self._said = 0, time.monotonic()
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("graded"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or sys.stdout.isatty(),
            transient=True,
            redirect_stdout=False,  # it is the verdicts'
        )
        self._task = self._bar.add_task("graded", total=total)

    def __enter__(self) -> Counted:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """One more is graded."""
        self._done += 1
        self._bar.advance(self._task)
        if not self._bar.console.is_terminal and time.monotonic() - self._said >= PLAIN_EVERY_S:
            self._said = time.monotonic()
            complain(f"{self._done}{'' if self._total is None else f' of {self._total}'} lines graded")


def _summary(tally: Tally) -> Iterator[tuple[str, str]]:
    graded = len(tally.rewards)
    yield "graded", f"{graded} of {tally.lines} lines"
    if graded:
        yield "mean reward", f"{sum(tally.rewards) / graded:.4g}"
        if set(tally.rewards) <= {0.0, 1.0}:
            yield "right", _share(int(sum(tally.rewards)), graded)
        else:
            yield "range", f"{min(tally.rewards):.4g} to {max(tally.rewards):.4g}"
        yield "no answer found", _share(tally.no_answer, graded)
    for rule, count in tally.ungraded.most_common(SHOWN):
        yield "ungraded", f"{count}: {_cut(rule, 200).rstrip()}"


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({count / total:.1%})"


def _cut(text: str, width: int) -> str:
    """Text of others in so many columns of a terminal: without control characters, and with dots where it is cut."""
    shown = printable(text[: 4 * width])
    if len(text) <= 4 * width and cell_len(shown) <= width:
        return set_cell_size(shown, width)
    return set_cell_size(shown, width - 3) + "..."


def _write(out: BinaryIO, text: str) -> None:
    try:
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        while left:
            left = left[out.write(left) :]
    except BrokenPipeError:  # the reader has seen enough: the command line's edge ends without a word
        raise
    except OSError as error:
        raise RunInvalid(f"stdout must be writable, got {error.strerror}; make room, or write elsewhere") from error
