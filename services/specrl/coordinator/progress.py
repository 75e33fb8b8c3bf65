"""How far the stream of prompts is settled.

A prompt is settled when a trained step took it: trained it, or reported it as failed. Each step settles promptsPerStep
of them, so below `cursor` all are, and beyond it those few that overtook a straggler (with order InOrder, none).

A step's report carries this, and the report is what makes a step trained: both are durable in one transaction, so a
restarted coordinator cannot train a prompt twice or forget one, although steps own no prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """step: last step trained. cursor: first place of the stream that is not settled. ahead: settled ones beyond it."""

    step: int = 0
    cursor: int = 0
    ahead: frozenset[int] = frozenset()

    @classmethod
    def reported(cls, step: int, cursor: int | None, ahead: Sequence[int], prompts_per_step: int) -> Progress:
        """As the report of `step` says; one without a cursor is of a run that knew no order but InOrder."""
        return cls(step, step * prompts_per_step if cursor is None else cursor, frozenset(ahead))

    @classmethod
    def from_fact(cls, fact: dict[str, Any] | None) -> Progress:
        """The inverse of `to_fact`; the beginning for None."""
        return cls() if fact is None else cls(fact["step"], fact["cursor"], frozenset(fact["ahead"]))

    def to_fact(self) -> dict[str, Any]:
        """As JSON, for the store."""
        return {"step": self.step, "cursor": self.cursor, "ahead": sorted(self.ahead)}

    def is_settled(self, position: int) -> bool:
        """Whether a trained step took the prompt at this place."""
        return position < self.cursor or position in self.ahead

    def after(self, positions: Iterable[int]) -> Progress:
        """As it is once the next step is trained and has taken these."""
        ahead, cursor = self.ahead.union(positions), self.cursor
        while cursor in ahead:
            cursor += 1
        return Progress(self.step + 1, cursor, frozenset(position for position in ahead if position > cursor))
