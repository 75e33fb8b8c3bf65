"""Verifiers of form: `regex` and `jsonSchema`, whose reference is a pattern for answers.

Stage 3 of the loop; `pool.VerifierPool` calls them. Invariants: an answer that cannot be read, or is too deep to be, is
wrong (0), and a reference that cannot be read is VerifierFailed. Answers are hostile, so the time of every pattern is
linear in the text, where Python's `re` may take for ever: RE2 matches for `regex`, Rust's regex crate for `jsonSchema`.
Both lack look-around and backreferences, which are refused before the run starts. Nothing is fetched: a schema's
references lead into the schema itself or to the drafts that jsonschema-rs carries.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, NamedTuple

from specrl.errors import VerifierFailed
from specrl.rewards.final_answer import marked_answer
from specrl.rewards.verifier import NO_ANSWER, Verdict, Verifier

if TYPE_CHECKING:
    from jsonschema_rs import Resolver, Validator

_PATTERN_BYTES = 64 * 2**20
"""Memory of one compiled pattern; a larger one is refused. RE2's own default is 8 MiB, the regex crate's 10 MiB."""
_DEEPEST = 64
"""Levels of an answer in JSON. Reading recurses, and neither Python's limit of 1000 frames nor jsonschema-rs's of 255
levels must decide a verdict."""
_BASE = "json-schema:///"
"""The address of a schema without `$id` in jsonschema-rs, which those within it are relative to."""
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""Keywords whose schemas judge the same value as the schema that holds them."""
_IN_PLACE_BY_NAME = ("dependentSchemas", "dependencies")
"""The same, but the schemas have names."""
_BRACKET_OR_TEXT = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
"""A text that is never closed reaches to the end: every character is read once."""
_HALF = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")
"""Half of a surrogate pair, as a character or as an escape."""
_FENCED = re.compile(r"\A```(?:json)?[ \t]*\n(.*?)\n?```\Z", re.DOTALL)


@dataclass(frozen=True)
class Regex(Verifier):
    """Whether the final answer matches the reference."""

    answer_after: str
    is_whole: bool

    def ready(self) -> None:
        _compiled("1")

    def check_reference(self, reference: str) -> None:
        _compiled(reference)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        pattern, answer = _compiled(reference), marked_answer(completion, self.answer_after)
        if answer is None:
            return NO_ANSWER
        text = _whole_characters(answer)
        found = pattern.fullmatch(text) if self.is_whole else pattern.search(text)
        return Verdict(0.0, text, "no match") if found is None else Verdict(1.0, text, "matches")


@dataclass(frozen=True)
class JsonSchema(Verifier):
    """Whether the answer is JSON that the reference, a JSON Schema, permits."""

    answer_after: str

    def ready(self) -> None:
        _validator("{}")

    def check_reference(self, reference: str) -> None:
        _validator(reference)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        validator = _validator(reference)
        text = _after(completion, self.answer_after)
        try:
            answer = _read_json(text)
        except (ValueError, RecursionError):
            return NO_ANSWER
        is_valid = validator.is_valid(answer)
        return Verdict(float(is_valid), text, "valid" if is_valid else "not valid under the schema")


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    import re2

    options = re2.Options()
    options.log_errors = False
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


def _whole_characters(text: str) -> str:
    """Halves of surrogate pairs, which UTF-8 has no bytes for, become question marks."""
    return text.encode(errors="replace").decode()


def _after(completion: str, mark: str) -> str:
    _, _, after = completion.rpartition(mark) if mark and mark in completion else ("", "", "" if mark else completion)
    text = after.strip()
    fenced = _FENCED.match(text)
    return fenced.group(1) if fenced else text


def _read_json(text: str) -> Any:
    """A JSON value as the standard has it, in whole characters. Raises ValueError for other and for too deep text."""
    depth = deepest = 0
    for bracket in _BRACKET_OR_TEXT.findall(text):
        depth += 1 if bracket in ("[", "{") else -1 if bracket in ("]", "}") else 0
        deepest = max(deepest, depth)
    if deepest > _DEEPEST:
        raise ValueError(f"JSON must have <= {_DEEPEST} levels, got {deepest}")
    value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)
    return _with_whole_characters(value) if _HALF.search(text) else value


