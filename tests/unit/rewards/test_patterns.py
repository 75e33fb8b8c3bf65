"""Answers that must have a form. What is hostile is judged, in linear time, and never left to chance."""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.errors import DatasetInvalid, VerifierFailed
from specrl.rewards import check_references
from specrl.rewards.patterns import JsonSchema, Regex
from specrl.spec.data import JsonSchemaVerifier, RegexVerifier, Rewards

WHOLE, ANYWHERE = Regex("####", is_whole=True), Regex("", is_whole=False)
SCHEMA = JsonSchema("")
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
TREE = json.dumps({"type": "array", "items": {"$ref": "#"}})


@pytest.mark.parametrize(
    ("pattern", "completion", "verdict"),
    [
        (r"\d+ eggs", "so\n#### 18 eggs", 1.0),
        (r"\d+ eggs", "#### 18 eggs, or more", 0.0),
        (r"\d+ eggs", "18 eggs", 0.0),
        (r"\d+", "#### 18\n#### none", 0.0),
        ("a|ab", "#### ab", 1.0),
        (".*", "#### ", 1.0),
        (".*", "", 0.0),
        (r"(?i)paris", "#### PARIS", 1.0),
        (r"\p{Greek}+", "#### αβγ", 1.0),
        (r"\d+", "#### ١٨", 0.0),
        (r"x\.", "#### x\udcff", 0.0),
        (r"(a+)+b", "#### " + "a" * 100_000, 0.0),
        (r"(a|a)*b", "#### " + "a" * 100_000, 0.0),
        (r"(.*)(.*)(.*)(.*)(.*)c", "#### " + "ab" * 50_000, 0.0),
    ],
)
def test_the_whole_answer_must_match(pattern: str, completion: str, verdict: float) -> None:
    assert WHOLE.reward(pattern, completion) == verdict


def test_anywhere_a_part_is_enough() -> None:
    assert ANYWHERE.reward(r"\bdef\b", "here:\ndef f") == 1.0
    assert ANYWHERE.reward(r"^def", "here:\ndef f") == 0.0
    assert ANYWHERE.reward(r"(?m)^def", "here:\ndef f") == 1.0


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "a{100000}", "(?:a{1000}){1000}", "\ud800"])
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_refused_before_the_run(pattern: str) -> None:
    with pytest.raises(VerifierFailed, match="must be one of RE2's"):
        WHOLE.reward(pattern, "#### a")
    with pytest.raises(DatasetInvalid, match="a:1: a regular expression must be one of RE2's"):
        check_references(Rewards(regex=RegexVerifier()), [("a:1", pattern)])


