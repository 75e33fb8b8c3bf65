"""Compare the output or result of an answer with the expected one. docs/rewards.md, "Programs", has the rules.

Called by `sandbox_runner`, in the worker. Invariant: time is linear in the size of what an answer sends. Hashing values
that an answer chose can take quadratic time. So results are compared in their encoded form, without `codec.decode`,
which builds sets and dicts.
"""

from __future__ import annotations

import decimal
import math
import re
from typing import Any

_RETURNED_TOLERANCE = 1e-9
"""Largest relative difference between a returned float and the expected one."""

_PRINTED_TOLERANCE = decimal.Decimal("1e-6")
"""Largest relative difference between a printed decimal and the expected one. Most tasks that print decimals ask for
this precision."""

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][+-]?[0-9]{1,4})?")
"""Numbers as programs print them. `007` is text: a task that asks for digits means each of them."""

_LONGEST_NUMBER = 1000  # characters; a longer word is compared as text
# Holds the exact difference of two such numbers. No traps: operations return NaN or infinity instead of raising.
_EXACT_CONTEXT = decimal.Context(prec=2 * _LONGEST_NUMBER + 20, Emax=10**6, Emin=-(10**6), traps=[])


def is_same_text(given: str, expected: str) -> bool:
    """Whether two outputs have the same lines, apart from white space around each line and around the whole."""
    given_lines = given.strip().split("\n")
    expected_lines = expected.strip().split("\n")
    return len(given_lines) == len(expected_lines) and all(map(_same_line, given_lines, expected_lines))


def _same_line(given: str, expected: str) -> bool:
    if given.strip() == expected.strip():
        return True
    given_words = given.split()
    expected_words = expected.split()
    return len(given_words) == len(expected_words) and all(map(_same_word, given_words, expected_words))


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    given_number = _parse_number(given)
    expected_number = _parse_number(expected)
    if given_number is None or expected_number is None:
        return False

    # Integers must be exact. Decimals may differ by the relative bound, or by half of their last printed digit.
    difference = _EXACT_CONTEXT.abs(_EXACT_CONTEXT.subtract(given_number, expected_number))
    if difference.is_nan() or difference == 0 or not _is_decimal(expected):
        return difference == 0
    shown = decimal.Decimal((0, (5,), min(0, int(expected_number.as_tuple().exponent)) - 1))  # half of the last digit
    relative = _EXACT_CONTEXT.multiply(_PRINTED_TOLERANCE, _EXACT_CONTEXT.abs(expected_number))
    return difference <= max(relative, shown if shown <= _PRINTED_TOLERANCE else decimal.Decimal(0))


def _parse_number(word: str) -> decimal.Decimal | None:
    if len(word) > _LONGEST_NUMBER or not _NUMBER.fullmatch(word) or not any(map(str.isdigit, word)):
        return None
    number = _EXACT_CONTEXT.create_decimal(word)
    return None if number.is_nan() else number


def _is_decimal(word: str) -> bool:
    return any(mark in word for mark in ".eE")


def is_same_value(given: Any, expected: Any) -> bool:
    """Whether a result equals the expected JSON value, in which tuples are lists and dict keys are text.

    given: the result as `codec.encode` wrote it, or whatever a hostile answer sent instead.
    """
    if isinstance(given, list):
        return _same_list(given, expected)
    if isinstance(given, dict):
        return _same_tagged_value(given, expected)
    return _same_plain(given, expected)


def _same_list(given: Any, expected: Any) -> bool:
    return (
        isinstance(given, list)
        and isinstance(expected, list)
        and len(given) == len(expected)
        and all(map(is_same_value, given, expected))
    )


def _same_tagged_value(given: dict[str, Any], expected: Any) -> bool:
    """Compare a value that `codec.encode` tagged with its type, since JSON has no form for it."""
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
    return False  # sets, bytes, complex numbers and infinities equal no JSON value


def _same_dict(content: list[Any], expected: dict[str, Any]) -> bool:
    if len(content) != len(expected):
        return False
    seen = set()
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            return False
        key = _read_key(pair[0])
        if key is None or key in seen or key not in expected or not is_same_value(pair[1], expected[key]):
            return False  # `key in seen`: {1: 7, "1": 5} is two values for one key
        seen.add(key)
    return True


def _read_key(given: Any) -> str | None:
    """Return the text that JSON writes for a dict key, or None if it cannot be a key of JSON."""
    if isinstance(given, dict) and list(given) == ["int"] and isinstance(given["int"], str):
        try:
            given = int(given["int"], 16)
        except ValueError:
            return None
    try:
        return str(given) if given is None or isinstance(given, str | int | float) else None
    except ValueError:  # more digits than Python converts to text (sys.set_int_max_str_digits)
        return None


def _same_plain(given: Any, expected: Any) -> bool:
    if isinstance(given, bool) or isinstance(expected, bool):  # bool is an int in Python: True == 1
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        if isinstance(given, float) and isinstance(expected, float):
            return given == expected or (
                math.isfinite(given) and abs(given - expected) <= _RETURNED_TOLERANCE * abs(expected) < math.inf
            )
        return given == expected  # Python compares int and float exactly, without rounding the integer
    return type(given) is type(expected) and bool(given == expected)
