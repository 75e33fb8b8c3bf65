"""Drives one run on this machine: starts its programs, shows what they report, stops them in order.

    STARTING -> RUNNING -> coordinator says finished or failed -> STOPPING -> DOWN
                        -> a program refuses or is given up on -> STOPPING -> DOWN
                        -> Ctrl-C, SIGTERM or SIGHUP           -> STOPPING -> DOWN; a second one kills at once

While it runs, it keeps as many replicas as the coordinator's status says (`specrl scale`).

One thread, one loop. Each turn waits at most `TURN_S`, plus what the coordinator takes to answer (bounded by
`reports.TIMEOUT_S`). A signal only counts; the loop looks at the count.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType

from specrl.coordinator.report import Phase, Status
from specrl.launcher.follow import Follower
from specrl.launcher.replicas import Replicas
from specrl.launcher.reports import CoordinatorReports, stored_status
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.supervisor import Ending, Program, Supervisor, Verdict
from specrl.launcher.view import View

TURN_S = 0.25
_ENDED = (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)


class Ended(StrEnum):
    """How a launch came to its end. REFUSED: it would end so again until its user has repaired something."""

    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Outcome:
    """The end of a launch. message: what to tell the user, empty when all is well."""

    ended: Ended
    message: str = ""
    status: Status | None = None


class Interrupts:
    """How often the user has asked to stop."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count SIGINT, SIGTERM and SIGHUP (the terminal was closed) instead of dying of them."""

        def count(_number: int, _frame: FrameType | None) -> None:
            self.count += 1

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [(number, signal.signal(number, count)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)


class LocalRun:
    """One launch of one run. The caller holds the run's lock. replicas: None keeps those that it began with."""

    def __init__(
        self,
        directory: RunDirectory,
        programs: Sequence[Program],
        reports: CoordinatorReports,
        view: View,
        replicas: Replicas | None = None,
    ) -> None:
        self._directory = directory
        self._supervisor = Supervisor(programs)
        self._reports, self._replicas = reports, replicas
        self._view = view
        self._interrupts = Interrupts()
        self._follower = Follower(reports, view)

    def drive(self, keep_serving: bool = False) -> Outcome:
        """Run to the end. keep_serving: after a good end the coordinator's page stays up until Ctrl-C."""
        with self._interrupts.counted(), self._supervisor:
            outcome = self._watch()
            if outcome.ended is Ended.FINISHED and keep_serving:
                self._view.message(f"finished; {self._reports.url} stays up until Ctrl-C")
                while self._interrupts.count == 0 and self._supervisor.poll() is None:
                    time.sleep(TURN_S)
            self._stop()
        return outcome

    def _watch(self) -> Outcome:
        """Turn until something ends the run."""
        while True:
            verdict = self._supervisor.poll()
            for notice in self._supervisor.take_notices():
                self._view.message(notice)
            if verdict is not None:
                return self._judged(verdict)
            status = self._follower.turn()
            if self._replicas is not None and status is not None and status.replicas_wanted is not None:
                self._replicas.keep(status.replicas_wanted, self._supervisor, self._view)
            if status is not None and status.phase in _ENDED:
                return _ended(status)
            if self._interrupts.count:
                return Outcome(Ended.INTERRUPTED, status=status)
            time.sleep(TURN_S)

    def _stop(self) -> None:
        """Bring everything down in order; at once when the user asks again."""
        patience = self._interrupts.count + 1
        if self._interrupts.count:
            self._view.message("stopping: the run is being saved; press Ctrl-C again to kill it at once")
        self._supervisor.begin_stop()
        while not self._supervisor.poll_stop():
            if self._interrupts.count >= patience:
                self._supervisor.kill_all()
                return
            status = self._reports.status() or stored_status(self._directory)
            if status is not None:
                self._view.show(status)
            time.sleep(TURN_S)

    def _judged(self, verdict: Verdict) -> Outcome:
        ended = {
            Ending.REFUSED: Ended.REFUSED,
            Ending.GIVEN_UP: Ended.FAILED,
            Ending.ENDED: Ended.INTERRUPTED,
        }
        return Outcome(ended[verdict.ending], verdict.message, stored_status(self._directory))


def _ended(status: Status) -> Outcome:
    if status.phase is Phase.FINISHED:
        return Outcome(Ended.FINISHED, status=status)
    if status.phase is Phase.FAILED:
        ended = Ended.REFUSED if status.needs_user else Ended.FAILED
        return Outcome(ended, status.error or status.detail or "the run failed", status)
    return Outcome(Ended.INTERRUPTED, "the coordinator was stopped", status)
