"""Advantages: how much better each rollout did than others of its group, or of its batch.

Stage 4 of the loop; `assemble` calls it once per batch, and the trainer once more where a divergence is part of the
reward. Invariant of all but BatchStandardised: advantages of a group sum to 0, so a group whose rewards are all equal
teaches nothing, whatever they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrl.errors import RecordInvalid
from specrl.records.rollout import FloatArray
from specrl.spec.trainer import Advantages

Exact = npt.NDArray[np.float64]

EPSILON = 1e-4
"""Least that is added to a standard deviation, in units of reward, as in TRL. It keeps rounding of a divergence that is
charged to rewards from becoming advantages of 1: verl's 1e-6 is less than that."""
ROUNDING = 1e-6
"""Share of the largest reward that is added if that is more: ten times what a float32 is rounded by."""


def batch_advantages(rewards: Sequence[FloatArray], kind: Advantages) -> list[FloatArray]:
    """Advantages [G] float32 of every group, from its rewards [G]: one scalar per rollout of one prompt, G >= 2.

    With m, s mean and standard deviation (n - 1, as in TRL and verl) of the group, M, S of the whole batch, and e 1e-4,
    or 1e-6 of the largest absolute reward of the group or batch if that is more:
        GroupCentred                     r - m                             Dr. GRPO, arXiv:2503.20783
        GroupStandardised                (r - m) / (s + e)                 GRPO, arXiv:2402.03300
        LeaveOneOut                      r - mean of the others            RLOO, arXiv:2402.14740
        BatchStandardised                (r - M) / (S + e)                 REINFORCE++, arXiv:2501.03262
        GroupCentredBatchStandardised    (r - m) / (S of all r - m, + e)   REINFORCE++-baseline, the same, section 3
    Equal rewards, of a group or of the batch, give zeros, exactly.
    Raises RecordInvalid if G < 2, or if a reward is not finite.
    """
    for rewards_G in rewards:
        _check(rewards_G)
    match kind:
        case Advantages.BATCH_STANDARDISED:
            found = _of_batch(rewards, [rewards_G.astype(np.float64) for rewards_G in rewards], is_centred=False)
        case Advantages.GROUP_CENTRED_BATCH_STANDARDISED:
            found = _of_batch(rewards, [_centred(rewards_G) for rewards_G in rewards], is_centred=True)
        case _:
            found = [_of_group(rewards_G, kind) for rewards_G in rewards]
    return [advantages_G.astype(np.float32) for advantages_G in found]


def has_signal(rewards_G: FloatArray) -> bool:
    """Whether a group's rewards differ, so that one of its rollouts is better than another."""
    return bool((rewards_G != rewards_G[0]).any())


def _of_group(rewards_G: FloatArray, kind: Advantages) -> Exact:
    centred_G = _centred(rewards_G)
    if not centred_G.any():
        return centred_G
    if kind is Advantages.GROUP_STANDARDISED:
        return np.asarray(centred_G / (rewards_G.astype(np.float64).std(ddof=1) + _epsilon(rewards_G)))
    if kind is Advantages.LEAVE_ONE_OUT:  # r_i - (sum - r_i) / (G - 1)
        return centred_G * (len(rewards_G) / (len(rewards_G) - 1))
    return centred_G


def _of_batch(rewards: Sequence[FloatArray], values: Sequence[Exact], *, is_centred: bool) -> list[Exact]:
    """Standardise values over all rollouts; what is centred on its group already has the mean 0."""
    all_N = np.concatenate([*values, np.zeros(0)])
    if len(all_N) == 0 or (all_N == all_N[0]).all():
        return [np.zeros_like(value_G) for value_G in values]
    mean = 0.0 if is_centred else all_N.mean()
    deviation = all_N.std(ddof=1) + _epsilon(np.concatenate(rewards))
    return [(value_G - mean) / deviation for value_G in values]


def _epsilon(rewards_N: FloatArray) -> float:
    return max(EPSILON, ROUNDING * float(np.abs(rewards_N).max()))


def _centred(rewards_G: FloatArray) -> Exact:
    if not has_signal(rewards_G):  # decided on the rewards: their mean may be off by a rounding error
        return np.zeros(len(rewards_G))
    exact_G = rewards_G.astype(np.float64)
    return np.asarray(exact_G - exact_G.mean())


def _check(rewards_G: FloatArray) -> None:
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise RecordInvalid(
            f"rewards of a group must be one per rollout of at least 2, got shape={rewards_G.shape}; "
            "raise schedule.groupSize"
        )
    if not np.isfinite(rewards_G).all():
        raise RecordInvalid(f"rewards must be finite, got {rewards_G.tolist()}; the verifier is at fault")
