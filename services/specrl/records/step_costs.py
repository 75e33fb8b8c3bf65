"""What steps of an engine have taken, as sums over like ones: enough to fit a cost, and small enough for a heartbeat.

Like are steps of nearly the same number of live rollouts (half powers of two), the same draft length, and a context of
the same power of two. `generation` counts, the coordinator writes them into calibration.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specrl.errors import RecordInvalid

LONGEST_DRAFT = 1024
"""Positions of a draft. Drafts are shorter than a hundred tokens."""

MOST_BINS = 512
"""Of one engine; steps of others are not counted. Three times what 64 live rollouts and 8 draft tokens can have."""


@dataclass(frozen=True)
class StepCost:
    """Sums over `steps` steps of nothing but decoding. Live rollouts, their mean context in tokens, seconds."""

    draft_tokens: int
    steps: int
    live_sum: float
    context_sum: float
    seconds_sum: float

    @property
    def bin(self) -> tuple[int, int, int]:
        """What it may be added up with."""
        steps = max(1, self.steps)
        return bin_of(self.live_sum / steps, self.draft_tokens, self.context_sum / steps)

    def minus(self, before: StepCost | None) -> StepCost:
        """What the same engine added since; all of it when a sum is smaller now, which then began anew."""
        if before is None:
            return self
        since = StepCost(
            self.draft_tokens,
            self.steps - before.steps,
            self.live_sum - before.live_sum,
            self.context_sum - before.context_sum,
            self.seconds_sum - before.seconds_sum,
        )
        return since if min(since.steps, since.live_sum, since.context_sum, since.seconds_sum) >= 0 else self

    def check(self) -> None:
        """Raise RecordInvalid unless these are sums that steps can have."""
        sums = (self.live_sum, self.context_sum, self.seconds_sum)
        values = (self.draft_tokens, self.steps, *sums)
        if not all(math.isfinite(value) and 0 <= value < 1e18 for value in values):
            raise RecordInvalid(f"a step's cost must be of finite sums from 0 up, got {values}; count again")
        if self.draft_tokens > LONGEST_DRAFT or max(sums) >= 1e12 * max(1, self.steps):
            raise RecordInvalid(
                f"a step's cost must be of at most {LONGEST_DRAFT} draft tokens and means below 1e12, got {values}; "
                "count again"
            )


def bin_of(live: float, draft_tokens: int, context: float) -> tuple[int, int, int]:
    """Of a step: half powers of two of live rollouts, draft length, powers of two of context."""
    return round(2 * math.log2(max(1.0, live))), draft_tokens, int(math.log2(max(1.0, context)))
