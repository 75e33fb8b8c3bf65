"""Several rewards of one rollout: which apply to a record, how they are added, and what one of them may do to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_run

from specrl.errors import SpecInvalid
from specrl.records import NamedReward, Prompt, Reward
from specrl.rewards.checks.trials import try_verifiers
from specrl.rewards.choice import check, verifiers_for
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifier_set import add_rewards, average_named_rewards
from specrl.spec import RunSpec, parse_spec
from specrl.spec.data import RewardPool, Rewards

MODULE = """from specrl.rewards import Ungraded

def length(reference, completion):
    return len(completion) / 10

def away(reference, completion):
    raise Ungraded("the judge is away")

def raises(reference, completion):
    return {}[reference]

def points(reference, completion, row):
    return row["points"]
"""
ANSWER = {"name": "answer", "verifier": {"exact": {"answerAfter": "<answer>"}}}
TAGS = {"name": "tags", "weight": 0.5, "verifier": {"tags": {}}}
BY_ROW = [
    {"name": "text", "column": "task", "verifier": {"exact": {}}},
    {"name": "json", "column": "task", "verifier": {"jsonSchema": {}}},
    TAGS,
]
RIGHT = "<think>9 * 2</think><answer>18</answer>"


def rewards_of(*terms: dict[str, Any]) -> Rewards:
    return Rewards.model_validate({"sum": {"terms": list(terms)}})


def function(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "my_rewards.py").write_text(MODULE)
    return {"name": name, "verifier": {"python": {"function": f"my_rewards:{name}", "folder": str(folder)}}, **more}


def a_spec(folder: Path, *terms: dict[str, Any]) -> RunSpec:
    return parse_spec(a_run(folder, rewards={"sum": {"terms": list(terms)}}))


def graded(value: float | None, **more: Any) -> Reward:
    return Reward(value, **more)


def test_rewards_are_added_with_their_weights_and_each_is_kept() -> None:
    terms = verifiers_for(rewards_of(ANSWER, TAGS)).terms
    answer = graded(1.0, extracted="18", reason="equal")
    tags = graded(0.5, reason="no <think>")
    total = add_rewards(terms, [answer, tags])
    assert total.value == 1.25
    assert total.extracted == "18"
    assert total.reason == "answer 1 (equal); tags 0.5 (no <think>)"
    assert total.named == (NamedReward("answer", 1.0, answer), NamedReward("tags", 0.5, tags))
    assert average_named_rewards([total, add_rewards(terms[:1], [graded(0.0)])]) == {"answer": 0.5, "tags": 0.5}


def test_a_rollout_is_ungraded_if_any_of_its_rewards_is() -> None:
    terms = verifiers_for(rewards_of(ANSWER, TAGS)).terms
    total = add_rewards(terms, [graded(1.0), graded(None, failure="ungraded: the judge is away")])
    assert (total.value, total.failure) == (None, "tags: ungraded: the judge is away")
    assert average_named_rewards([total]) == {"answer": 1.0, "tags": 0.0}


def test_errors_and_missing_answers_of_one_reward_are_those_of_the_rollout() -> None:
    terms = verifiers_for(rewards_of(ANSWER, TAGS)).terms
    total = add_rewards(terms, [graded(0.0, lacks_answer=True), graded(0.0, error="KeyError at my_rewards.py:12")])
    assert (total.value, total.lacks_answer, total.error) == (0.0, True, "tags: KeyError at my_rewards.py:12")


def test_a_sum_that_is_too_large_for_float32_is_an_error() -> None:
    terms = verifiers_for(rewards_of(ANSWER | {"weight": "1e30"}, TAGS)).terms
    total = add_rewards(terms, [graded(1e20), graded(1.0)])
    assert (total.value, total.error) == (0.0, "the weighted sum is not finite in float32")


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("text", ["text", "tags"]),
        ("json", ["json", "tags"]),
        (["json", "text"], ["text", "json", "tags"]),
        ([], ["tags"]),
        (None, ["tags"]),
    ],
)
def test_a_column_names_the_rewards_of_a_record(task: object, names: list[str]) -> None:
    verifiers = verifiers_for(rewards_of(*BY_ROW))
    assert verifiers.find_fault("main", {"task": task}) == ""
    assert [term.name for term in verifiers.select_terms("main", {"task": task})] == names


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"task": "maths"}, "field 'task' must name rewards of rewards.sum.terms, which are text, json, got maths;"),
        ({"task": ["text", "tags"]}, "which are text, json, got tags;"),
        ({"task": 3}, "field 'task' must be a reward's name or a list of them, got 3;"),
        ({"other": "text"}, "field 'task' must name the record's rewards, got fields other;"),
        (None, "field 'task' must name the problem's rewards, got a generated problem;"),
    ],
)
def test_a_record_that_names_no_known_reward_is_bad(row: dict[str, object] | None, fault: str) -> None:
    assert fault in verifiers_for(rewards_of(*BY_ROW)).find_fault("main", row)


def test_a_record_without_any_reward_is_bad() -> None:
    verifiers = verifiers_for(rewards_of(BY_ROW[0], TAGS | {"sources": ["other"]}))
    assert verifiers.find_fault("main", {"task": None}).startswith("a reward must apply to every problem, got none")


def test_a_reward_may_be_restricted_to_sources() -> None:
    verifiers = verifiers_for(rewards_of(ANSWER, TAGS | {"sources": ["chat"]}, BY_ROW[1] | {"sources": ["json"]}))
    assert [term.name for term in verifiers.select_terms("chat", {})] == ["answer", "tags"]
    assert [term.name for term in verifiers.select_terms("json", {"task": "json"})] == ["answer", "json"]
    assert verifiers.find_fault("chat", {}) == "", "its records need no column of another source"


async def test_the_pool_grades_with_every_reward(tmp_path: Path) -> None:
    terms = (ANSWER, TAGS, function("points", tmp_path, weight=0.25))
    prompt = Prompt("p0", 0, (1,), "question", "18", {"points": 8})
    async with VerifierPool(verifiers_for(rewards_of(*terms)), RewardPool(workers=2, timeout_s=60)) as pool:
        reward = await pool.grade(prompt, RIGHT)
        assert {it.name: it.reward.value for it in reward.named} == {"answer": 1.0, "tags": 1.0, "points": 8.0}
        assert reward.value == 3.5
        assert (await pool.grade(prompt, "18")).named[0].reward.lacks_answer


async def test_a_reward_that_fails_costs_the_others_nothing(tmp_path: Path) -> None:
    terms = (TAGS, function("raises", tmp_path), function("away", tmp_path))
    prompt = Prompt("p0", 0, (1,), "question", "18")
    async with VerifierPool(verifiers_for(rewards_of(*terms)), RewardPool(workers=1, timeout_s=60)) as pool:
        reward = await pool.grade(prompt, RIGHT)
        tags, raised, away = (it.reward for it in reward.named)
        assert (reward.value, reward.failure) == (None, "away: ungraded: the judge is away")
        assert (tags.value, raised.value, away.value) == (1.0, 0.0, None)
        assert raised.error == "KeyError at my_rewards.py:10"


async def test_every_reward_is_tried_before_the_run_and_all_that_fail_are_named(tmp_path: Path) -> None:
    terms = (function("raises", tmp_path), TAGS, function("points", tmp_path, column="task"))
    prompts = [Prompt(f"p{i}", i, (1,), "question", "18", {"task": None}) for i in range(4)]
    verifiers = verifiers_for(rewards_of(*terms))
    async with VerifierPool(verifiers, RewardPool(workers=1, timeout_s=60)) as pool:
        with pytest.raises(SpecInvalid) as refused:
            await try_verifiers(pool, prompts)
        (problem,) = refused.value.problems
        assert problem.path == "rewards.sum.terms.0.verifier.python.function"
        with pytest.raises(SpecInvalid) as refused:
            await try_verifiers(pool, [*prompts, Prompt("p4", 4, (1,), "question", "18", {"task": "points"})])
        assert [problem.path for problem in refused.value.problems] == [
            "rewards.sum.terms.0.verifier.python.function",
            "rewards.sum.terms.2.verifier.python.function",
        ]


async def test_a_reward_that_applies_to_no_prompt_is_said() -> None:
    prompts = [Prompt("p0", 0, (1,), "question", "18", {"task": "text"})]
    async with VerifierPool(verifiers_for(rewards_of(*BY_ROW)), RewardPool(workers=1, timeout_s=60)) as pool:
        assert await try_verifiers(pool, prompts) == ["the reward json applies to none of the first 1 prompts"]


def test_every_verifier_is_checked_on_this_machine(tmp_path: Path) -> None:
    missing = {"name": "mine", "verifier": {"python": {"function": "not_there:grade"}}}
    pattern = {"name": "form", "verifier": {"pattern": {"expression": "("}}}
    assert [problem.path for problem in check(a_spec(tmp_path, ANSWER, missing, pattern))] == [
        "rewards.sum.terms.1.verifier.python.function",
        "rewards.sum.terms.2.verifier.pattern.expression",
    ]


def test_old_run_files_with_one_verifier_mean_what_they_meant(tmp_path: Path) -> None:
    verifiers = verifiers_for(parse_spec(a_run(tmp_path, rewards={"exact": {}})).rewards)
    assert not verifiers.is_sum
    assert [(term.name, term.weight, term.path) for term in verifiers.terms] == [("", 1.0, "rewards")]


@pytest.mark.parametrize(
    ("terms", "rule"),
    [
        ([], r"rewards\.sum\.terms: must have at least 1 item"),
        ([ANSWER, ANSWER], r"rewards\.sum\.terms: must have different names, got answer; rename one"),
        ([TAGS | {"weight": 0}], r"must have a weight other than 0, got weights of 0 alone"),
        ([TAGS | {"sources": ["main", "gsm9k"]}], r"must be restricted to sources of prompts or validation, got gsm9k"),
        ([TAGS | {"name": "my tags"}], r"rewards\.sum\.terms\.0\.name: must match"),
        ([{"name": "a", "verifier": {"exact": {}, "math": {}}}], r"terms\.0\.verifier: must have exactly one of math,"),
    ],
)
def test_a_malformed_sum_is_refused(tmp_path: Path, terms: list[dict[str, Any]], rule: str) -> None:
    with pytest.raises(SpecInvalid, match=rule):
        a_spec(tmp_path, *terms)
