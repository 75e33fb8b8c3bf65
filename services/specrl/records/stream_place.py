"""The position of a run in its stream of prompts. A checkpoint records it, so that a resumed run repeats no prompt."""

from __future__ import annotations

from dataclasses import dataclass

from specrl.errors import RecordInvalid

POSITION_BOUND = 1 << 53
"""Bound of positions, and of prompts in an epoch. No stream gets this far."""


@dataclass(frozen=True)
class StreamPlace:
    """How much of the stream the trained steps have settled, by training a prompt or reporting it as failed.

    cursor: first position that is not settled, from 0. problems: prompts in one epoch, so that position p lies in epoch
    p // problems. identity: digest of the prompts, their number and their order; streams with other digests differ.
    """

    cursor: int
    problems: int
    identity: str

    def check(self) -> None:
        """Raise RecordInvalid unless a stream can have this position and identity."""
        if not (0 <= self.cursor < POSITION_BOUND and 1 <= self.problems < POSITION_BOUND):
            raise RecordInvalid(
                "a stream position must have cursor >= 0 and problems >= 1, "
                f"got cursor={self.cursor}, problems={self.problems}; use the same version of specrl everywhere"
            )
        if not self.identity.isalnum() or len(self.identity) > 64:
            raise RecordInvalid(
                f"the identity of a stream must be at most 64 letters and digits, got {self.identity[:64]!r}; use the "
                "same version of specrl everywhere"
            )
