"""Which tokens the drafter learns from: within the budget, the same everywhere, everybody in turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.drafting.builders import a_head, a_policy

from specrl.drafting.budget import (
    MOST_UPDATES,
    UPDATE_STARTS,
    Lesson,
    Sample,
    choose_lessons,
    drafter_flops,
    policy_flops,
    turns,
    updates,
)

SAMPLES = st.lists(
    st.builds(Sample, st.sampled_from("abcd"), st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=16
)


def starts(_tokens: int, count: int) -> float:
    return count


@given(SAMPLES, st.integers(1, 50), st.integers(1, 200))
def test_lessons_use_up_the_budget_and_never_exceed_it(samples: list[Sample], step: int, budget: int) -> None:
    lessons = choose_lessons(samples, step, starts, budget)
    used = sum(lesson.completion - 1 for lesson in lessons)
    assert used == min(budget, sum(sample.completion - 1 for sample in samples))
    assert [lesson.index for lesson in lessons] == sorted({lesson.index for lesson in lessons})
    for lesson in lessons:
        sample = samples[lesson.index]
        assert sample.prompt <= lesson.context < lesson.length <= sample.prompt + sample.completion
    assert lessons == choose_lessons(samples, step, starts, budget)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 100))
def test_every_rollout_is_first_at_some_step(sizes: list[int], first: int) -> None:
    groups = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    seen = [turns(groups, step) for step in range(first, first + len(sizes) * 60)]  # 60: all sizes divide it
    assert all(sorted(order) == list(range(len(groups))) for order in seen)
    assert {order[0] for order in seen} == set(range(len(groups)))
    assert {groups[order[0]] for order in seen[: len(sizes)]} == set(groups)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 100))
def test_each_group_has_one_before_any_has_two(sizes: list[int], step: int) -> None:
    groups = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    assert len({groups[index] for index in turns(groups, step)[: len(sizes)]}) == len(sizes)


def test_rollout_that_does_not_fit_gives_another_stretch_at_each_step() -> None:
    sample = Sample("a", 10, 1000)
    places = {choose_lessons([sample], step, starts, 100)[0].context for step in range(1, 9)}
    assert len(places) > 4


@given(st.lists(st.integers(1, 400), max_size=60))
def test_each_lesson_is_of_one_update_and_updates_are_few_and_large(starts: list[int]) -> None:
    lessons = [Lesson(index, 10, 11 + count) for index, count in enumerate(starts)]
    parts = updates(lessons)
    assert sorted(lesson.index for part in parts for lesson in part) == list(range(len(lessons)))
    assert 1 <= len(parts) <= MOST_UPDATES
    assert len(parts) == 1 or (all(parts) and sum(starts) / len(parts) >= UPDATE_STARTS / 1.5)
    if sum(starts) >= 2 * UPDATE_STARTS and len(lessons) > 1:
        assert len(parts) > 1


def test_operations_grow_with_what_is_computed() -> None:
    policy, head = a_policy(), a_head().config
    assert policy_flops(policy, 10, 20) > policy_flops(policy, 10, 19) > policy_flops(policy, 9, 19)
    costs = [drafter_flops(head, 3, 100, count) for count in range(1, 100)]
    assert costs == sorted(costs)
    assert drafter_flops(head, 3, 100, 50) > drafter_flops(head, 2, 100, 50)
    assert drafter_flops(head, 3, 100, 50) > drafter_flops(head, 3, 60, 50)


def test_operations_of_the_policy_are_six_per_weight_and_token_and_two_more_for_the_log_probabilities() -> None:
    policy = a_policy(vocab_size=1)
    norms = policy.num_layers * (2 * policy.hidden_size + 2 * policy.head_dim) + policy.hidden_size
    matrices = policy.num_parameters - norms - 2 * policy.hidden_size
    short = policy_flops(policy, 0, 1)
    attention = 8 * policy.num_layers * policy.num_heads * policy.head_dim
    assert short == 8 * (matrices + policy.hidden_size) + attention
