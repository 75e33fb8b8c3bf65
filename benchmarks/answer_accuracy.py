"""Measures how often graders of mathematical answers are right, on the labelled pairs of `tests/data`.

Called by `verifiers.py --accuracy`. Each grader runs in its own process, so that a pair that takes too long or kills
the process affects only itself. Such a pair counts as reward 0, and so do an exception and a reference that cannot be
used.

Precision: share of right answers among those with reward 1. Recall: share of answers with reward 1 among the right
ones. Both are also given for boxed answers alone, because most other graders are made for these and do not know other
marks.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_START_S = 300
"""Longest start of a grader on a loaded machine. TRL's imports transformers."""

type Grader = Callable[[str, str, str], float | None]
"""Maps reference, completion and mark to the reward. None: the reference cannot be used."""


@dataclass(frozen=True)
class Pair:
    """A completion, its reference and the right reward."""

    form: str
    reference: str
    completion: str
    reward: int
    mark: str = "####"
    note: str = ""

    @property
    def is_boxed(self) -> bool:
        """Whether the completion has a box, and no mark that takes precedence over it."""
        return r"\boxed{" in self.completion and self.mark not in self.completion


@dataclass(frozen=True)
class Outcome:
    """A grader's result for a pair."""

    pair: Pair
    reward: float | None
    """None: the reference cannot be used."""
    fault: str = ""
    """Name of the exception, or `time-out`. The reward is then 0."""

    @property
    def is_one(self) -> bool:
        """Whether the answer got reward 1."""
        return self.reward is not None and self.reward > 0.5


@dataclass
class Tally:
    """Counts of a grader's outcomes."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def false_ones(self) -> list[Outcome]:
        """Wrong answers with reward 1."""
        return [outcome for outcome in self.outcomes if outcome.is_one and not outcome.pair.reward]

    @property
    def false_zeros(self) -> list[Outcome]:
        """Right answers without reward 1."""
        return [outcome for outcome in self.outcomes if outcome.pair.reward and not outcome.is_one]

    @property
    def precision(self) -> float:
        """NaN if no answer got 1."""
        ones = sum(outcome.is_one for outcome in self.outcomes)
        return 1 - len(self.false_ones) / ones if ones else float("nan")

    @property
    def recall(self) -> float:
        """NaN if no answer is right."""
        right = sum(outcome.pair.reward for outcome in self.outcomes)
        return 1 - len(self.false_zeros) / right if right else float("nan")

    def boxed(self) -> Tally:
        """The pairs with only a boxed answer, the form that most other graders expect."""
        return Tally([outcome for outcome in self.outcomes if outcome.pair.is_boxed])

    def figures(self) -> dict[str, Any]:
        """Return a row of the table, and the mistakes by form."""
        return {
            "pairs": len(self.outcomes),
            "precision": self.precision,
            "recall": self.recall,
            "false 1s": dict(Counter(outcome.pair.form for outcome in self.false_ones)),
            "false 0s": dict(Counter(outcome.pair.form for outcome in self.false_zeros)),
            "pairs whose reference was refused": sum(outcome.reward is None for outcome in self.outcomes),
            "faults": dict(Counter(outcome.fault for outcome in self.outcomes if outcome.fault)),
        }


class GraderFailed(Exception):
    """The grader could not be made, because a package is missing."""


class GraderProcess:
    """A grader in its own process, which is replaced if a pair exceeds the time limit or kills it."""

    def __init__(self, make: Callable[[], Grader], limit_s: float) -> None:
        self._make = make
        self._limit_s = limit_s
        self._start()

    def _start(self) -> None:
        """Start the process and wait at most _START_S for it. Raises GraderFailed."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._make))
        self._process.start()
        theirs.close()
        try:
            problem = self._pipe.recv() if self._pipe.poll(_START_S) else f"no start within {_START_S} s"
        except EOFError:
            problem = "the process ended"
        if problem:
            self.close()
            raise GraderFailed(problem)

    def grade(self, pair: Pair) -> Outcome:
        """Grade a pair. Waits at most the time limit."""
        try:
            self._pipe.send((pair.reference, pair.completion, pair.mark))
            if self._pipe.poll(self._limit_s):
                return Outcome(pair, *self._pipe.recv())
            fault = "time-out"
        except (EOFError, OSError):
            fault = "process ended"
        self.close()
        self._start()
        return Outcome(pair, 0.0, fault)

    def close(self) -> None:
        """Kill the process and its children."""
        assert self._process.pid is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):  # the process has not made its own group yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, make: Callable[[], Grader]) -> None:
    """Grade pairs until the pipe or the process is closed."""
    os.setsid()  # own process group: a grader's children are killed with it
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())  # output of graders would appear between the tables
    os.dup2(silence, sys.stderr.fileno())
    try:
        grade = make()
    except Exception as error:  # noqa: BLE001 - the edge of this process: it reports the reason and ends
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send("")
    while True:
        try:
            reference, completion, mark = pipe.recv()
        except EOFError:
            return
        try:
            result = grade(reference, completion, mark), ""
        except Exception as error:  # noqa: BLE001 - the edge of this process: the error is counted
            result = 0.0, type(error).__name__
        pipe.send(result)