def _with_whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return _whole_characters(value)
    if isinstance(value, list):
        return [_with_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return _object([(_whole_characters(name), _with_whole_characters(item)) for name, item in value.items()])
    return value


def _refuse(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number must be finite")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two members with one name, readers take one or the other: such an answer says nothing."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the names of an object must differ")
    return found


@lru_cache(maxsize=256)  # the rollouts of a group share their reference
def _validator(reference: str) -> Validator:
    """The validator of a schema. Raises VerifierFailed when it is none, or might not end."""
    import jsonschema_rs

    try:
        # Other parsers would read NaN and 1e999, which are no JSON, as null.
        schema = json.loads(reference, parse_constant=_refuse, parse_float=_finite)
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
        raise VerifierFailed(_why_no_schema(error)) from error
    _check_references_end(schema)
    return validator


def _why_no_schema(error: Exception) -> str:
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
    """A keyword that says something of a value and forbids nothing. jsonschema-rs asserts two of them in draft 7."""

    def __init__(self, schema: dict[str, Any], value: Any, path: list[str | int]) -> None:
        pass

    def validate(self, instance: Any) -> None:
        pass


class _Reference(NamedTuple):
    """A reference as it is written, and the address of the schema that it is written in."""

    base: str
    target: str
    is_dynamic: bool
    """Whether it may lead to any dynamic anchor of its name, too."""


def _check_references_end(schema: Any) -> None:
    """Raise VerifierFailed where a reference leads back to itself without going into the value that it judges.

    jsonschema-rs takes such a circle for true. A reference below `items` or `properties` makes no circle: it judges a
    part of the value, and values end. Called for schemas that jsonschema-rs has accepted, so all references resolve.
    """
    import jsonschema_rs

    registry = jsonschema_rs.Registry([(_BASE, schema)], retriever=_fetch_nothing)
    everywhere = list(_schemas(schema, registry.resolver(_BASE), is_in_place=False))
    anchors = [anchor for place, base in everywhere for anchor in _dynamic_anchors(place, base)]
    next_references: dict[_Reference, list[_Reference]] = {}
    waiting = [reference for place, base in everywhere for reference in _references(place, base)]
    while waiting:
        reference = waiting.pop()
        if reference in next_references:
            continue
        try:
            found = registry.resolver(reference.base).lookup(reference.target)
        except jsonschema_rs.ReferencingError:  # data that looks like a reference, as under `const`
            next_references[reference] = []
            continue
        inner = _schemas(found.contents, found.resolver, is_in_place=True)
        after = [reference for place, base in inner for reference in _references(place, base)]
        if reference.is_dynamic:
            _, _, name = reference.target.partition("#")
            after += [anchor for anchor in anchors if anchor.target == f"#{name}"]
        next_references[reference] = after
        waiting += after
    try:
        TopologicalSorter(next_references).prepare()
    except CycleError as error:
        circle = " -> ".join(reference.target for reference in reversed(error.args[1]))
        raise VerifierFailed(
            f"a reference of a JSON Schema must not lead back to itself, got {circle:.200}; "
            "put it under properties or items, where it judges a part of the answer"
        ) from error


def _schemas(schema: Any, resolver: Resolver, *, is_in_place: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """A schema and all below it, or those alone that judge the same value; each with the address that it stands at.

    All below it includes some objects that are no schemas. No schema leads to those, so they close no circle.
    """
    stack: list[tuple[Any, Resolver]] = [(schema, resolver)]
    while stack:
        place, around = stack.pop()
        if isinstance(place, list):
            stack += [(item, around) for item in place]
        if not isinstance(place, dict):
            continue
        here = _resolver_inside(place, around)
        yield place, here.base_uri
        for keyword, value in place.items():
            if is_in_place and keyword in _IN_PLACE_BY_NAME and isinstance(value, dict):
                stack += [(item, here) for item in value.values()]
            elif not is_in_place or keyword in _IN_PLACE:
                stack.append((value, here))


def _resolver_inside(place: dict[str, Any], around: Resolver) -> Resolver:
    """What resolves references in a schema, which may have an address of its own."""
    import jsonschema_rs

    address = place.get("$id", place.get("id"))  # `id` in draft 4
    if not isinstance(address, str):
        return around
    try:
        return around.lookup(address).resolver
    except jsonschema_rs.ReferencingError:  # not an address in this draft, or in data
        return around


def _references(place: dict[str, Any], base: str) -> Iterator[_Reference]:
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
        target = place.get(keyword)
        if isinstance(target, str):
            yield _Reference(base, target, is_dynamic=keyword != "$ref")


def _dynamic_anchors(place: dict[str, Any], base: str) -> Iterator[_Reference]:
    name = place.get("$dynamicAnchor", "" if place.get("$recursiveAnchor") is True else None)
    if isinstance(name, str):
        yield _Reference(base, f"#{name}", is_dynamic=False)


def _fetch_nothing(address: str) -> Any:
    raise ValueError(f"nothing is fetched, got {address}")
