"""The phase of a run, with its progress in words and numbers.

Set by the loop and by `main`; read by probes and observers.

    WAITING -> INITIALISING -> TRAINING -> FINISHED        from any: FAILED, STOPPED
"""

from __future__ import annotations

from specrl.coordinator.ledger.ledger import Ledger
from specrl.coordinator.run_events import PhaseEntered, RunEvents
from specrl.formats.reports import Phase


class RunPhase:
    """The phase of one run.

    done, total: progress of the current activity; both 0 if it cannot be counted.
    error: why the run has failed; empty otherwise.
    needs_user: the run would fail again after a restart, until the user repairs something.
    """

    def __init__(self, ledger: Ledger, events: RunEvents) -> None:
        self._ledger = ledger
        self._events = events
        self._detail = "starting"
        self.phase = Phase.WAITING
        self.done = 0
        self.total = 0
        self.error = ""
        self.needs_user = False

    def update(self, phase: Phase, detail: str, done: int = 0, total: int = 0) -> None:
        """Set phase and progress. Publishes PhaseEntered if the phase is another one than before."""
        has_moved = phase is not self.phase
        self.phase = phase
        self._detail = detail
        self.done = done
        self.total = total
        if has_moved:
            self._events.publish(PhaseEntered(phase))

    def mark_failed(self, error: str, *, needs_user: bool) -> None:
        """Note that the run has failed with this error."""
        self.error = error
        self.needs_user = needs_user
        self.update(Phase.FAILED, "failed")

    @property
    def detail(self) -> str:
        """The current activity in words. An unreachable store or a pause comes first, since it blocks the run."""
        if self._ledger.outage_reason:
            return f"waiting for the store: {self._ledger.outage_reason}"
        is_going = self.phase in (Phase.WAITING, Phase.INITIALISING, Phase.TRAINING)
        return f"paused; {self._detail}" if is_going and self._ledger.facts.is_paused else self._detail

    @property
    def is_store_reachable(self) -> bool:
        """Whether the store can be reached."""
        return not self._ledger.outage_reason

    @property
    def is_ready(self) -> bool:
        """Whether the run has begun, has not failed, and can reach its store. Answers the readiness probe."""
        return self.phase not in (Phase.WAITING, Phase.FAILED) and self.is_store_reachable
