"""The policy's learning rate schedule.

The rate depends on the run file and the step's number alone, so a resumed run repeats it. Called by the backend.
"""

from __future__ import annotations

import math

from specrl.spec.trainer import Decay, Optimizer


def compute_learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Compute the learning rate of step `step`, counted from 1, in a run of `steps` steps.

    - Warm-up: linear from 0, reaches `learningRate` at step warmupSteps.
    - Stable: constant.
    - Decay: from step steps - decaySteps (or the end of the warm-up) to the last step, where it reaches
      `finalLearningRate`. Linear, or half a cosine (arXiv:1608.03983).

    Where warm-up and decay overlap, the lower rate applies. Source of the three phases: arXiv:2404.06395, section 4.2.
    """
    peak = float(settings.learning_rate)
    final = float(settings.final_learning_rate)
    risen = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    before = settings.warmup_steps if settings.decay_steps is None else max(0, steps - settings.decay_steps)
    if settings.decay is Decay.NONE or step <= before:
        return peak * risen
    done = min(1.0, (step - before) / max(1, steps - before))
    left = 1 - done if settings.decay is Decay.LINEAR else (1 + math.cos(math.pi * done)) / 2
    return min(peak * risen, final + (peak - final) * left)
