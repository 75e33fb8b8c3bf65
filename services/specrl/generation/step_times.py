"""Sums the durations of an engine's decoding steps, binned by batch size, draft length and context. Pure.

Called after every step by the engine's stat logger (vllm_backend/counters.py). The sums reach the coordinator with the
replica's status.

The time between the ends of two steps is the duration of the second one. This holds if both only decoded and if
rollouts were live in between. A step that read prompts, or that began on an idle engine, is not counted. The step's
batch size is the number of live rollouts after the step before it. The number after the step itself would be too small:
rollouts that end in a step were computed in it.
"""

from __future__ import annotations

from specrl.records.step_costs import MAX_BINS, StepCost, compute_bin_key

DISTURBED_RATIO = 4.0
"""A step slower than so many times its bin's mean is ignored: compilation, a weight update, or other load."""

ENOUGH_STEPS = 8
"""Steps that a bin needs before slow steps are ignored; with fewer, its mean is not reliable."""


class StepTimes:
    """The step durations of one engine."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, int], StepCost] = {}
        self._before: tuple[float, int, bool] | None = None

    def note_interruption(self) -> None:
        """Note that the engine was paused, so that the next step's duration is not counted."""
        self._before = None

    def record_step_end(self, at_s: float, live: int, draft_tokens: int, context: float, *, decodes: bool) -> None:
        """Record the end of a step.

        at_s: monotonic time. live: rollouts that continue after the step. draft_tokens: per rollout.
        context: mean tokens of a rollout. decodes: whether the step read no prompts.
        """
        before = self._before
        self._before = (at_s, live, decodes)
        if before is None or live == 0 or not decodes:
            return
        began_s, live_before, decoded_before = before
        if live_before < live or not decoded_before:
            return
        key = compute_bin_key(live_before, draft_tokens, context)
        known = self._sums.get(key)
        seconds = at_s - began_s
        if known is None:
            if len(self._sums) < MAX_BINS:  # bounds the status message
                self._sums[key] = StepCost(draft_tokens, 1, live_before, context, seconds)
            return
        if known.steps >= ENOUGH_STEPS and seconds > DISTURBED_RATIO * known.seconds_sum / known.steps:
            return
        self._sums[key] = StepCost(
            draft_tokens,
            known.steps + 1,
            known.live_sum + live_before,
            known.context_sum + context,
            known.seconds_sum + seconds,
        )

    def list_costs(self) -> tuple[StepCost, ...]:
        """Return all sums, sorted by bin."""
        return tuple(self._sums[key] for key in sorted(self._sums))
