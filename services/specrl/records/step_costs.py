"""Measured durations of an engine's decoding steps, summed over similar steps.

The sums suffice to fit a cost model, and are small enough for a status reply. Steps are similar if they have the same
draft length, a context of the same power of two, and nearly the same number of live rollouts (within half a power of
two). `generation/step_times.py` counts them, and the coordinator writes them into calibration.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specrl.errors import RecordInvalid

LONGEST_DRAFT = 1024
"""Bound of a draft's tokens in a message. Real drafts are shorter than a hundred tokens."""

MAX_BINS = 512
"""Bins of one engine; a step that would need another is not counted.

Three times the number of bins that 64 live rollouts with 8 draft tokens can fill.
"""


@dataclass(frozen=True)
class StepCost:
    """Sums over `steps` engine steps that only decoded.

    live_sum: live rollouts. context_sum: mean context of a live rollout, in tokens with its prompt. seconds_sum:
    durations.
    """

    draft_tokens: int
    steps: int
    live_sum: float
    context_sum: float
    seconds_sum: float

    @property
    def bin_key(self) -> tuple[int, int, int]:
        """Key of the bin: only costs with equal keys may be added."""
        steps = max(1, self.steps)  # an empty record, as a replica may send, has no means
        return compute_bin_key(self.live_sum / steps, self.draft_tokens, self.context_sum / steps)

    def minus(self, before: StepCost | None) -> StepCost:
        """Return what the same engine added since `before`: all of it if a sum fell, because the engine restarted."""
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
        """Raise RecordInvalid unless the sums are finite, not negative and plausible."""
        sums = (self.live_sum, self.context_sum, self.seconds_sum)
        values = (self.draft_tokens, self.steps, *sums)
        # No real engine comes near the bounds of sums and means.
        if not all(math.isfinite(value) and 0 <= value < 1e18 for value in values):
            raise RecordInvalid(f"the sums of a step cost must be finite and >= 0, got {values}; restart the replica")
        if self.draft_tokens > LONGEST_DRAFT or max(sums) >= 1e12 * max(1, self.steps):
            raise RecordInvalid(
                f"a step cost must have at most {LONGEST_DRAFT} draft tokens and means below 1e12, got {values}; "
                "restart the replica"
            )


def compute_bin_key(live: float, draft_tokens: int, context: float) -> tuple[int, int, int]:
    """Compute the bin key of a step: live rollouts in half powers of two, draft length, context in powers of two."""
    # At least 1: a step without live rollouts or context has no logarithm.
    return round(2 * math.log2(max(1.0, live))), draft_tokens, int(math.log2(max(1.0, context)))
