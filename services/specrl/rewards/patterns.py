"""Verifiers of form: `regex` and `jsonSchema`, whose reference is a pattern for answers.

Stage 3 of the loop; `pool.VerifierPool` calls them. Invariants: an answer that cannot be read, or is too deep to be, is
wrong (0), and a reference that cannot be read is VerifierFailed. Answers are hostile, so patterns are RE2's everywhere:
its time is linear in the text, where Python's `re` may take for ever; look-around and backreferences, which it lacks,
are refused before the run starts. Nothing is fetched: a schema's references lead into the schema itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specrl.errors import VerifierFailed
from specrl.rewards.verifiers import Verifier, marked_answer

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_PATTERN_BYTES = 64 * 2**20
"""Memory of one compiled pattern; a larger one is refused. RE2's own default is 8 MiB."""
_DEEPEST = 64
"""Levels of an answer in JSON. Validation recurses, and Python's limit of 1000 frames must not decide a verdict."""
_BRACKET_OR_TEXT = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
"""A text that is never closed reaches to the end: every character is read once."""
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

    def reward(self, reference: str, completion: str) -> float:
        pattern, answer = _compiled(reference), marked_answer(completion, self.answer_after)
        if answer is None:
            return 0.0
        text = _whole_characters(answer)
        return float((pattern.fullmatch(text) if self.is_whole else pattern.search(text)) is not None)


@dataclass(frozen=True)
class JsonSchema(Verifier):
    """Whether the answer is JSON that the reference, a JSON Schema, permits."""

    answer_after: str

    def ready(self) -> None:
        _validator("{}")

    def check_reference(self, reference: str) -> None:
        _validator(reference)

    def reward(self, reference: str, completion: str) -> float:
        validator = _validator(reference)
        try:
            answer = _read_json(_after(completion, self.answer_after))
        except (ValueError, RecursionError):
            return 0.0
        from referencing.exceptions import Unresolvable

        try:
            return float(validator.is_valid(answer))
        except (Unresolvable, RecursionError) as error:
            raise VerifierFailed(
                f"the schema must end in itself, got {type(error).__name__}: {error!s:.200}; correct the data set"
            ) from error


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


def _matches(pattern: str, text: str) -> bool:
    return _compiled(pattern).search(_whole_characters(text)) is not None


def _whole_characters(text: str) -> str:
    """Halves of surrogate pairs, which UTF-8 has no bytes for, become question marks."""
    return text.encode(errors="replace").decode()


def _after(completion: str, mark: str) -> str:
    _, _, after = completion.rpartition(mark) if mark and mark in completion else ("", "", "" if mark else completion)
    text = after.strip()
    fenced = _FENCED.match(text)
    return fenced.group(1) if fenced else text


def _read_json(text: str) -> Any:
    """A JSON value as the standard has it. Raises ValueError for other text, and for what is deeper than allowed."""
    depth = deepest = 0
    for bracket in _BRACKET_OR_TEXT.findall(text):
        depth += 1 if bracket in ("[", "{") else -1 if bracket in ("]", "}") else 0
        deepest = max(deepest, depth)
    if deepest > _DEEPEST:
        raise ValueError(f"JSON must have <= {_DEEPEST} levels, got {deepest}")
    return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)


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
    """The validator of a schema. Raises VerifierFailed when it is none."""
    import jsonschema
    import referencing

    try:
        schema = json.loads(reference)
        if not isinstance(schema, dict | bool):
            raise TypeError("a schema is an object, true or false")
        base: Any = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        base.check_schema(schema)
    except (ValueError, TypeError, RecursionError, jsonschema.SchemaError) as error:
        raise VerifierFailed(
            f"the reference must be a JSON Schema, got {error!s:.200}; correct the data set"
        ) from error
    for pattern in _patterns(schema):
        _compiled(pattern)
    linear = {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional}
    known = {name: check for name, check in linear.items() if name in base.VALIDATORS}
    extended: Any = jsonschema.validators.extend(base, known)  # type: ignore[no-untyped-call] # typed in part
    validator: Validator = extended(schema, registry=referencing.Registry())
    return validator


def _patterns(schema: Any) -> Iterator[str]:
    """Every pattern in a schema. Raises VerifierFailed for those that would be matched by Python's `re` after all."""
    stack = [schema]
    while stack:
        place = stack.pop()
        if isinstance(place, list):
            stack += place
        if not isinstance(place, dict):
            continue
        stack += place.values()
        if isinstance(place.get("pattern"), str):
            yield place["pattern"]
        if isinstance(place.get("patternProperties"), dict):
            yield from place["patternProperties"]
    text = json.dumps(schema)
    if '"unevaluatedProperties"' in text and '"patternProperties"' in text:
        raise VerifierFailed(
            "a schema must not have both patternProperties and unevaluatedProperties, got both; "
            "use additionalProperties"
        )


# What jsonschema does with these keywords, but with RE2. (validator, value of the keyword, instance, schema around it.)


def _pattern(validator: Validator, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield ValidationError("does not match")


def _pattern_properties(validator: Any, patterns: dict[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, subschema in patterns.items():
            for name, value in instance.items():
                if _matches(pattern, name):
                    yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if not validator.is_type(instance, "object"):
        return
    patterns = schema.get("patternProperties", {})
    for name, value in instance.items():
        if name in schema.get("properties", {}) or any(_matches(pattern, name) for pattern in patterns):
            continue
        if validator.is_type(allowed, "object"):
            yield from validator.descend(value, allowed, path=name)
        elif not allowed:
            yield ValidationError("is not allowed")
