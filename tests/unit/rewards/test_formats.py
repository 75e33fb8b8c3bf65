"""Rewards for the form of a completion: `pattern`, `tags` and `validJson`, and JSON in a fenced block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.run_files import a_run

from specrl.errors import SpecInvalid
from specrl.rewards.choice import check
from specrl.rewards.text.formats import Pattern, Tags, ValidJson
from specrl.rewards.text.json_answers import JsonPlace
from specrl.rewards.text.patterns import JsonSchema
from specrl.rewards.verifier import Verifier
from specrl.spec import parse_spec

R1 = Tags(("think", "answer"), first_is_open=False)
CONTINUED = Tags(("think", "answer"), first_is_open=True)
BLOCK = JsonPlace(in_block=True)
INTEGER = '{"type": "integer"}'


def reason_of(verifier: Verifier, completion: str) -> tuple[float, str]:
    verdict = verifier.grade("any", completion, {})
    assert verdict.extracted is None
    return verdict.reward, verdict.reason


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("<think>9 * 2</think><answer>18</answer>", "has all tags"),
        ("\n<think>\n9 * 2 < 20\n</think>\n\n<answer>\n18\n</answer>\n", "has all tags"),
        ("18", "no <think>"),
        ("<think>9 * 2</think> 18", "no <answer>"),
        ("<think>9 * 2 <answer>18</answer>", "no </think>"),
        ("<answer>18</answer><think>9 * 2</think>", "a tag is repeated or in the wrong order"),
        ("<think>a</think><think>b</think><answer>18</answer>", "a tag is repeated or in the wrong order"),
        ("<think>a<answer>18</answer></think>", "a tag is repeated or in the wrong order"),
        ("So: <think>a</think><answer>18</answer>", "text before <think>"),
        ("<think>a</think> so <answer>18</answer>", "text before <answer>"),
        ("<think>a</think><answer>18</answer> eggs", "text after </answer>"),
        ("<think> </think><answer>18</answer>", "nothing in <think>"),
        ("<think>a</think><answer></answer>", "nothing in <answer>"),
        ("<Think>a</Think><answer>18</answer>", "no <think>"),
    ],
)
def test_tags_are_all_there_once_in_their_order(completion: str, reason: str) -> None:
    assert reason_of(R1, completion) == (float(reason == "has all tags"), reason)


def test_a_prompt_may_have_opened_the_first_tag() -> None:
    assert reason_of(CONTINUED, "9 * 2</think><answer>18</answer>") == (1.0, "has all tags")
    assert reason_of(CONTINUED, "<think>9 * 2</think><answer>18</answer>")[0] == 0.0


@pytest.mark.parametrize(
    ("expression", "is_whole", "completion", "reward"),
    [
        (r"(?s)<think>.+</think>\s*\d+", True, " <think>a\nb</think>\n18\n", 1.0),
        (r"<think>.+</think>\s*\d+", True, "<think>a\nb</think>\n18", 0.0),
        (r"#### -?\d+", True, "so\n#### 18", 0.0),
        (r"(?m)^#### -?\d+$", False, "so\n#### 18", 1.0),
        (r"(a+)+b", True, "a" * 100_000, 0.0),
        (r"x", False, "\ud800", 0.0),
    ],
)
def test_a_pattern_matches_all_of_the_completion_or_a_part(
    expression: str, is_whole: bool, completion: str, reward: float
) -> None:
    assert Pattern(expression, is_whole, "rewards.pattern").compute_reward("any", completion) == reward


@pytest.mark.parametrize(
    ("completion", "whole", "in_block"),
    [
        ('{"a": 1}', 1.0, 0.0),
        ('```json\n{"a": 1}\n```', 1.0, 1.0),
        ('Here it is:\n```json\n{"a": 1}\n```\nGood luck.', 0.0, 1.0),
        ('1. So\n   ```JSON\n   {"a":\n   1}\n   ```\n', 0.0, 1.0),
        ('```json\n{"a": 1}\n```\nor\n```json\n{"a": \n```', 0.0, 0.0),
        ('```json\n{"a": 1}\n```\n```python\nprint(1)\n```', 0.0, 1.0),
        ("```python\n1\n```", 0.0, 0.0),
        ("```\n1\n", 0.0, 1.0),
        ("```json\nNaN\n```", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_json_is_the_whole_completion_or_in_a_fenced_block(completion: str, whole: float, in_block: float) -> None:
    assert ValidJson(JsonPlace(), None, "").compute_reward("any", completion) == whole
    assert ValidJson(BLOCK, None, "").compute_reward("any", completion) == in_block
    assert JsonSchema(BLOCK).compute_reward("true", completion) == in_block


def test_json_may_have_to_be_valid_under_a_schema_of_the_run_file() -> None:
    verifier = ValidJson(BLOCK, INTEGER, "")
    assert reason_of(verifier, "so\n```\n18\n```") == (1.0, "valid JSON")
    assert reason_of(verifier, 'so\n```\n"18"\n```') == (0.0, "JSON, but not valid under the schema")
    assert reason_of(verifier, "18") == (0.0, "no JSON in its place")


@given(text=st.text(st.characters(exclude_categories=())))
def test_any_completion_has_a_verdict(text: str) -> None:
    for verifier in (R1, CONTINUED, Pattern(r"\d+", False, ""), ValidJson(BLOCK, INTEGER, "")):
        assert verifier.compute_reward("any", text) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ({"pattern": {"expression": "(?=a)"}}, "rewards.pattern.expression: must be one of RE2's"),
        ({"validJson": {"jsonSchema": "{"}}, "rewards.validJson.jsonSchema: must be a JSON Schema"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_the_run(
    rewards: dict[str, dict[str, str]], problem: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = parse_spec(a_run(tmp_path_factory.mktemp("run"), rewards=rewards))
    (found,) = check(spec)
    assert str(found).startswith(problem)
    assert "data set" not in str(found)


@pytest.mark.parametrize("tags", [{"names": []}, {"names": ["<a>"]}, {"names": list("abcdefghi")}])
def test_names_of_tags_are_words(tags: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(SpecInvalid, match=r"rewards\.tags\.names"):
        parse_spec(a_run(tmp_path_factory.mktemp("run"), rewards={"tags": tags}))
