"""Counts how often in a row a peer refuses the same thing, and gives up one that will not change its mind. Pure.

A refusal is an answer in words, such as weights of another model. It is not a lost connection, a time-out, or a process
that died: those may be different the next time. A process that is started again begins with a clean count.

`weight_update.py` counts the refusals of replicas, and the loop those of the trainer.
"""

from __future__ import annotations

from specrl.errors import (
    ChecksumMismatch,
    EngineFailed,
    SpecrlError,
    StoreFailed,
    TrainerFailed,
    VersionConflict,
)

MAX_EQUAL_REFUSALS = 3
"""Equal refusals in a row after which a peer is given up."""

# Not retryable as calls, but another attempt or another process may succeed.
_MAY_PASS = (ChecksumMismatch, EngineFailed, StoreFailed, TrainerFailed, VersionConflict)


def is_refusal(error: BaseException | None) -> bool:
    """Whether a peer has answered that it will not do what it was asked."""
    return isinstance(error, SpecrlError) and not error.retryable and not isinstance(error, _MAY_PASS)


class RefusalCounter:
    """Counts by process. given_up: why a process was given up, by its incarnation."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, int]] = {}
        self.given_up: dict[str, str] = {}

    def count_refusal(self, incarnation: str, error: BaseException) -> bool:
        """Count a process's error. Returns whether the process is given up with it, which is true once for each."""
        if not is_refusal(error):
            self.forget_refusals(incarnation)
            return False
        before, count = self._last.get(incarnation, ("", 0))
        count = count + 1 if before == str(error) else 1
        self._last[incarnation] = (str(error), count)
        if count < MAX_EQUAL_REFUSALS or incarnation in self.given_up:
            return False
        self.given_up[incarnation] = str(error)
        return True

    def forget_refusals(self, incarnation: str) -> None:
        """Start counting from 0, after a success or another failure."""
        self._last.pop(incarnation, None)
