"""Advantages: how much better each rollout did than the others of its group, or of its batch.

`assemble_batch` calls this once per batch. With `referenceKl.place: Reward` the trainer calls it again, after it has
subtracted the divergence from the rewards.

Invariant, for every kind but BatchStandardised: the advantages of a group sum to 0. A group whose rewards are all equal
therefore adds nothing to the gradient.

Shapes: G rollouts of one group, N rollouts of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrl.errors import RecordInvalid
from specrl.records.rollout import FloatArray
from specrl.spec.trainer import Advantages

Float64Array = npt.NDArray[np.float64]

# Added to a standard deviation before dividing by it, in units of reward. The value is TRL's. verl's 1e-6 is too small
# here. A divergence that is subtracted from equal rewards differs by rounding errors larger than 1e-6. These would be
# scaled up to advantages of about 1.
EPSILON = 1e-4

# Used instead of EPSILON when it is larger, as a share of the largest absolute reward. It is about ten times the
# relative rounding error of a float32.
ROUNDING = 1e-6


def compute_advantages(rewards: Sequence[FloatArray], kind: Advantages) -> list[FloatArray]:
    """Compute the advantages [G] float32 of every group from its rewards [G], one reward per rollout, G >= 2.

    m and s are the mean and the standard deviation of the group, M and S those of the whole batch. Standard deviations
    divide by n - 1, as in TRL and verl. e is 1e-4, or 1e-6 times the largest absolute reward if that is larger.

        GroupCentred                     r - m                             Dr. GRPO, arXiv:2503.20783
        GroupStandardised                (r - m) / (s + e)                 GRPO, arXiv:2402.03300
        LeaveOneOut                      r - mean of the others            RLOO, arXiv:2402.14740
        BatchStandardised                (r - M) / (S + e)                 REINFORCE++, arXiv:2501.03262
        GroupCentredBatchStandardised    (r - m) / (S of all r - m, + e)   REINFORCE++-baseline, the same, section 3

    If all rewards of a group (or of the batch, for the batch kinds) are equal, its advantages are exactly 0.
    Raises RecordInvalid if G < 2 or if a reward is not finite.
    """
    for rewards_G in rewards:
        _check_rewards(rewards_G)
    if kind is Advantages.BATCH_STANDARDISED:
        exact = [rewards_G.astype(np.float64) for rewards_G in rewards]
        found = _standardise_over_batch(rewards, exact, is_centred=False)
    elif kind is Advantages.GROUP_CENTRED_BATCH_STANDARDISED:
        centred = [_centre_on_group(rewards_G) for rewards_G in rewards]
        found = _standardise_over_batch(rewards, centred, is_centred=True)
    else:
        found = [_compute_group_advantages(rewards_G, kind) for rewards_G in rewards]
    return [advantages_G.astype(np.float32) for advantages_G in found]


def has_signal(rewards_G: FloatArray) -> bool:
    """Return whether the rewards [G] of a group differ. If not, none of its rollouts is better than another."""
    return bool((rewards_G != rewards_G[0]).any())


def _compute_group_advantages(rewards_G: FloatArray, kind: Advantages) -> Float64Array:
    centred_G = _centre_on_group(rewards_G)
    if not centred_G.any():
        return centred_G
    if kind is Advantages.GROUP_STANDARDISED:
        return np.asarray(centred_G / (rewards_G.astype(np.float64).std(ddof=1) + _compute_epsilon(rewards_G)))
    if kind is Advantages.LEAVE_ONE_OUT:  # r_i - (sum - r_i) / (G - 1)
        return centred_G * (len(rewards_G) / (len(rewards_G) - 1))
    return centred_G


def _standardise_over_batch(
    rewards: Sequence[FloatArray], values: Sequence[Float64Array], *, is_centred: bool
) -> list[Float64Array]:
    """Standardise values [G] over all rollouts of the batch. is_centred: the values already have the mean 0."""
    all_N = np.concatenate([*values, np.zeros(0)])
    # Compared on the values, not on the deviation: that of equal values may be a rounding error instead of 0.
    if len(all_N) == 0 or (all_N == all_N[0]).all():
        return [np.zeros_like(value_G) for value_G in values]
    mean = 0.0 if is_centred else all_N.mean()
    deviation = all_N.std(ddof=1) + _compute_epsilon(np.concatenate(rewards))
    return [(value_G - mean) / deviation for value_G in values]


def _compute_epsilon(rewards_N: FloatArray) -> float:
    return max(EPSILON, ROUNDING * float(np.abs(rewards_N).max()))


def _centre_on_group(rewards_G: FloatArray) -> Float64Array:
    # Subtracting the mean of equal rewards may leave rounding errors instead of exact zeros.
    if not has_signal(rewards_G):
        return np.zeros(len(rewards_G))
    exact_G = rewards_G.astype(np.float64)  # the mean needs more digits than a float32 has
    return np.asarray(exact_G - exact_G.mean())


def _check_rewards(rewards_G: FloatArray) -> None:
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise RecordInvalid(
            f"rewards of a group must be a vector of at least 2 values, one per rollout, got shape={rewards_G.shape}; "
            "set schedule.groupSize to 2 or more"
        )
    if not np.isfinite(rewards_G).all():
        raise RecordInvalid(f"rewards must be finite, got {rewards_G.tolist()}; fix the verifier that returned them")