@given(text=st.text())
def test_any_text_has_a_verdict(text: str) -> None:
    assert WHOLE.reward(r"\d+", text) in (0.0, 1.0)
    assert SCHEMA.reward(PERSON, text) in (0.0, 1.0)
    assert SCHEMA.reward("true", text) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("schema", "completion", "verdict"),
    [
        (PERSON, '{"name": "Ann", "age": 3}', 1.0),
        (PERSON, ' \n```json\n{"name": "Ann", "age": 3}\n```\n', 1.0),
        (PERSON, '```\n{"name": "Ann", "age": 3}\n```', 1.0),
        (PERSON, 'Here: {"name": "Ann", "age": 3}', 0.0),
        (PERSON, '{"name": "Ann", "age": 3} {"name": "Ann", "age": 3}', 0.0),
        (PERSON, '{"name": "ann", "age": 3}', 0.0),
        (PERSON, '{"name": "Ann", "age": -1}', 0.0),
        (PERSON, '{"name": "Ann", "age": true}', 0.0),
        (PERSON, '{"name": "Ann", "age": 3.5}', 0.0),
        (PERSON, '{"name": "Ann", "age": 3, "more": 1}', 0.0),
        (PERSON, '{"name": "Ann", "age": 3, "age": 4}', 0.0),
        (PERSON, '{"name": "Ann", "age": NaN}', 0.0),
        (PERSON, '{"name": "Ann", "age": 1e999}', 0.0),
        (PERSON, '{"name": "Ann", "age": ' + "9" * 4000 + "}", 1.0),
        (PERSON, '{"name": "Ann", "age": ' + "9" * 10**6 + "}", 0.0),
        (PERSON, '{"name": "A' + "a" * 10**6 + '", "age": 3}', 1.0),
        (PERSON, "{'name': 'Ann', 'age': 3}", 0.0),
        (PERSON, "", 0.0),
        (PERSON, "\x00", 0.0),
        ('{"type": "string", "pattern": "^(a+)+$"}', '"' + "a" * 100_000 + '!"', 0.0),
        ('{"patternProperties": {"^(a+)+$": false}}', '{"' + "a" * 100_000 + '!": 1}', 1.0),
        ('{"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": false}', '{"xa": null}', 1.0),
        ('{"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": false}', '{"xa": 1}', 0.0),
        ('{"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": false}', '{"ya": null}', 0.0),
        ('{"additionalProperties": {"type": "null"}}', '{"a": null, "b": 1}', 0.0),
        (TREE, "[[], [[], []]]", 1.0),
        (TREE, "[[], [[], {}]]", 0.0),
        (TREE, "[" * 64 + "]" * 64, 1.0),
        (TREE, "[" * 65 + "]" * 65, 0.0),
        (TREE, "[" * 10**6, 0.0),
        (TREE, "[" * 10**5 + "]" * 10**5, 0.0),
        ("true", '{"a":' * 10**5 + "1" + "}" * 10**5, 0.0),
        ('{"type": "string"}', '"' + "[" * 1000 + '"', 1.0),
        ('{"type": "string"}', '"\\"' + "[" * 1000 + '"', 1.0),
        ('{"multipleOf": 2}', "1e308", 1.0),
        ("true", '"' + '\\"' * 10**5, 0.0),
        ("true", '["' + '\\"' * 10**5 + '"]', 1.0),
        ('{"uniqueItems": true}', json.dumps([{"a": i} for i in range(300)]), 1.0),
        ('{"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}', "3.0", 1.0),
    ],
)
def test_json_is_valid_or_not(schema: str, completion: str, verdict: float) -> None:
    assert SCHEMA.reward(schema, completion) == verdict


def test_the_answer_follows_the_last_mark() -> None:
    marked = JsonSchema("Answer:")
    assert marked.reward(PERSON, 'I think.\nAnswer: 3\nAnswer: {"name": "Ann", "age": 3}') == 1.0
    assert marked.reward(PERSON, '{"name": "Ann", "age": 3}') == 0.0


@pytest.mark.parametrize(
    "schema",
    ["", "3", "[]", "{", '{"type": "strange"}', '{"pattern": "(?=a)"}', '{"properties": {"a": {"pattern": "("}}}',
     '{"patternProperties": {"(?!x)": {}}}', '{"patternProperties": {"a": {}}, "unevaluatedProperties": false}'],
)  # fmt: skip
def test_a_schema_that_cannot_judge_is_refused_before_the_run(schema: str) -> None:
    with pytest.raises(VerifierFailed):
        SCHEMA.reward(schema, "{}")
    with pytest.raises(DatasetInvalid, match="a:1: "):
        check_references(Rewards(json_schema=JsonSchemaVerifier()), [("a:1", schema)])


@pytest.mark.parametrize("reference", ["https://example.invalid/schema.json", "#/nowhere", "file:///etc/passwd"])
def test_a_reference_out_of_the_schema_fetches_nothing_and_is_no_verdict(reference: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # jsonschema warns before it would fetch
        with pytest.raises(VerifierFailed, match="the schema must end in itself"):
            SCHEMA.reward(json.dumps({"$ref": reference}), "{}")


def test_a_schema_that_turns_in_a_circle_is_no_verdict() -> None:
    with pytest.raises(VerifierFailed, match="got RecursionError"):
        SCHEMA.reward('{"$ref": "#"}', "{}")
