"""The learning rate of every step: a function of the run file and the step's number, so that a replay has it too."""

from __future__ import annotations

import math

from specrl.spec.trainer import Decay, Optimizer


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Of step `step` (from 1) of a run of `steps`.

    Warm-up rises linearly from 0 and is over at step warmupSteps. Decay begins after step steps - decaySteps, or after
    the warm-up, and ends at the last step: linearly or with half a cosine, arXiv:1608.03983. Constant in between, which
    is warm-up, stable, decay, arXiv:2404.06395, section 4.2. Where both are at work the lower rate counts.
    """
    peak, final = float(settings.learning_rate), float(settings.final_learning_rate)
    risen = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    before = settings.warmup_steps if settings.decay_steps is None else max(0, steps - settings.decay_steps)
    if settings.decay is Decay.NONE or step <= before:
        return peak * risen
    done = min(1.0, (step - before) / max(1, steps - before))
    left = 1 - done if settings.decay is Decay.LINEAR else (1 + math.cos(math.pi * done)) / 2
    return min(peak * risen, final + (peak - final) * left)
