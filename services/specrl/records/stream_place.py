"""Where a run stands in its stream of prompts: what a checkpoint keeps of the data."""

from __future__ import annotations

from dataclasses import dataclass

from specrl.errors import RecordInvalid

MOST_AHEAD = 1 << 16
"""Places beyond the cursor: a few steps' prompts with order Windowed, none else."""

END = 1 << 53
"""No stream gets so far: what is beyond is not a place."""


@dataclass(frozen=True)
class StreamPlace:
    """What trained steps have settled: trained, or reported as failed.

    cursor: first place that is not settled. ahead: settled ones beyond it, ascending. problems: of one epoch, so that
    place p lies in epoch p // problems. identity: digest of the problems, their number and their order; another digest
    is another stream.
    """

    cursor: int
    ahead: tuple[int, ...]
    problems: int
    identity: str

    @property
    def settled(self) -> int:
        """How many places."""
        return self.cursor + len(self.ahead)

    def check(self) -> None:
        """Raise RecordInvalid unless this is a place that a stream has."""
        rises = all(first < second for first, second in zip((self.cursor, *self.ahead), self.ahead, strict=False))
        last = max(self.cursor, *self.ahead, self.problems)
        if self.cursor < 0 or self.problems < 1 or not rises or last >= END or len(self.ahead) > MOST_AHEAD:
            raise RecordInvalid(
                "a place in the data stream must be a cursor >= 0 of >= 1 problems, and ascending places beyond it, "
                f"got cursor={self.cursor}, {len(self.ahead)} beyond it, problems={self.problems}; report it as it is"
            )
        if not self.identity.isalnum() or len(self.identity) > 64:
            raise RecordInvalid(f"a data stream's identity must be a digest, got {self.identity[:64]!r}; report it")
