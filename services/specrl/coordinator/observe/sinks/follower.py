"""Copies a run's reports from its files to one sink, in a thread that the run never waits for.

    OPENING --opened--> FOLLOWING --`request_end`, all sent--> CLOSED
       ^   \\               |
       |    `--fails--> AWAY <--fails--'        every failure is counted, the first of a row is logged
       `------after a pause---'                 after `request_end`: one more attempt, then ABANDONED

The thread sleeps between two looks at the files and after a failure; `request_end` wakes it. A sink's library may block
it without bound. `join` bounds how long the end of the run waits for it. Reports that the
sink lacks are sent when it is opened next, by this process or after a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import ValidationError

from specrl.coordinator.observe.report_files import METRICS, VALIDATIONS
from specrl.coordinator.observe.sinks.contract import ReportSink, SinkRun
from specrl.files import LineFollower
from specrl.formats.reports import Phase, StepReport, ValidationReport
from specrl.telemetry import metrics

LOOK_S = 1.0
"""Seconds between two looks at the files. A step takes seconds, and users look at sinks less often."""
# Seconds to wait after a failure, doubled each time.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
THREAD = "sink-"
"""Prefix of the threads' names, by which `exit_process` finds threads that hang."""

log = structlog.get_logger(__name__)


class SinkFollower:
    """Feeds one sink of one run. look_s: seconds between two looks at the files."""

    def __init__(self, name: str, run: SinkRun, open_sink: Callable[[], ReportSink], look_s: float = LOOK_S) -> None:
        self._name = name
        self._run = run
        self._open = open_sink
        self._look_s = look_s
        self._end = threading.Event()
        self._phase: Phase = Phase.STOPPED
        self._is_away = False
        self._failures = metrics.SINK_FAILURES.labels(run.spec.name, name)
        self._last_step = metrics.SINK_STEP.labels(run.spec.name, name)
        self._thread = threading.Thread(target=self._run_thread, name=f"{THREAD}{name}", daemon=True)

    def start(self) -> None:
        """Start the thread, which opens the sink."""
        self._thread.start()

    def request_end(self, phase: Phase) -> None:
        """Ask the thread to send the remaining reports and close the sink. phase: the phase in which the run ended."""
        self._phase = phase  # before the event, which publishes it to the thread
        self._end.set()

    def join(self, within_s: float) -> float:
        """Wait for the thread for up to `within_s`. Returns the seconds waited. Abandons a thread that takes longer."""
        began = time.monotonic()
        self._thread.join(max(within_s, 0.0))
        if self._thread.is_alive():
            log.warning("sink_abandoned", sink=self._name, reason="it did not end in time")
        return time.monotonic() - began

    def _run_thread(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            # Read before the attempt: if the end is requested during it, one more attempt follows.
            is_last = self._end.is_set()
            try:
                self._follow_until_end()
                return
            except Exception as error:  # noqa: BLE001 - the edge of a thread: a sink's library may raise anything
                self._record_failure(error)
            if is_last:
                log.warning("sink_abandoned", sink=self._name, reason="it failed at the end")
                return
            self._end.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _follow_until_end(self) -> None:
        """Open the sink and follow the files until the end. Raises what the sink raises."""
        sink = self._open()
        try:
            self._send_reports(sink)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                sink.close(None)
            raise
        sink.close(self._phase)

    def _send_reports(self, sink: ReportSink) -> None:
        received = sink.read_progress()
        steps = ReportTail(self._run.directory / METRICS, StepReport, received.step)
        validations = ReportTail(self._run.directory / VALIDATIONS, ValidationReport, received.version)
        self._last_step.set(received.step)
        while True:
            # Read before the files, so that everything written before the end was requested is sent.
            is_end = self._end.is_set()
            for reports in steps.read_new():
                for step in reports:
                    sink.add_step(step)
                sink.flush()
                self._last_step.set(reports[-1].step)
            for versions in validations.read_new():
                for validation in versions:
                    sink.add_validation(validation)
                sink.flush()
            self._record_success()
            if is_end:
                return
            self._end.wait(self._look_s)

    def _record_failure(self, error: Exception) -> None:
        self._failures.inc()
        if not self._is_away:
            log.warning("sink_lost", sink=self._name, reason=f"{type(error).__name__}: {error}")
        self._is_away = True

    def _record_success(self) -> None:
        if self._is_away:
            log.info("sink_recovered", sink=self._name)
        self._is_away = False


class ReportTail[R: (StepReport, ValidationReport)]:
    """Reads the lines that are appended to a file of reports. last: reports up to this policy version are skipped."""

    def __init__(self, path: Path, kind: type[R], last: int) -> None:
        self._file = LineFollower(path)
        self._kind: type[R] = kind
        self._last = last

    def read_new(self) -> Iterator[list[R]]:
        """Yield the reports since the last call, in non-empty lists. Each list is read only when it is requested."""
        while lines := self._file.read_lines():
            wanted = []
            for line in lines:
                # A line of another version or a damaged line is skipped, since it is only displayed.
                with suppress(ValidationError):
                    report = self._kind.model_validate_json(line)
                    if report.policy_version > self._last:
                        wanted.append(report)
                        self._last = report.policy_version
            if wanted:
                yield wanted
