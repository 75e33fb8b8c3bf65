"""Verifiers `regex` and `jsonSchema`: hostile answers and references get a definite verdict in linear time."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.errors import VerifierFailed
from specrl.rewards.text.json_answers import JsonPlace
from specrl.rewards.text.patterns import JsonSchema, Regex

WHOLE = Regex("####", is_whole=True)
ANYWHERE = Regex("", is_whole=False)
SCHEMA = JsonSchema(JsonPlace())
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
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
    assert WHOLE.compute_reward(pattern, completion) == verdict


def test_with_match_anywhere_a_part_of_the_answer_suffices() -> None:
    assert ANYWHERE.compute_reward(r"\bdef\b", "here:\ndef f") == 1.0
    assert ANYWHERE.compute_reward(r"^def", "here:\ndef f") == 0.0
    assert ANYWHERE.compute_reward(r"(?m)^def", "here:\ndef f") == 1.0


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "a{100000}", "(?:a{1000}){1000}", "\ud800"])
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_refused_before_the_run(pattern: str) -> None:
    with pytest.raises(VerifierFailed, match="must be one of RE2's"):
        WHOLE.compute_reward(pattern, "#### a")
    with pytest.raises(VerifierFailed, match="a regular expression must be one of RE2's"):
        WHOLE.check_reference(pattern)


@given(text=st.text())
def test_any_text_has_a_verdict(text: str) -> None:
    assert WHOLE.compute_reward(r"\d+", text) in (0.0, 1.0)
    assert SCHEMA.compute_reward(PERSON, text) in (0.0, 1.0)
    assert SCHEMA.compute_reward("true", text) in (0.0, 1.0)


_ANY_TEXT = st.text(st.characters(exclude_categories=()))  # with halves of surrogate pairs
_ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _ANY_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(_ANY_TEXT, inner),
)


@given(
    schema=st.sampled_from(
        ["true", PERSON, '{"additionalProperties": {"type": "null"}}', '{"propertyNames": {"pattern": "^a"}}',
         '{"items": {"pattern": "^a"}}', '{"multipleOf": 0.01}', '{"uniqueItems": true}', '{"const": {"a": [0.1]}}']
    ),
    answer=_ANY_JSON,
)  # fmt: skip
def test_any_json_has_a_verdict(schema: str, answer: Any) -> None:
    assert SCHEMA.compute_reward(schema, json.dumps(answer)) in (0.0, 1.0)
    assert SCHEMA.compute_reward(schema, json.dumps(answer, ensure_ascii=False)) in (0.0, 1.0)


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
        ('{"multipleOf": 0.01}', "1" + "0" * 400, 1.0),
        ('{"multipleOf": 0.01}', "19.99", 1.0),
        ('{"multipleOf": 2.0}', str(2**64 + 1), 0.0),
        ('{"const": 9007199254740993}', "9007199254740992", 0.0),
        ('{"const": 9007199254740993}', "9007199254740992.0", 0.0),
        ('{"maximum": 9007199254740992}', "9007199254740993", 0.0),
        ('{"enum": [1]}', "1.0", 1.0),
        ('{"enum": [1]}', "true", 0.0),
        ('{"minimum": 0}', "9" * 4000, 1.0),
        ('{"minimum": 0}', "9" * 5000, 0.0),
        ('{"type": "string"}', r'"\ud800"', 1.0),
        ('{"type": "string"}', '"\ud800"', 1.0),
        ('{"additionalProperties": {"type": "null"}}', r'{"\ud800": null}', 1.0),
        ('{"additionalProperties": {"type": "null"}}', r'{"a": [{"\uDFFF": 1}]}', 0.0),
        ('{"const": "\U0001f600"}', r'"\ud83d\ude00"', 1.0),
        ("true", "\ufeff1", 0.0),
        ("true", '"' + '\\"' * 10**5, 0.0),
        ("true", '["' + '\\"' * 10**5 + '"]', 1.0),
        ('{"uniqueItems": true}', json.dumps([{"a": i} for i in range(300)]), 1.0),
        ('{"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}', "3.0", 1.0),
        ('{"patternProperties": {"^x": {}}, "unevaluatedProperties": false}', '{"xa": 1}', 1.0),
        ('{"patternProperties": {"^x": {}}, "unevaluatedProperties": false}', '{"ya": 1}', 0.0),
        ('{"format": "date"}', '"yesterday"', 1.0),
        ('{"$schema": "http://json-schema.org/draft-07/schema#", "format": "date"}', '"yesterday"', 1.0),
        ('{"$schema": "http://json-schema.org/draft-07/schema#", "contentEncoding": "base64"}', '"%%%"', 1.0),
        ('{"$schema": "http://json-schema.org/draft-07/schema#", "contentMediaType": "application/json"}', '"%"', 1.0),
        (r'{"pattern": "^\\d+$"}', '"18"', 1.0),
        (r'{"pattern": "^\\d+$"}', '"١٨"', 0.0),
        (r'{"pattern": "^\\w$"}', '"é"', 0.0),
        (r'{"pattern": "^\\p{L}$"}', '"é"', 1.0),
        ('{"pattern": "a$"}', r'"a\n"', 0.0),
        ('{"pattern": "(?i)paris"}', '"PARIS"', 1.0),
    ],
)
def test_an_answer_gets_1_only_if_it_is_valid_under_the_schema(schema: str, completion: str, verdict: float) -> None:
    assert SCHEMA.compute_reward(schema, completion) == verdict


def test_the_answer_follows_the_last_mark() -> None:
    marked = JsonSchema(JsonPlace("Answer:"))
    assert marked.compute_reward(PERSON, 'I think.\nAnswer: 3\nAnswer: {"name": "Ann", "age": 3}') == 1.0
    assert marked.compute_reward(PERSON, '{"name": "Ann", "age": 3}') == 0.0


@pytest.mark.parametrize(
    "schema",
    ["", "3", "[]", "{", '"{}"', '{"type": "strange"}', '{"const": NaN}', '{"maximum": 1e999}', '{"pattern": 3}',
     r'{"const": "\ud800"}', r'{"properties": {"\ud800": {}}}', "[" * 10**5, '{"not": ' * 300 + "{}" + "}" * 300],
)  # fmt: skip
def test_a_malformed_schema_is_refused_before_the_run(schema: str) -> None:
    with pytest.raises(VerifierFailed, match=r"the reference must be a JSON Schema, got .*; correct the data set"):
        SCHEMA.compute_reward(schema, "{}")
    with pytest.raises(VerifierFailed, match=r"the reference must be a JSON Schema, got .*; correct the data set"):
        SCHEMA.check_reference(schema)


@pytest.mark.parametrize("pattern", ["(?=a)", "(?!x)", "(?<=a)b", r"(a)\1", r"(?P<n>a)(?P=n)", "(?>a)", "("])
@pytest.mark.parametrize("draft", [{}, {"$schema": DRAFT_4}, {"$schema": DRAFT_7}])
def test_a_schema_pattern_without_linear_time_is_refused(pattern: str, draft: dict[str, Any]) -> None:
    for place in (
        {"pattern": pattern},
        {"patternProperties": {pattern: {}}},
        {"properties": {"a": {"pattern": pattern}}},
        {"allOf": [{"$ref": "#/elsewhere"}], "elsewhere": {"pattern": pattern}},
    ):
        with pytest.raises(VerifierFailed, match="a pattern of a JSON Schema must be one of Rust's regex crate"):
            SCHEMA.check_reference(json.dumps(draft | place))


@pytest.mark.parametrize("schema", [{"pattern": r"\p{L}{5000}"}, {"patternProperties": {".{100000}": {}}}])
def test_a_schema_whose_pattern_would_be_too_large_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(VerifierFailed, match="need at most 64 MiB once compiled"):
        SCHEMA.check_reference(json.dumps(schema))


@pytest.fixture
def fetched() -> Iterator[tuple[str, list[str]]]:
    """Start a server. Yields its address and the list of paths that were requested."""
    asked: list[str] = []

    class Schemas(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Schemas) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        serving.join()


def test_an_external_schema_reference_is_refused_and_never_fetched(fetched: tuple[str, list[str]]) -> None:
    address, asked = fetched
    for reference in (f"{address}/schema.json", "https://example.invalid/schema.json", "file:///etc/passwd"):
        for schema in (
            {"$ref": reference},
            {"$schema": reference},
            {"$defs": {"a": {"$ref": reference}}},
            {"$id": reference, "$ref": "other.json"},
            {"$dynamicRef": f"{reference}#a"},
            {"$schema": DRAFT_7, "definitions": {"a": {"$ref": reference}}},
        ):
            with pytest.raises(VerifierFailed, match="must refer to itself alone"):
                SCHEMA.check_reference(json.dumps(schema))
        SCHEMA.check_reference(json.dumps({"const": {"$ref": reference}}))  # data
    assert not asked


@pytest.mark.parametrize("schema", [{"$ref": "#/nowhere"}, {"$ref": "#nowhere"}, {"$ref": "nowhere"}])
def test_an_unresolvable_schema_reference_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(VerifierFailed, match="must refer to itself alone"):
        SCHEMA.check_reference(json.dumps(schema))


def test_a_draft_that_is_not_supported_is_refused() -> None:
    with pytest.raises(VerifierFailed, match="be of draft 4, 6, 7, 2019-09 or 2020-12"):
        SCHEMA.check_reference('{"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 2}')


ITSELF = {"$ref": "#"}


@pytest.mark.parametrize(
    "schema",
    [
        ITSELF,
        {"not": ITSELF},
        {"allOf": [{"type": "object"}, ITSELF]},
        {"anyOf": [{"type": "object"}, {"oneOf": [ITSELF]}]},
        {"if": {"type": "array"}, "then": {}, "else": ITSELF},
        {"dependentSchemas": {"a": ITSELF}},
        {"$schema": DRAFT_7, "dependencies": {"a": ITSELF}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "$ref": "#/$defs/a"}}},
        {"$id": "https://e.invalid/r", "$ref": "b/", "$defs": {"a": {"$id": "a", "$ref": "r"},
                                                               "b": {"$id": "b/", "$ref": "../a"}}},
        {"$id": "https://e.invalid/r", "items": {"$id": "a", "$ref": "#"}},
        {"$schema": DRAFT_4, "id": "https://e.invalid/x", "allOf": [{"id": "y", "allOf": [{"$ref": "x"}]}]},
        {"$schema": DRAFT_2019, "$recursiveRef": "#"},
        {"$dynamicAnchor": "n", "$dynamicRef": "#n"},
        {"$id": "https://e.invalid/strict", "$dynamicAnchor": "node", "$ref": "tree",
         "$defs": {"tree": {"$id": "tree", "allOf": [{"$dynamicRef": "#node"}],
                            "$defs": {"default": {"$dynamicAnchor": "node"}}}}},
    ],
)  # fmt: skip
def test_a_cyclic_schema_is_refused_before_the_run(schema: dict[str, Any]) -> None:
    """jsonschema-rs accepts every value under such a schema."""
    reference = json.dumps(schema)
    with pytest.raises(VerifierFailed, match=r"must not lead back to itself, got .* -> "):
        SCHEMA.compute_reward(reference, "{}")
    with pytest.raises(VerifierFailed, match="a reference of a JSON Schema must not lead back to itself"):
        SCHEMA.check_reference(reference)


STRICT_TREE = {
    "$id": "https://e.invalid/strict", "$dynamicAnchor": "node", "$ref": "tree", "unevaluatedProperties": False,
    "$defs": {"tree": {"$id": "tree", "$dynamicAnchor": "node", "type": "object",
                       "properties": {"children": {"items": {"$dynamicRef": "#node"}}}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "completion", "verdict"),
    [
        ({"properties": {"a": {"anyOf": [ITSELF, {"type": "null"}]}}, "maxProperties": 1}, '{"a": {"a": null}}', 1.0),
        ({"items": {"allOf": [ITSELF]}, "type": "array"}, "[[[]], {}]", 0.0),
        ({"properties": {"$ref": {"type": "null"}, "not": ITSELF}}, '{"$ref": 1}', 0.0),
        ({"const": {"$ref": "#"}}, '{"$ref": "#"}', 1.0),
        ({"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)} | {"2000": False}},
         "1", 0.0),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, '{"type": "strange"}', 0.0),
        ({"$schema": DRAFT_2019, "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}, "maxItems": 1}, "[[1,2]]",
         0.0),
        (STRICT_TREE, '{"children": [{"children": []}]}', 1.0),
        (STRICT_TREE, '{"children": [{"childs": []}]}', 0.0),
    ],
)  # fmt: skip
def test_a_schema_reference_that_descends_into_the_answer_is_not_a_cycle(
    schema: dict[str, Any], completion: str, verdict: float
) -> None:
    assert SCHEMA.compute_reward(json.dumps(schema), completion) == verdict
