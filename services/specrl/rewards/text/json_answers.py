"""Find and parse the JSON of a completion. The verifiers `jsonSchema` and `validJson` call it.

Invariants: time is linear in the text, since answers may be hostile. What cannot be parsed, or is nested too deeply,
raises ValueError.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from specrl.rewards.text.fenced_blocks import find_fenced_blocks
from specrl.rewards.text.final_answer import cut_at_closing_tag

_MAX_LEVELS = 64
"""Most levels of an answer in JSON. It is below Python's limit of 1000 frames and jsonschema-rs's limit of 255 levels,
so that neither of these decides a verdict."""

_BRACKET_OR_TEXT = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
"""A bracket, or a whole string, whose brackets do not count. An unclosed string extends to the end of the text, and the
possessive `*+` forbids backtracking, so each character is read once."""

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")
"""A surrogate code point, as a character or as an escape."""
_WHOLE_FENCED = re.compile(r"\A```(?:json)?[ \t]*\n(.*?)\n?```\Z", re.DOTALL)
_JSON_BLOCK = re.compile(r"(json[\dc]*)?", re.IGNORECASE)
"""Languages of a fenced block that may hold the answer. Models often omit the language; some write json5 or jsonc."""


@dataclass(frozen=True)
class JsonPlace:
    """Where the JSON of a completion is.

    answer_after: it follows the last occurrence of this mark; "" for the whole completion. in_block: it is the content
    of the last fenced block that is named json or has no name, and text around the block is ignored. Otherwise nothing
    but JSON may follow the mark, in a fenced block or without one.
    """

    answer_after: str = ""
    in_block: bool = False


def extract_json_text(completion: str, place: JsonPlace) -> str:
    """Return the text that should be JSON; "" if the completion has no such place."""
    mark = place.answer_after
    _, found, after = completion.rpartition(mark) if mark else ("", "yes", completion)
    if not found:
        return ""
    text = cut_at_closing_tag(after, mark).strip()
    if place.in_block:
        blocks = [block.content for block in find_fenced_blocks(text) if _JSON_BLOCK.fullmatch(block.language)]
        return blocks[-1].strip() if blocks else ""
    fenced = _WHOLE_FENCED.match(text)
    return fenced.group(1) if fenced else text


def parse_json(text: str) -> Any:
    """Parse JSON strictly: no NaN, no infinite numbers, no repeated names, no surrogates in the result.

    Raises ValueError for other text and for text nested deeper than `_MAX_LEVELS`.
    """
    depth = deepest = 0
    for bracket in _BRACKET_OR_TEXT.findall(text):
        depth += 1 if bracket in ("[", "{") else -1 if bracket in ("]", "}") else 0
        deepest = max(deepest, depth)
    if deepest > _MAX_LEVELS:
        raise ValueError(f"JSON must have <= {_MAX_LEVELS} levels, got {deepest}")
    value = json.loads(
        text, parse_constant=refuse_constant, parse_float=parse_finite_float, object_pairs_hook=_build_object
    )
    return _replace_nested_surrogates(value) if _LONE_SURROGATE.search(text) else value


def replace_surrogates(text: str) -> str:
    """Replace surrogates by question marks: UTF-8 cannot encode them, and RE2 and jsonschema-rs take UTF-8."""
    return text.encode(errors="replace").decode()


def _replace_nested_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_replace_nested_surrogates(item) for item in value]
    if isinstance(value, dict):
        pairs = [(replace_surrogates(name), _replace_nested_surrogates(item)) for name, item in value.items()]
        return _build_object(pairs)
    return value


def refuse_constant(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


def parse_finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number must be finite")
    return value


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse repeated names. JSON readers disagree on which member wins, so such an answer has no definite value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the names of an object must differ")
    return found
