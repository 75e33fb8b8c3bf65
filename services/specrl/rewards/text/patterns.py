"""Verifiers `regex` and `jsonSchema`: the reference is a pattern that a right answer matches.

Called by `pool.VerifierPool`. Invariants: an answer that cannot be parsed, or is nested too deeply, gets 0. A reference
that cannot be parsed raises VerifierFailed. Answers may be hostile, and Python's `re` can take exponential time. So
`regex` uses RE2 and `jsonSchema` uses Rust's regex crate, which take time linear in the text. Neither supports
look-around or backreferences; references that use them are refused before the run starts. Nothing is fetched from the
network: a schema may refer only to itself or to the drafts that are built into jsonschema-rs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, NamedTuple

from specrl.errors import VerifierFailed
from specrl.rewards.text.final_answer import find_marked_answer
from specrl.rewards.text.json_answers import (
    JsonPlace,
    extract_json_text,
    parse_finite_float,
    parse_json,
    refuse_constant,
    replace_surrogates,
)
from specrl.rewards.verifier import NO_ANSWER, Verdict, Verifier

if TYPE_CHECKING:
    from jsonschema_rs import Resolver, Validator

_PATTERN_BYTES = 64 * 2**20
"""Most memory of one compiled pattern; a larger one is refused. RE2's default is 8 MiB, the regex crate's 10 MiB."""

_BASE = "json-schema:///"
"""The base URI that jsonschema-rs gives to a schema without `$id`. References inside are relative to it."""

_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""Keywords whose subschemas apply to the same value as the schema that holds them."""

_IN_PLACE_BY_NAME = ("dependentSchemas", "dependencies")
"""Keywords of the same kind, whose value maps names to subschemas."""


@dataclass(frozen=True)
class Regex(Verifier):
    """Gives 1 if the final answer matches the reference, a regular expression, else 0.

    is_whole: whether the pattern must match all of the answer, or any part of it.
    """

    answer_after: str
    is_whole: bool

    def prepare_worker(self) -> None:
        compile_pattern("1")

    def check_reference(self, reference: str) -> None:
        compile_pattern(reference)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        pattern = compile_pattern(reference)
        answer = find_marked_answer(completion, self.answer_after)
        if answer is None:
            return NO_ANSWER
        text = replace_surrogates(answer)
        found = pattern.fullmatch(text) if self.is_whole else pattern.search(text)
        return Verdict(0.0, text, "no match") if found is None else Verdict(1.0, text, "matches")


@dataclass(frozen=True)
class JsonSchema(Verifier):
    """Gives 1 if the answer is JSON that is valid under the reference, a JSON Schema, else 0."""

    place: JsonPlace

    def prepare_worker(self) -> None:
        compile_schema("{}")

    def check_reference(self, reference: str) -> None:
        compile_schema(reference)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        validator = compile_schema(reference)
        text = extract_json_text(completion, self.place)
        try:
            answer = parse_json(text)
        except (ValueError, RecursionError):
            return NO_ANSWER
        is_valid = validator.is_valid(answer)
        return Verdict(float(is_valid), text, "valid" if is_valid else "not valid under the schema")


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> Any:
    """Compile an expression of RE2. Raises VerifierFailed if it is none."""
    import re2

    options = re2.Options()
    options.log_errors = False  # RE2 would write to stderr from C++; the error below carries the text
    options.max_mem = _PATTERN_BYTES
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0] if error.args else ""
        said = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise VerifierFailed(
            f"a regular expression must be one of RE2's, got {said} in {pattern[:80]!r}; rewrite it without "
            "look-around and backreferences"
        ) from error


@lru_cache(maxsize=256)  # the rollouts of a group share their reference
def compile_schema(reference: str) -> Validator:
    """Compile a schema. Raises VerifierFailed if it is not a JSON Schema, or if its references form a cycle."""
    import jsonschema_rs

    try:
        # jsonschema-rs would read NaN and 1e999, which are not JSON, as null. So Python parses the text.
        schema = json.loads(reference, parse_constant=refuse_constant, parse_float=parse_finite_float)
        if not isinstance(schema, dict | bool):
            raise TypeError("a schema is an object, true or false")
        validator = jsonschema_rs.validator_for(
            schema,
            validate_formats=False,
            offline=True,
            pattern_options=jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES),
            keywords={"contentEncoding": _NotAsserted, "contentMediaType": _NotAsserted},
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise VerifierFailed(_explain_schema_error(error)) from error
    _check_reference_cycles(schema)
    return validator


