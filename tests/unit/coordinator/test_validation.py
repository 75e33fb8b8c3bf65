"""The report of a validation: every answer counts, and each figure has an interval of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from decimal import Decimal
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rljob_cases import SOUND

from specrl.coordinator.observe.sinks.contract import flatten_validation
from specrl.coordinator.rollouts.validation import plan_validation, summarise_parts, summarise_problems
from specrl.formats.reports import ValidationReport
from specrl.formats.statistics.mean_reward import student_interval
from specrl.formats.statistics.pass_rates import wilson_interval
from specrl.records import NamedReward, Prompt, Reward
from specrl.spec import RunSpec, parse_spec
from specrl.spec.data import PromptSource, Validation, ValidationSampling, ValidationSource

FAILED = Reward(None, "KeyError at my_rewards.py:12")


def summarise_rewards(rewards: Sequence[Reward], samples: int, policy_version: int) -> ValidationReport:
    """Summarise problems that have `samples` answers each."""
    problems = [rewards[place : place + samples] for place in range(0, len(rewards), samples)]
    return summarise_problems(problems, policy_version)


def test_an_answer_without_a_reward_counts_as_wrong() -> None:
    """28 right answers and 4 on which the verifier failed were reported as "accuracy 1.000 on 32 problems"."""
    found = summarise_rewards([Reward(1.0)] * 28 + [FAILED] * 4, 1, 3)
    assert (found.policy_version, found.reward, found.problems, found.answers) == (3, 28 / 32, 32, 32)
    assert (found.ungraded, found.failures) == (4, {"KeyError at my_rewards.py:12": 4})
    (first,) = found.pass_at
    assert (first.rate, first.problems) == (28 / 32, 32)
    assert (
        (found.reward_low, found.reward_high) == (first.low, first.high) == pytest.approx(wilson_interval(28 / 32, 32))
    )


def test_rewards_that_are_not_right_or_wrong_have_no_pass_rate_and_an_interval_of_their_own() -> None:
    """Rewards of 5 to 9 were shown as "7.188, 95 % interval 0.546 to 0.844", the interval of another figure: pass@1."""
    rewards = [5.0, 9.0, 7.0, 8.0, 6.5]
    found = summarise_rewards([Reward(value) for value in rewards], 1, 0)
    assert found.pass_at == []
    assert found.reward == pytest.approx(7.1)
    assert (found.reward_low, found.reward_high) == student_interval(rewards)


def test_answers_to_one_problem_are_no_independent_sample() -> None:
    found = summarise_rewards([Reward(value) for value in (0.2, 0.4, 1.0, 1.0, 0.6, 0.2)], 2, 0)
    assert (found.problems, found.answers) == (3, 6)
    assert (found.reward_low, found.reward_high) == student_interval([(0.2 + 0.4) / 2, 1.0, (0.6 + 0.2) / 2])


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
    assert found.failed_count == found.ungraded == sum(reward.value is None for reward in rewards)
    if found.reward_low is not None and found.reward_high is not None:
        assert found.reward_low - 1e-9 <= found.reward <= found.reward_high + 1e-9


def test_a_validation_that_the_verifier_could_not_judge_says_so() -> None:
    """Such a validation's reward of 0 was once the first reward of a run's summary, as if the run had learned."""
    assert not summarise_rewards([FAILED] * 4, 1, 3).is_judged
    assert summarise_rewards([FAILED, Reward(0.0)], 1, 3).is_judged


def a_run_with_two_sets() -> RunSpec:
    """Validation sets `main` with the section's sampling, and `hard` with its own."""
    spec = parse_spec(copy.deepcopy(SOUND) | {"name": "job"})
    source = PromptSource.model_validate({"parquet": {"path": "/test"}})
    own = ValidationSampling(temperature=Decimal("0.5"), samples_per_prompt=4, max_tokens=9)
    sources = (
        ValidationSource(name="easy", source=source),
        ValidationSource(name="hard", source=source, limit=1, sampling=own),
    )
    return spec.model_copy(update={"validation": Validation(sources=sources)})


def test_each_validation_source_is_sampled_in_its_own_way() -> None:
    prompts = [Prompt(f"v{i}", i, (i,), "", "1", source=name) for i, name in enumerate(("easy", "easy", "hard"))]
    easy, hard = plan_validation(a_run_with_two_sets(), prompts, 7)
    assert [(len(part.requests), part.samples) for part in (easy, hard)] == [(2, 1), (4, 4)]
    assert {(request.sampling.temperature, request.sampling.max_tokens) for request, _ in easy.requests} == {(0, 64)}
    assert {(request.sampling.temperature, request.sampling.max_tokens) for request, _ in hard.requests} == {(0.5, 9)}
    requests = [request for part in (easy, hard) for request, _ in part.requests]
    assert (
        len({request.rollout_id for request in requests}) == len({request.sampling.seed for request in requests}) == 6
    )


def test_each_validation_source_has_its_own_figures_and_every_problem_counts_the_same() -> None:
    prompts = [Prompt(f"v{i}", i, (i,), "", "1", source=name) for i, name in enumerate(("easy", "easy", "hard"))]
    parts = plan_validation(a_run_with_two_sets(), prompts, 7)
    rewards = [Reward(value) for value in (1.0, 0.0, 1.0, 1.0, 0.0, 0.0)]
    found = summarise_parts(parts, rewards, 7)
    assert (found.reward, found.problems, found.answers) == (0.5, 3, 6)
    assert {name: (it.reward, it.problems, it.answers) for name, it in found.sources.items()} == {
        "easy": (0.5, 2, 2),
        "hard": (0.5, 1, 4),
    }
    assert [rate.k for rate in found.sources["hard"].pass_at] == [1, 2, 4]
    assert ValidationReport.model_validate_json(found.model_dump_json(by_alias=True)) == found
    assert summarise_parts(parts[:1], rewards[:2], 7).sources == {}
    flat = flatten_validation(found)
    assert (flat["validation/reward"], flat["validation/hard/reward"], flat["validation/hard/pass_at_2"]) == (
        0.5,
        0.5,
        found.sources["hard"].pass_at[1].rate,
    )


def test_each_reward_of_a_validation_has_its_mean() -> None:
    def answered(answer: float | None, tags: float) -> Reward:
        named = (NamedReward("answer", 1.0, Reward(answer)), NamedReward("tags", 0.5, Reward(tags)))
        return Reward(None if answer is None else answer + tags / 2, "" if answer is not None else "hung", named=named)

    found = summarise_rewards([answered(1.0, 1.0), answered(0.0, 1.0), answered(None, 1.0), answered(1.0, 0.0)], 1, 3)
    assert found.rewards == {"answer": 0.5, "tags": 0.75}
    assert (found.reward, found.ungraded, found.pass_at) == ((1.5 + 0.5 + 1.0) / 4, 1, [])
    assert summarise_rewards([Reward(1.0)], 1, 3).rewards == {}