def read_pairs(file: Path) -> list[Pair]:
    """Read the labelled pairs of a file."""
    return [Pair(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def tally(pairs: Iterable[Pair], make: Callable[[], Grader], limit_s: float) -> Tally:
    """Grade all pairs. Raises GraderFailed."""
    process = GraderProcess(make, limit_s)
    try:
        return Tally([process.grade(pair) for pair in pairs])
    finally:
        process.close()


def tables(title: str, tallies: dict[str, Tally]) -> Iterator[Table]:
    """Make the table of precision and recall per grader, then the mistakes by form."""
    summary = Table(title=title)
    summary.add_column("grader")
    columns = ("precision", "recall", "false 1s", "false 0s", "references refused", "faults")
    for column in (*columns, "boxed: precision", "boxed: recall"):
        summary.add_column(column, justify="right")
    for name, counted in tallies.items():
        figures = counted.figures()
        boxed = counted.boxed()
        summary.add_row(
            name,
            f"{counted.precision:.4f}",
            f"{counted.recall:.4f}",
            str(len(counted.false_ones)),
            str(len(counted.false_zeros)),
            str(figures["pairs whose reference was refused"]),
            str(sum(figures["faults"].values())),
            f"{boxed.precision:.4f}",
            f"{boxed.recall:.4f}",
        )
    yield summary
    forms = Table(title="false 1s and false 0s by form, where there are any")
    forms.add_column("form")
    for name in tallies:
        forms.add_column(name.replace(" ", "\n", 1), justify="right")
    mistakes = {name: counted.figures() for name, counted in tallies.items()}
    every = [outcome.pair.form for counted in tallies.values() for outcome in counted.outcomes]
    for form in dict.fromkeys(every):
        counts = [(figures["false 1s"].get(form, 0), figures["false 0s"].get(form, 0)) for figures in mistakes.values()]
        if any(ones or zeros for ones, zeros in counts):
            forms.add_row(form, *(f"{ones} + {zeros}" if ones or zeros else "" for ones, zeros in counts))
    yield forms


def measure_accuracy(
    files: Iterable[Path], makers: dict[str, Callable[[], Grader]], limit_s: float, console: Console
) -> dict[str, dict[str, Tally]]:
    """Measure and print all graders. Returns results by file name and grader."""
    measured: dict[str, dict[str, Tally]] = {}
    for file in files:
        pairs = read_pairs(file)
        tallies = measured[file.name] = {}
        for name, make in makers.items():
            try:
                tallies[name] = tally(pairs, make, limit_s)
            except GraderFailed as error:
                console.print(f"{name}: left out; {error}", markup=False)
        for table in tables(f"{file.name}: {len(pairs)} pairs", tallies):
            console.print(table)
    return measured


def show_mistakes(outcomes: Iterable[Outcome], console: Console) -> None:
    """Print one line per mistake."""
    for outcome in outcomes:
        pair = outcome.pair
        line = f"{pair.form}: must be {pair.reward}, got {outcome.reward} {outcome.fault}".rstrip()
        console.print(f"{line}: {pair.reference!r} <- {pair.completion[-120:]!r}", markup=False, soft_wrap=True)