def _explain_schema_error(error: Exception) -> str:
    """Translate an error of jsonschema-rs into a message with a remedy."""
    from jsonschema_rs import ValidationError, ValidationErrorKind

    if not isinstance(error, ValidationError):
        return f"the reference must be a JSON Schema, got {error!s:.200}; correct the data set"
    match error.kind:
        case ValidationErrorKind.Format(format="regex"):
            return (
                "a pattern of a JSON Schema must be one of Rust's regex crate and need at most "
                f"{_PATTERN_BYTES // 2**20} MiB once compiled, got {str(error.instance)[:80]!r}; rewrite it without "
                "look-around, backreferences and large counts"
            )
        case ValidationErrorKind.Referencing():
            return (
                "a JSON Schema must refer to itself alone and be of draft 4, 6, 7, 2019-09 or 2020-12, since nothing "
                f"is fetched, got {error.message:.200}; put what it refers to under $defs"
            )
        case _:
            return f"the reference must be a JSON Schema, got {error.message:.200}; correct the data set"


class _NotAsserted:
    """Disables a keyword that should only annotate a value. jsonschema-rs asserts two such keywords in draft 7."""

    def __init__(self, schema: dict[str, Any], value: Any, path: list[str | int]) -> None:
        pass

    def validate(self, instance: Any) -> None:
        pass


class _SchemaReference(NamedTuple):
    """A reference as it is written, and the base URI of the schema that contains it."""

    base: str
    target: str
    is_dynamic: bool
    """Whether it can also resolve to any dynamic anchor of the same name."""


def _check_reference_cycles(schema: Any) -> None:
    """Raise VerifierFailed if a reference leads back to itself without descending into the value.

    jsonschema-rs treats such a cycle as valid for every value. A reference below `items` or `properties` closes no
    cycle: it applies to a part of the value, and values are finite. The schema must have been accepted by
    jsonschema-rs, so that all of its references resolve.
    """
    import jsonschema_rs

    # Build the graph: from each reference to those that apply to the same value at its target.
    registry = jsonschema_rs.Registry([(_BASE, schema)], retriever=_refuse_fetch)
    everywhere = list(_walk_schemas(schema, registry.resolver(_BASE), is_in_place=False))
    anchors = [anchor for place, base in everywhere for anchor in _find_dynamic_anchors(place, base)]
    next_references: dict[_SchemaReference, list[_SchemaReference]] = {}
    waiting = [reference for place, base in everywhere for reference in _find_references(place, base)]
    while waiting:
        reference = waiting.pop()
        if reference in next_references:
            continue
        try:
            found = registry.resolver(reference.base).lookup(reference.target)
        except jsonschema_rs.ReferencingError:  # not a reference but data that looks like one, as under `const`
            next_references[reference] = []
            continue
        inner = _walk_schemas(found.contents, found.resolver, is_in_place=True)
        after = [reference for place, base in inner for reference in _find_references(place, base)]
        if reference.is_dynamic:
            _, _, name = reference.target.partition("#")
            after += [anchor for anchor in anchors if anchor.target == f"#{name}"]
        next_references[reference] = after
        waiting += after

    # A topological order exists if and only if there is no cycle.
    try:
        TopologicalSorter(next_references).prepare()
    except CycleError as error:
        circle = " -> ".join(reference.target for reference in reversed(error.args[1]))
        raise VerifierFailed(
            f"a reference of a JSON Schema must not lead back to itself, got {circle:.200}; "
            "put it under properties or items, where it judges a part of the answer"
        ) from error


def _walk_schemas(schema: Any, resolver: Resolver, *, is_in_place: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield a schema and those below it, each with its base URI.

    is_in_place: yield only those that apply to the same value. Otherwise every object below is yielded, including some
    that are not schemas. No schema refers to those, so they close no cycle.
    """
    stack: list[tuple[Any, Resolver]] = [(schema, resolver)]
    while stack:
        place, around = stack.pop()
        if isinstance(place, list):
            stack += [(item, around) for item in place]
        if not isinstance(place, dict):
            continue
        here = _find_inner_resolver(place, around)
        yield place, here.base_uri
        for keyword, value in place.items():
            if is_in_place and keyword in _IN_PLACE_BY_NAME and isinstance(value, dict):
                stack += [(item, here) for item in value.values()]
            elif not is_in_place or keyword in _IN_PLACE:
                stack.append((value, here))


def _find_inner_resolver(place: dict[str, Any], around: Resolver) -> Resolver:
    """Return the resolver for references inside a schema, which may set its own base URI."""
    import jsonschema_rs

    address = place.get("$id", place.get("id"))  # `id` in draft 4
    if not isinstance(address, str):
        return around
    try:
        return around.lookup(address).resolver
    except jsonschema_rs.ReferencingError:  # the key means nothing in this draft, or stands in data
        return around


def _find_references(place: dict[str, Any], base: str) -> Iterator[_SchemaReference]:
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
        target = place.get(keyword)
        if isinstance(target, str):
            yield _SchemaReference(base, target, is_dynamic=keyword != "$ref")


def _find_dynamic_anchors(place: dict[str, Any], base: str) -> Iterator[_SchemaReference]:
    name = place.get("$dynamicAnchor", "" if place.get("$recursiveAnchor") is True else None)
    if isinstance(name, str):
        yield _SchemaReference(base, f"#{name}", is_dynamic=False)


def _refuse_fetch(address: str) -> Any:
    raise ValueError(f"schemas are never fetched, got {address}")
