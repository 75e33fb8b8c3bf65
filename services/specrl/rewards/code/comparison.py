"""Whether what an answer printed or returned is what was expected."""

from __future__ import annotations

import math
from typing import Any

_CLOSE = 1e-9
"""Relative and absolute difference at which two floats are the same result."""


def same_text(given: str | None, expected: str) -> bool:
    """Equality line by line, white space at the end of lines and of the output aside."""
    return given is not None and _lines(given) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same_value(given: Any, expected: Any) -> bool:
    """Equality of a result with JSON: a tuple is a list there, keys are text, and floats are close."""
    if isinstance(given, list | tuple) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(same_value, given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        named = {str(key): value for key, value in given.items()}
        return named.keys() == expected.keys() and all(same_value(named[key], expected[key]) for key in named)
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float) and type(given) is not type(expected):
        given, expected = float(given), float(expected)
    if isinstance(given, float):
        return isinstance(expected, float) and math.isclose(given, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
    return type(given) is type(expected) and bool(given == expected)
