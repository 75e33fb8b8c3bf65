"""Runs one launch of a run: starts its programs, shows what they report, and stops them in order.

    STARTING -> RUNNING -> the coordinator reports finished or failed -> STOPPING -> DOWN
                        -> a program refuses to run or crashes too often -> STOPPING -> DOWN
                        -> Ctrl-C, SIGTERM or SIGHUP -> STOPPING -> DOWN (a second signal kills everything at once)

While the run is active, the launcher keeps as many replicas as the coordinator's status asks for (`specrl scale`).

There is one thread and one loop. Each iteration waits at most `TURN_S`, plus the coordinator's response times, which
`coordinator_client.REPORT_TIMEOUT_S` bounds. The loop also tells the coordinator which replicas it starts no more.
Signal handlers only increment a counter; the loop reads it.
Called by `launcher.launch`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

from specrl.coordinator.members.replica_states import ReplicaState
from specrl.errors import RunInvalid
from specrl.formats.reports import Phase, StatusReport
from specrl.launcher.coordinator_client import REPORT_TIMEOUT_S, CoordinatorReports, request_run_action
from specrl.launcher.processes.replicas import ReplicaScaler
from specrl.launcher.processes.supervisor import Program, RunEnd, RunOutcome, Supervisor
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.stored_reports import read_stored_status
from specrl.launcher.terminal.run_follower import RunFollower
from specrl.launcher.terminal.view import View

TURN_S = 0.25
SERVING = (ReplicaState.SERVING, ReplicaState.UPDATING)  # of a replica that has started and has its weights
GIVEN_UP_CHARACTERS = 2000  # of all reasons together; as JSON each character takes up to 6 bytes of the 16 KiB


class LocalRun:
    """One launch of one run. The caller holds the run's lock. replicas: None keeps the number of replicas constant."""

    def __init__(
        self,
        directory: RunDirectory,
        programs: Sequence[Program],
        reports: CoordinatorReports,
        view: View,
        replicas: ReplicaScaler | None = None,
    ) -> None:
        self._directory = directory
        self._supervisor = Supervisor(programs)
        self._reports = reports
        self._replicas = replicas
        self._view = view
        self._status_before_ns = 0  # when the status of an earlier launch was written; 0: there was none
        self._interrupts = 0  # the user's requests to stop so far
        self._follower = RunFollower(reports, view)
        self._told_given_up: dict[str, str] = {}  # what the coordinator was told last
        self._trained = 0  # the newest step so far; a step that is trained again after a crash is no progress

    def run_to_end(self, keep_serving: bool = False) -> RunOutcome:
        """Start all programs, wait until the run ends, and stop them. Returns how it ended.

        keep_serving: after a successful end, keep the coordinator's page up until Ctrl-C.
        """
        with suppress(OSError):
            self._status_before_ns = self._directory.status_file.stat().st_mtime_ns
        with self._count_interrupts(), self._supervisor:
            outcome = self._wait_for_end()
            if outcome.end is RunEnd.FINISHED and keep_serving:
                self._view.show_message(f"run finished; its page {self._reports.url} stays up until Ctrl-C")
                # Ends on a signal, or when a program ends the run.
                while self._interrupts == 0 and self._supervisor.poll() is None:
                    time.sleep(TURN_S)
            self._stop_programs(outcome.status)
        if outcome.end is RunEnd.INTERRUPTED:
            # The coordinator has written what it saved since the status that ended the wait.
            outcome = replace(outcome, status=read_stored_status(self._directory) or outcome.status)
        return outcome

    def _wait_for_end(self) -> RunOutcome:
        """Loop until the run ends: supervise the programs, show their reports, scale the replicas."""
        while True:
            ended = self._supervisor.poll()
            for notice in self._supervisor.take_notices():
                self._view.show_message(notice)
            if ended is not None:
                self._tell_given_up()
                return replace(ended, status=read_stored_status(self._directory))
            # Waits for the coordinator's answer, at most REPORT_TIMEOUT_S; None while it starts or restarts.
            status = self._follower.show_updates()
            if status is not None:
                self._forget_failures(status)
            if status is not None and self._knows_other_replicas(status):
                self._tell_given_up()
            if self._replicas is not None and status is not None and status.replicas_wanted is not None:
                scaled = self._replicas.scale_to(status.replicas_wanted, self._supervisor)
                if scaled is not None:
                    self._view.show_message(scaled)
            status = status or self._read_new_status()
            if status is not None and status.phase.is_over:
                return _outcome_from_status(status)
            if self._interrupts:
                return RunOutcome(RunEnd.INTERRUPTED, status=status)
            time.sleep(TURN_S)

    def _knows_other_replicas(self, status: StatusReport) -> bool:
        """Whether the coordinator must be told again which replicas are given up, such as after its restart."""
        given_up = self._supervisor.given_up
        return given_up != self._told_given_up or not given_up.keys() <= status.replicas_given_up.keys()

    def _tell_given_up(self) -> None:
        """Tell the coordinator which replicas are given up. If it does not answer, the next iteration tells it."""
        given_up = self._supervisor.given_up
        if given_up == self._told_given_up == {}:
            return
        # The coordinator accepts small bodies only, so that the ends of long reasons are left out.
        longest = GIVEN_UP_CHARACTERS // max(1, len(given_up))
        reasons = {name: reason[:longest] for name, reason in given_up.items()}
        with suppress(RunInvalid):
            request_run_action(self._directory, "PUT", "/given-up", {"reasons": reasons}, REPORT_TIMEOUT_S)
            self._told_given_up = given_up

    def _read_new_status(self) -> StatusReport | None:
        """Read the status in the folder if this launch has written it: others may keep the coordinator's page busy."""
        try:
            is_new = self._directory.status_file.stat().st_mtime_ns != self._status_before_ns
        except OSError:
            return None
        return read_stored_status(self._directory) if is_new else None

    def _stop_programs(self, status: StatusReport | None) -> None:
        """Stop the programs in order. A further signal kills them at once. status: the last one before the stop."""
        # The signal that caused this stop does not count as the second one.
        patience = self._interrupts + 1
        if self._interrupts:
            self._view.show_message(f"{describe_stopping(status)}; press Ctrl-C again to kill the run at once")
        self._supervisor.begin_stop()
        # Every program has a grace period, so the supervisor bounds this wait.
        while not self._supervisor.poll_stop():
            if self._interrupts >= patience:
                self._supervisor.kill_all()
                return
            status = self._reports.fetch_status() or read_stored_status(self._directory)
            if status is not None:
                self._view.show_status(status)
            time.sleep(TURN_S)

    def _forget_failures(self, status: StatusReport) -> None:
        serving = {it.id for it in status.replicas if it.state in SERVING}
        self._supervisor.forget_equal_failures(serving)
        if status.step > self._trained:
            self._trained = status.step
            self._supervisor.forget_crashes(serving)

    @contextmanager
    def _count_interrupts(self) -> Iterator[None]:
        """Count SIGINT, SIGTERM and SIGHUP (sent when the terminal closes) while the context is open.

        Outside the context these signals end the process, as usual. A signal that the process was started to ignore
        stays ignored: SIGHUP below nohup, SIGINT in a script's background jobs.
        """

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self._interrupts += 1

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = [(number, signal.signal(number, on_signal)) for number in heeded]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)


def describe_stopping(status: StatusReport | None) -> str:
    """Say what a stop waits for. status: the last one before the stop; None: the coordinator gave none."""
    if status is not None and status.phase is Phase.FINISHED:
        return "stopping: the run has finished, and its results are saved"
    if status is not None and status.phase is Phase.TRAINING:
        return "stopping: the trainer finishes its step, however long that takes, and writes a checkpoint"
    return "stopping: no step has begun since the start"


def _outcome_from_status(status: StatusReport) -> RunOutcome:
    if status.phase is Phase.FINISHED:
        return RunOutcome(RunEnd.FINISHED, status=status)
    if status.phase is Phase.FAILED:
        end = RunEnd.REFUSED if status.needs_user else RunEnd.FAILED
        return RunOutcome(end, status.error or status.detail or "the run failed", status)
    return RunOutcome(RunEnd.INTERRUPTED, "the coordinator was stopped", status)
