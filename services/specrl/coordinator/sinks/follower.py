"""Carries a run's reports from its files to one sink, in a thread of its own, which nothing waits for.

    OPENING --opened--> FOLLOWING --`end`, and all is given--> CLOSED
       ^   \\               |
       |    `--fails--> AWAY <--fails--'        every failure is counted, the first of a row is logged
       `------after a pause---'                 after `end`: one more attempt, then LEFT BEHIND

The thread waits for its pause and for `end`, which wakes it; a sink's library may hold it for ever. `join` waits for
the thread, for as long as it is told. What is in the files and not in the sink is given to it when it is next opened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import ValidationError

from specrl.coordinator.report import Phase, Report, StepReport, ValidationReport
from specrl.coordinator.report_files import METRICS, VALIDATIONS
from specrl.coordinator.sinks.contract import Received, Sink, SinkRun
from specrl.files import Follow
from specrl.telemetry import metrics

LOOK_S = 1.0
"""Between two looks at the files: a step takes seconds, and people look at sinks less often."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""After a failure; doubled each time."""
THREAD = "sink-"
"""How the threads' names begin."""


log = structlog.get_logger(__name__)


class Follower:
    """One sink of one run."""

    def __init__(self, name: str, run: SinkRun, open_sink: Callable[[], Sink], look_s: float = LOOK_S) -> None:
        self._name, self._run, self._open, self._look_s = name, run, open_sink, look_s
        self._end = threading.Event()
        self._phase: Phase = Phase.STOPPED
        self._is_away = False
        self._failures = metrics.SINK_FAILURES.labels(run.spec.name, name)
        self._last_step = metrics.SINK_STEP.labels(run.spec.name, name)
        self._thread = threading.Thread(target=self._work, name=f"{THREAD}{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, phase: Phase) -> None:
        """The run has ended in `phase`: give the sink what is left, and close it."""
        self._phase = phase
        self._end.set()

    def join(self, within_s: float) -> float:
        """Wait until it has; returns the seconds that it took. One that takes longer is left behind."""
        began = time.monotonic()
        self._thread.join(max(within_s, 0.0))
        if self._thread.is_alive():
            log.warning("sink_left_behind", sink=self._name, reason="it did not end in time")
        return time.monotonic() - began

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            is_last = self._end.is_set()
            try:
                self._attempt()
                return
            except Exception as error:  # noqa: BLE001 - the edge of a thread: libraries of others, servers of others
                self._failed(error)
            if is_last:
                log.warning("sink_left_behind", sink=self._name, reason="it failed at the end")
                return
            self._end.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _attempt(self) -> None:
        """Follow the files until the end. Raises what the sink raises."""
        sink = self._open()
        try:
            self._follow(sink)
        except BaseException:
            with suppress(Exception):  # it has failed already
                sink.close(None)
            raise
        sink.close(self._phase)

    def _follow(self, sink: Sink) -> None:
        received = sink.received()
        steps, validations = tails(self._run.directory, received)
        self._last_step.set(received.step)
        while True:
            is_end = self._end.is_set()  # looked at before the files, so that what was written before it is given
            for reports in steps.new():
                for step in reports:
                    sink.step(step)
                sink.flush()
                self._last_step.set(reports[-1].step)
            for versions in validations.new():
                for validation in versions:
                    sink.validation(validation)
                sink.flush()
            self._succeeded()
            if is_end:
                return
            self._end.wait(self._look_s)

    def _failed(self, error: Exception) -> None:
        self._failures.inc()
        if not self._is_away:
            log.warning("sink_lost", sink=self._name, reason=f"{type(error).__name__}: {error}")
        self._is_away = True

    def _succeeded(self) -> None:
        if self._is_away:
            log.info("sink_found", sink=self._name)
        self._is_away = False


def tails(directory: Path, received: Received) -> tuple[_Tail[StepReport], _Tail[ValidationReport]]:
    """What a sink has not received of a run's steps, and of its validations."""
    return (
        _Tail(directory / METRICS, StepReport, lambda report: report.step, received.step),
        _Tail(directory / VALIDATIONS, ValidationReport, lambda report: report.policy_version, received.version),
    )


class _Tail[R: Report]:
    """What is added to a file of reports. last: the number of the last report that is not wanted again."""

    def __init__(self, path: Path, kind: type[R], number: Callable[[R], int], last: int) -> None:
        self._file, self._kind, self._number, self._last = Follow(path), kind, number, last

    def new(self) -> Iterator[list[R]]:
        """Reports since the last call, in lists that are not empty. The next list is read when one is taken."""
        while lines := self._file.lines():
            found = [report for report in map(self._parsed, lines) if report is not None]
            wanted = []
            for report in found:
                if self._number(report) > self._last:
                    wanted.append(report)
                    self._last = self._number(report)
            if wanted:
                yield wanted

    def _parsed(self, line: bytes) -> R | None:
        try:
            return self._kind.model_validate_json(line)
        except ValidationError:  # another version's, or a disk's: it is only shown
            return None
