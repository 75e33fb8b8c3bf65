"""What drafts cost beside decoding steps, and how much faster they have made the engine. Pure.

Two things cost time that decoding steps do not show: the drafter reads prompts, too, and after steps without it all
live requests are computed again (a catch-up). Sums fade, so they cover the last steps only.
"""

from __future__ import annotations

DRAFTER_SHARE = 0.1  # of the time to read a prompt; a draft model or a deep head may need more
OVERHEAD_FADE = 1 / 4096  # per step
PRIOR_STEPS = 256  # weight of an overhead of 0 at first
REPORT_FADE = 1 / 1024  # per step, of the reported gains
READING_FADE = 1 / 64  # per step, of what the cost of a prompt token is learnt from


class PromptCost:
    """The seconds that a prompt token adds to a step: the slope of a line through what steps take too long."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._together = self._squares = 0.0

    def record_step(self, tokens: float, excess_s: float, plain_s: float) -> None:
        """Record a step that computed prompt tokens. excess_s: beyond what it takes without; plain_s: that time."""
        # The bound keeps out stalls: a step of one request computes one token.
        excess_s = min(excess_s, tokens * plain_s)
        self._together += tokens * excess_s - READING_FADE * self._together
        self._squares += tokens * tokens - READING_FADE * self._squares
        self.seconds = max(0.0, self._together / self._squares)


class Gains:
    """Sums over the steps of one drafter.

    overhead: seconds that drafts cost beside decoding steps, per second of decoding steps with drafts. predicted,
    measured: decoding speed divided by the speed without drafts, by the costs of steps and as it was.
    """

    def __init__(self) -> None:
        self.overhead = 0.0
        self._extra_s = self._drafted_s = 0.0
        self._spent_s = self._undrafted_s = self._predicted_s = 0.0

    def add_drafted_step(self, expected_s: float, reading_s: float, is_catch_up: bool) -> None:
        """Add a step with drafts to the overhead. expected_s: without prompts. reading_s: for its prompts."""
        kept = 1 - OVERHEAD_FADE
        self._extra_s = kept * self._extra_s + (1.0 if is_catch_up else DRAFTER_SHARE) * reading_s
        self._drafted_s = kept * (self._drafted_s or PRIOR_STEPS * expected_s) + expected_s
        self.overhead = self._extra_s / self._drafted_s

    def discount_overhead(self) -> None:
        """Halve the overhead. Without drafts nothing else corrects it."""
        self._extra_s /= 2
        self.overhead /= 2

    def add_step(self, seconds: float, undrafted_s: float, predicted_gain: float) -> None:
        """Add a step to the reported gains. undrafted_s: what the same work takes without drafts."""
        kept = 1 - REPORT_FADE
        self._spent_s = kept * self._spent_s + seconds
        self._undrafted_s = kept * self._undrafted_s + undrafted_s
        self._predicted_s = kept * self._predicted_s + predicted_gain * seconds

    @property
    def predicted(self) -> float:
        """1 before the first step."""
        return self._predicted_s / self._spent_s if self._spent_s else 1.0

    @property
    def measured(self) -> float | None:
        """None before the first step."""
        return self._undrafted_s / self._spent_s if self._spent_s else None
