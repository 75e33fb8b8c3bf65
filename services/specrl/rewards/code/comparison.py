"""Whether what an answer printed or returned is what was expected. The rules are in docs/rewards.md, "Programs".

Called by `verifier` and `trial`, in the worker: so whatever an answer sends costs time linear in its size. A result is
compared as it came out of its frame, before `codec.decode` would make sets and dicts of it: what hashes values that an
answer has chosen can take time in the square of their number.
"""

from __future__ import annotations

import decimal
import math
import re
from typing import Any

_CLOSE = 1e-9
"""Relative difference at which a float is the float that was expected."""
_PRINTED_CLOSE = decimal.Decimal("1e-6")
"""Difference at which a printed decimal is the one that was expected: tasks that print them ask for 1e-6 as a rule."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][+-]?[0-9]{1,4})?")
"""As programs print numbers. `007` is text: where digits are what was asked for, each of them counts."""
_LONGEST_NUMBER = 1000
_EXACT = decimal.Context(prec=2 * _LONGEST_NUMBER + 20, Emax=10**6, Emin=-(10**6), traps=[])


def same_text(given: str, expected: str) -> bool:
    """Whether two outputs have the same lines, white space around lines and around the whole aside."""
    given_lines, expected_lines = given.strip().split("\n"), expected.strip().split("\n")
    return len(given_lines) == len(expected_lines) and all(map(_same_line, given_lines, expected_lines))


def _same_line(given: str, expected: str) -> bool:
    if given.strip() == expected.strip():
        return True
    given_words, expected_words = given.split(), expected.split()
    return len(given_words) == len(expected_words) and all(map(_same_word, given_words, expected_words))


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    given_number, expected_number = _number(given), _number(expected)
    if given_number is None or expected_number is None:
        return False
    difference = _EXACT.abs(_EXACT.subtract(given_number, expected_number))
    if difference.is_nan() or difference == 0 or not _is_decimal(expected):
        return difference == 0
    shown = decimal.Decimal((0, (5,), min(0, int(expected_number.as_tuple().exponent)) - 1))  # half of the last digit
    relative = _EXACT.multiply(_PRINTED_CLOSE, _EXACT.abs(expected_number))
    return difference <= max(relative, shown if shown <= _PRINTED_CLOSE else decimal.Decimal(0))


def _number(word: str) -> decimal.Decimal | None:
    if len(word) > _LONGEST_NUMBER or not _NUMBER.fullmatch(word) or not any(map(str.isdigit, word)):
        return None
    number = _EXACT.create_decimal(word)
    return None if number.is_nan() else number


def _is_decimal(word: str) -> bool:
    return any(mark in word for mark in ".eE")


def same_value(given: Any, expected: Any) -> bool:
    """Whether a result is the JSON that is expected: a tuple is a list there, and the keys of a dict are text.

    given: the result as `codec.encode` wrote it, or whatever somebody has sent in its place.
    """
    if isinstance(given, list):
        return _same_list(given, expected)
    if isinstance(given, dict):
        return _same_written(given, expected)
    return _same_plain(given, expected)


def _same_list(given: Any, expected: Any) -> bool:
    return (
        isinstance(given, list)
        and isinstance(expected, list)
        and len(given) == len(expected)
        and all(map(same_value, given, expected))
    )


def _same_written(given: dict[str, Any], expected: Any) -> bool:
    """For a value that JSON has no form of its own for."""
    if len(given) != 1:
        return False
    ((kind, content),) = given.items()
    if kind == "tuple":
        return _same_list(content, expected)
    if kind == "dict":
        return isinstance(content, list) and isinstance(expected, dict) and _same_dict(content, expected)
    if kind == "int" and isinstance(content, str):
        try:
            return _same_plain(int(content, 16), expected)
        except ValueError:
            return False
    return False  # sets, bytes, complex numbers, infinities: nothing that JSON has


def _same_dict(content: list[Any], expected: dict[str, Any]) -> bool:
    if len(content) != len(expected):
        return False
    seen = set()
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            return False
        key = _key(pair[0])
        if key is None or key in seen or key not in expected or not same_value(pair[1], expected[key]):
            return False  # `key in seen`: {1: 7, "1": 5} is two values for one key
        seen.add(key)
    return True


def _key(given: Any) -> str | None:
    if isinstance(given, dict) and list(given) == ["int"] and isinstance(given["int"], str):
        try:
            given = int(given["int"], 16)
        except ValueError:
            return None
    try:
        return str(given) if given is None or isinstance(given, str | int | float) else None
    except ValueError:  # more digits than Python writes
        return None


def _same_plain(given: Any, expected: Any) -> bool:
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        if isinstance(given, float) and isinstance(expected, float):
            return given == expected or (
                math.isfinite(given) and abs(given - expected) <= _CLOSE * abs(expected) < math.inf
            )
        return given == expected  # exactly, also of an integer that no float holds
    return type(given) is type(expected) and bool(given == expected)
