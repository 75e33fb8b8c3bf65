"""Advantages centre on the group, and only on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specrl.batching import group_advantages
from specrl.errors import RecordInvalid

rewards = hnp.arrays(np.float32, st.integers(2, 32), elements=st.floats(-100, 100, width=32))


def rewards_of(*values: float) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


@given(rewards)
def test_advantages_sum_to_zero_and_keep_differences(rewards_G: np.ndarray) -> None:
    advantages_G = group_advantages(rewards_G)
    assert advantages_G.dtype == np.float32
    assert abs(float(advantages_G.sum())) < 1e-3
    np.testing.assert_allclose(np.diff(advantages_G), np.diff(rewards_G), atol=1e-3)


@given(rewards)
def test_normalised_advantages_have_unit_deviation_or_are_zero(rewards_G: np.ndarray) -> None:
    advantages_G = group_advantages(rewards_G, normalise=True).astype(np.float64)
    if (rewards_G == rewards_G[0]).all():
        assert not advantages_G.any()
    else:
        assert abs(advantages_G.std(ddof=1) - 1) < 1e-3
        assert abs(advantages_G.sum()) < 1e-3


@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 17), normalise=st.booleans())
def test_equal_rewards_teach_exactly_nothing(value: float, size: int, normalise: bool) -> None:
    assert not group_advantages(rewards_of(*[value] * size), normalise=normalise).any()


@given(rewards_G=rewards, normalise=st.booleans(), seed=st.integers(0, 2**32))
def test_the_order_of_a_group_does_not_matter(rewards_G: np.ndarray, normalise: bool, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rewards_G))
    shuffled_G = group_advantages(rewards_G[order], normalise=normalise)
    np.testing.assert_allclose(shuffled_G, group_advantages(rewards_G, normalise=normalise)[order], atol=1e-3)


def test_one_of_four_right_by_hand() -> None:
    rewards_G = rewards_of(1, 0, 0, 0)
    np.testing.assert_allclose(group_advantages(rewards_G), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(group_advantages(rewards_G, normalise=True), [1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("rewards_G", [rewards_of(), rewards_of(1), np.zeros((2, 2), np.float32)])
def test_a_group_needs_two_rollouts(rewards_G: np.ndarray) -> None:
    with pytest.raises(RecordInvalid, match="at least 2"):
        group_advantages(rewards_G)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_no_number_is_refused(poison: float) -> None:
    with pytest.raises(RecordInvalid, match="must be finite"):
        group_advantages(rewards_of(1, poison))
