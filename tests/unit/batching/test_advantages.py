"""Advantages and reward shaping, against their formulas in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specrl.batching import compute_advantages, compute_overlong_penalties
from specrl.errors import RecordInvalid
from specrl.spec.trainer import Advantages

GROUPED = [kind for kind in Advantages if kind is not Advantages.BATCH_STANDARDISED]
STANDARDISED = [kind for kind in Advantages if "Standardised" in kind.value]
EPSILON = 1e-4  # TRL's
rewards = hnp.arrays(np.float32, st.integers(2, 16), elements=st.floats(-100, 100, width=16))


def rewards_of(*values: float) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def by_formula(groups: Sequence[Sequence[float]], kind: Advantages) -> list[list[float]]:
    """Compute advantages in plain Python. Not for batches whose rewards are all equal."""
    everything = [reward for group in groups for reward in group]
    centred = [reward - fmean(group) for group in groups for reward in group]
    found = []
    for group in groups:
        mean = fmean(group)
        deviation = stdev(group)
        found.append(
            [
                {
                    Advantages.GROUP_CENTRED: reward - mean,
                    Advantages.GROUP_STANDARDISED: (reward - mean) / (deviation + EPSILON),
                    Advantages.LEAVE_ONE_OUT: reward - fmean([*group[:i], *group[i + 1 :]]),
                    Advantages.BATCH_STANDARDISED: (reward - fmean(everything)) / (stdev(everything) + EPSILON),
                    Advantages.GROUP_CENTRED_BATCH_STANDARDISED: (reward - mean) / (stdev(centred) + EPSILON),
                }[kind]
                for i, reward in enumerate(group)
            ]
        )
    return found


@pytest.mark.parametrize("kind", Advantages)
@given(groups=st.lists(rewards, min_size=1, max_size=4))
def test_advantages_equal_their_formulas(groups: list[np.ndarray], kind: Advantages) -> None:
    found = compute_advantages(groups, kind)
    assert [advantages_G.dtype for advantages_G in found] == [np.float32] * len(groups)
    if kind is not Advantages.BATCH_STANDARDISED:
        assert all(abs(float(advantages_G.sum())) < 1e-2 for advantages_G in found)
    if all((group == group[0]).all() for group in groups):
        return
    expected = by_formula([group.astype(float).tolist() for group in groups], kind)
    for advantages_G, expected_G in zip(found, expected, strict=True):
        np.testing.assert_allclose(advantages_G, expected_G, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", GROUPED)
@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 17))
def test_equal_rewards_of_a_group_give_zero_advantages(value: float, size: int, kind: Advantages) -> None:
    assert not compute_advantages([rewards_of(*[value] * size), rewards_of(0, 1)], kind)[0].any()


def test_equal_rewards_of_a_batch_give_zero_advantages() -> None:
    for kind in Advantages:
        assert not np.concatenate(compute_advantages([rewards_of(0.1, 0.1), rewards_of(0.1, 0.1)], kind)).any()
        assert compute_advantages([], kind) == []


def test_advantages_of_one_correct_answer_in_four() -> None:
    groups = [rewards_of(1, 0, 0, 0)]
    for kind, expected in (
        (Advantages.GROUP_CENTRED, [0.75, -0.25, -0.25, -0.25]),
        (Advantages.GROUP_STANDARDISED, [0.75 / 0.5001, *[-0.25 / 0.5001] * 3]),
        (Advantages.LEAVE_ONE_OUT, [1, -1 / 3, -1 / 3, -1 / 3]),
    ):
        np.testing.assert_allclose(compute_advantages(groups, kind)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("kind", STANDARDISED)
def test_rounding_errors_of_equal_rewards_give_tiny_advantages(kind: Advantages) -> None:
    """Without EPSILON the advantages were -0.5, -0.5, -0.5 and 1.5."""
    for reward, most in ((0.7, 1e-3), (1000.1, 0.12), (-1e30, 0.12)):
        same = np.float32(reward)
        (found_G,) = compute_advantages([rewards_of(same, same, same, np.nextafter(same, np.float32(np.inf)))], kind)
        assert 0 < np.abs(found_G).max() < most


@pytest.mark.parametrize("verdict", [0.0, 1.0])
@pytest.mark.parametrize("kind", STANDARDISED)
def test_rounding_errors_of_a_subtracted_divergence_give_small_advantages(kind: Advantages, verdict: float) -> None:
    """With referenceKl.place Reward, policy and reference first differ only by rounding.

    A group of equal verdicts had advantages up to 1.8 from that.
    """
    charged_G = rewards_of(*(verdict - np.array([4e-6, 0, 1e-6, 0])))
    (found_G,) = compute_advantages([charged_G], kind)
    assert np.abs(found_G).max() < 0.05


@pytest.mark.parametrize("rewards_G", [rewards_of(), rewards_of(1), np.zeros((2, 2), np.float32)])
def test_a_group_needs_two_rollouts(rewards_G: np.ndarray) -> None:
    with pytest.raises(RecordInvalid, match="at least 2 values"):
        compute_advantages([rewards_G], Advantages.GROUP_CENTRED)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_rejected(poison: float) -> None:
    with pytest.raises(RecordInvalid, match="must be finite"):
        compute_advantages([rewards_of(1, poison)], Advantages.BATCH_STANDARDISED)


def test_penalty_rises_linearly_towards_the_length_limit() -> None:
    """DAPO's numbers: at most 20480 tokens, of which the last 4096 are penalised."""
    lengths = (100, 16384, 16385, 18432, 20480, 20481)
    found_G = compute_overlong_penalties(lengths, 20480, 4096, 1.0)
    np.testing.assert_allclose(found_G, [0, 0, 1 / 4096, 0.5, 1, 1])
    np.testing.assert_allclose(compute_overlong_penalties(lengths, 20480, 4096, 0.25), found_G / 4)
