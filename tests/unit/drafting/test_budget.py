"""The drafter's training slices keep to the budget, are the same on every rank, and rotate over rollouts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.drafting.builders import a_head, a_policy

from specrl.drafting.budget import (
    MAX_UPDATES,
    MIN_SLICE_STARTS,
    UPDATE_STARTS,
    RolloutLengths,
    TrainingSlice,
    choose_slice_starts,
    choose_slices,
    deal_update,
    estimate_drafter_flops,
    estimate_policy_flops,
    rotate_turns,
    split_into_updates,
)

SAMPLES = st.lists(
    st.builds(RolloutLengths, st.sampled_from("abcd"), st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=16
)


def starts(_tokens: int, count: int) -> float:
    return count


@given(SAMPLES, st.integers(1, 50), st.integers(1, 200))
def test_slices_use_the_budget_and_never_exceed_it(samples: list[RolloutLengths], step: int, budget: int) -> None:
    lessons = choose_slices(samples, step, starts, budget)
    used = sum(lesson.completion_length - 1 for lesson in lessons)
    assert used == min(budget, sum(sample.completion - 1 for sample in samples))
    assert [lesson.index for lesson in lessons] == sorted({lesson.index for lesson in lessons})
    for lesson in lessons:
        sample = samples[lesson.index]
        assert sample.prompt <= lesson.context < lesson.length <= sample.prompt + sample.completion
    assert lessons == choose_slices(samples, step, starts, budget)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 100))
def test_every_rollout_comes_first_at_some_step(sizes: list[int], first: int) -> None:
    groups = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    seen = [rotate_turns(groups, step) for step in range(first, first + len(sizes) * 60)]  # 60: all sizes divide it
    assert all(sorted(order) == list(range(len(groups))) for order in seen)
    assert {order[0] for order in seen} == set(range(len(groups)))
    assert {groups[order[0]] for order in seen[: len(sizes)]} == set(groups)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 100))
def test_each_group_has_one_rollout_before_any_group_has_two(sizes: list[int], step: int) -> None:
    groups = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    assert len({groups[index] for index in rotate_turns(groups, step)[: len(sizes)]}) == len(sizes)


def test_a_long_rollout_gives_another_slice_at_each_step() -> None:
    sample = RolloutLengths("a", 10, 1000)
    places = {choose_slices([sample], step, starts, 100)[0].context for step in range(1, 9)}
    assert len(places) > 4


def test_a_slice_has_at_most_so_many_starts_and_others_get_the_rest() -> None:
    samples = [RolloutLengths(group, 10, 1001) for group in "abc"]
    lessons = [choose_slices(samples, step, starts, 250, most_starts=100) for step in range(1, 9)]
    assert all(sorted(it.completion_length - 1 for it in found) == [50, 100, 100] for found in lessons)
    assert len({found[0].context for found in lessons}) > 4


@given(SAMPLES, st.integers(1, 50), st.integers(1, 40))
def test_slices_of_a_budget_for_all_have_every_start_once(
    samples: list[RolloutLengths], step: int, most_starts: int
) -> None:
    found = choose_slices(samples, step, starts, 10_000, most_starts)
    assert all(0 < it.completion_length - 1 <= most_starts for it in found)
    places = [(it.index, place) for it in found for place in range(it.context, it.length - 1)]
    assert places == [(n, it.prompt + m) for n, it in enumerate(samples) for m in range(it.completion - 1)]


def test_no_rollout_gives_a_second_slice_before_all_have_given_one() -> None:
    samples = [RolloutLengths("ab"[n % 2], 10, 101) for n in range(4)]
    found = [lesson.index for lesson in choose_slices(samples, 1, starts, 60, most_starts=10)]
    assert sorted(found) == found
    assert sorted(found.count(n) for n in range(4)) == [1, 1, 2, 2]


def test_a_slice_is_longer_if_its_context_costs_more() -> None:
    def length(of_context: float) -> int:
        return choose_slice_starts([RolloutLengths("a", 100, 1000)], lambda t, s: of_context * t + s)

    assert length(0) == MIN_SLICE_STARTS
    assert length(0.1) == pytest.approx(0.1 * 600 / 1.1, abs=1)
    assert length(100) > 500


@given(st.integers(1, 100), st.integers(0, 100), st.integers(2, 100), st.integers(1, 300))
def test_a_context_beyond_the_budget_gives_a_slice_of_the_beginning(
    step: int, prompt: int, completion: int, budget: int
) -> None:
    """A draft model computes the whole context, whose cost alone may exceed the budget of a small batch."""

    def cost(tokens: int, _starts: int) -> float:
        return tokens

    found = choose_slices([RolloutLengths("a", prompt, completion)], step, cost, budget)
    if budget >= prompt + completion:
        assert found == [TrainingSlice(0, prompt, prompt + completion)]
    elif budget >= prompt + 2:
        assert found == [TrainingSlice(0, prompt, budget)]
    else:
        assert found == []


@given(st.lists(st.integers(1, 400), max_size=60))
def test_each_slice_is_in_one_update_and_updates_are_large_enough(starts: list[int]) -> None:
    lessons = [TrainingSlice(index, 10, 11 + count) for index, count in enumerate(starts)]
    parts = split_into_updates(lessons)
    assert sorted(lesson.index for part in parts for lesson in part) == list(range(len(lessons)))
    assert 1 <= len(parts) <= MAX_UPDATES
    assert len(parts) == 1 or (all(parts) and sum(starts) / len(parts) >= UPDATE_STARTS / 1.5)
    if sum(starts) >= 2 * UPDATE_STARTS and len(lessons) > 1:
        assert len(parts) > 1


UPDATE = st.lists(st.tuples(st.floats(1, 10), st.integers(0, 3)), max_size=40)


@given(UPDATE, st.integers(1, 3))
def test_no_learner_has_twice_its_share_of_an_update(update: list[tuple[float, int]], learners: int) -> None:
    """A largest slice, too, is a share: nothing divides it."""
    costs = [cost for cost, _ in update]
    dealt = deal_update(costs, [home for _, home in update], 4, learners, may_move=True)
    loads = Counter[tuple[int, int]]()
    for cost, place in zip(costs, dealt, strict=True):
        loads[place] += cost
    assert len(dealt) == len(costs)
    assert all(replica in range(4) and learner in range(learners) for replica, learner in dealt)
    assert max(loads.values(), default=0) <= 2 * max(sum(costs) / (4 * learners), *costs, 0)


@given(UPDATE)
def test_slices_stay_at_home_if_they_must_or_the_ranks_are_equal(update: list[tuple[float, int]]) -> None:
    homes = [home for _, home in update]
    fixed = deal_update([cost for cost, _ in update], homes, 4, 2, may_move=False)
    assert [replica for replica, _ in fixed] == homes
    balanced = [0, 1, 2, 3] * 5
    assert [replica for replica, _ in deal_update([1.0] * 20, balanced, 4, 1, may_move=True)] == balanced


def test_costs_grow_with_tokens_starts_and_passes() -> None:
    policy = a_policy()
    head = a_head()
    assert (
        estimate_policy_flops(policy, 10, 20)
        > estimate_policy_flops(policy, 10, 19)
        > estimate_policy_flops(policy, 9, 19)
    )
    costs = [estimate_drafter_flops(head, 3, 100, count) for count in range(1, 100)]
    assert costs == sorted(costs)
    assert estimate_drafter_flops(head, 3, 100, 50) > estimate_drafter_flops(head, 2, 100, 50)
    assert estimate_drafter_flops(head, 3, 100, 50) > estimate_drafter_flops(head, 3, 60, 50)


def test_the_policy_costs_eight_operations_per_weight_and_token() -> None:
    policy = a_policy(vocab_size=1)
    norms = policy.num_layers * (2 * policy.hidden_size + 2 * policy.head_dim) + policy.hidden_size
    matrices = policy.num_parameters - norms - 2 * policy.hidden_size
    short = estimate_policy_flops(policy, 0, 1)
    attention = 8 * policy.num_layers * policy.num_heads * policy.head_dim
    assert short == 8 * (matrices + policy.hidden_size) + attention
