"""What a validation says of its rewards: every answer counts, and each figure has its own interval."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.coordinator.mean_reward import mean_interval
from specrl.coordinator.pass_rates import wilson
from specrl.coordinator.validation import summarise_rewards
from specrl.records import Reward

FAILED = Reward(None, "KeyError at my_rewards.py:12")


def test_an_answer_without_a_reward_counts_as_wrong() -> None:
    """28 right answers and 4 that the verifier failed on were "accuracy 1.000 on 32 problems"."""
    found = summarise_rewards([Reward(1.0)] * 28 + [FAILED] * 4, 1, 3)
    assert (found.policy_version, found.reward, found.problems, found.answers) == (3, 28 / 32, 32, 32)
    assert (found.ungraded, found.failures) == (4, {"KeyError at my_rewards.py:12": 4})
    (first,) = found.pass_at
    assert (first.rate, first.problems) == (28 / 32, 32)
    assert (found.reward_low, found.reward_high) == (first.low, first.high) == pytest.approx(wilson(28 / 32, 32))


def test_rewards_that_are_not_right_or_wrong_have_no_pass_rate_and_an_interval_of_their_own() -> None:
    """Rewards of 5 to 9 showed "7.188, 95 % interval 0.546 to 0.844": that of the share of rewards of 1 or more."""
    rewards = [5.0, 9.0, 7.0, 8.0, 6.5]
    found = summarise_rewards([Reward(value) for value in rewards], 1, 0)
    assert found.pass_at == []
    assert found.reward == pytest.approx(7.1)
    assert (found.reward_low, found.reward_high) == mean_interval(rewards)


def test_answers_to_one_problem_are_no_independent_sample() -> None:
    found = summarise_rewards([Reward(value) for value in (0.2, 0.4, 1.0, 1.0, 0.6, 0.2)], 2, 0)
    assert (found.problems, found.answers) == (3, 6)
    assert (found.reward_low, found.reward_high) == mean_interval([(0.2 + 0.4) / 2, 1.0, (0.6 + 0.2) / 2])


def test_one_reward_between_right_and_wrong_leaves_no_pass_rate() -> None:
    assert [rate.k for rate in summarise_rewards([Reward(0.0), Reward(1.0)] * 4, 4, 0).pass_at] == [1, 2, 4]
    assert summarise_rewards([Reward(0.0), Reward(1.0), Reward(0.5), Reward(1.0)], 4, 0).pass_at == []


values = st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(-50, 50, width=32))


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(values, min_size=n, max_size=n), min_size=1, max_size=9)))
def test_the_mean_lies_within_its_interval_and_no_answer_is_lost(problems: list[list[float | None]]) -> None:
    rewards = [Reward(value, "" if value is not None else "hung") for answers in problems for value in answers]
    found = summarise_rewards(rewards, len(problems[0]), 0)
    assert found.reward == pytest.approx(fmean(reward.value or 0.0 for reward in rewards))
    assert found.answers == len(rewards)
    assert found.failed == found.ungraded == sum(reward.value is None for reward in rewards)
    if found.reward_low is not None and found.reward_high is not None:
        assert found.reward_low - 1e-9 <= found.reward <= found.reward_high + 1e-9
