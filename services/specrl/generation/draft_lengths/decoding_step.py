"""One step of the engine, as the scheduler sees it, and which steps have a duration that can be compared. Pure.

A step verifies the drafts of the step before it. The time between two calls of the scheduler belongs to the first of
the two steps or, with async scheduling, to the one before that. So a step can be compared only if the two steps before
it had the same length. The prompt tokens of a duration are likewise the mean of its step and the one before.
"""

from __future__ import annotations

from typing import NamedTuple

OFF = -1
"""The draft length at which the drafter does not run at all."""

COMPARED_AFTER = 2
"""Steps before a step that decide whether it can be compared."""

CLOSE = 8
"""Batches that differ by at most 1/8 of their size count as equal."""


class Step(NamedTuple):
    """One step of the engine."""

    at_s: float
    """When it was scheduled."""
    batch: int
    """Requests in it."""
    length: int
    """Draft tokens of each request, or OFF."""
    read: int
    """Prompt tokens that it computes."""
    is_catch_up: bool = False
    """Whether these tokens were computed before without the drafter, which now catches up."""

    def is_comparable(self, two_before: Step, before: Step) -> bool:
        """Whether the time from this step to the next is the cost of its length. The others are the steps before it."""
        # With more prompt tokens than verified ones, a step's duration is that of the prompts.
        is_decoding = self.batch > 0 and self.read + before.read <= 2 * self.batch * (max(0, self.length) + 1)
        is_same_length = two_before.length == before.length == self.length
        return (
            is_decoding
            and is_same_length
            and abs(self.batch - before.batch) * CLOSE <= self.batch
            and not self.is_catch_up
        )
