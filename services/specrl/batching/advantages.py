"""Advantages: how much better each rollout of a group did than the group.

Stage 4 of the loop; `assemble` calls it once per group. Invariant: advantages of a group sum to 0, so a group whose
rewards are all equal teaches nothing, whatever they are.
"""

from __future__ import annotations

import numpy as np

from specrl.errors import RecordInvalid
from specrl.records.rollout import FloatArray


def group_advantages(rewards_G: FloatArray, *, normalise: bool = False) -> FloatArray:
    """Centre each rollout's reward on its group: A_i = r_i - mean(r). Divide by std(r) only if `normalise`.

    rewards_G: [G] float32, one scalar per rollout of the same prompt, G >= 2.
    Returns [G] float32, sum 0 up to rounding. All-equal rewards give zeros, exactly.
    Raises RecordInvalid if G < 2, or if a reward is not finite. Sources: Dr. GRPO, arXiv:2503.20783, without the
    division; GRPO, arXiv:2402.03300, with it. std is the sample's (n - 1), as in TRL and verl.
    """
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise RecordInvalid(
            f"rewards of a group must be one per rollout of at least 2, got shape={rewards_G.shape}; "
            "raise schedule.groupSize"
        )
    if not np.isfinite(rewards_G).all():
        raise RecordInvalid(f"rewards must be finite, got {rewards_G.tolist()}; the verifier is at fault")
    if (rewards_G == rewards_G[0]).all():  # decided on the rewards: their mean may be off by a rounding error
        return np.zeros(len(rewards_G), dtype=np.float32)
    exact_G = rewards_G.astype(np.float64)
    centred_G = exact_G - exact_G.mean()
    if normalise:
        centred_G /= exact_G.std(ddof=1)
    return np.asarray(centred_G, dtype=np.float32)
