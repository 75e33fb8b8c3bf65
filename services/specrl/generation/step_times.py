"""How long an engine's steps take, summed up over like ones. Pure; fed after every step by the engine's statistics.

The time between the ends of two steps is the second one's, if rollouts were live all the while and both did nothing but
decode: a step that read prompts, or that began on an idle engine, says nothing of decoding. Its batch is what went on
after the one before: in a batch that drains several rollouts may end in a step, which computed them, too.
"""

from __future__ import annotations

from specrl.records.step_costs import MOST_BINS, StepCost, bin_of

DISTURBED = 4.0
"""A step that takes so many times its bin's mean is left out: compilation, a pause for weights, another program."""

ENOUGH = 8
"""With fewer steps a bin has no mean to compare with."""


class StepTimes:
    """Of one engine."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, int], StepCost] = {}
        self._before: tuple[float, int, bool] | None = None

    def interrupted(self) -> None:
        """The engine stood still: how long its next step has taken is not known."""
        self._before = None

    def ended(self, at_s: float, live: int, draft_tokens: int, context: float, *, decodes: bool) -> None:
        """A step ended. live: rollouts that go on; decodes: it read no prompt. context: mean, in tokens."""
        before, self._before = self._before, (at_s, live, decodes)
        if before is None or live == 0 or not decodes:
            return
        began_s, live_before, decoded_before = before
        if live_before < live or not decoded_before:
            return
        key = bin_of(live_before, draft_tokens, context)
        known, seconds = self._sums.get(key), at_s - began_s
        if known is None:
            if len(self._sums) < MOST_BINS:
                self._sums[key] = StepCost(draft_tokens, 1, live_before, context, seconds)
            return
        if known.steps >= ENOUGH and seconds > DISTURBED * known.seconds_sum / known.steps:
            return
        self._sums[key] = StepCost(
            draft_tokens,
            known.steps + 1,
            known.live_sum + live_before,
            known.context_sum + context,
            known.seconds_sum + seconds,
        )

    def costs(self) -> tuple[StepCost, ...]:
        """All sums so far."""
        return tuple(self._sums[key] for key in sorted(self._sums))
