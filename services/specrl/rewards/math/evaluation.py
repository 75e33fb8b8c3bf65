"""Whether two expressions are equal: exactly for rational numbers, else to more digits than they could differ in.

Called by `comparison.py`. SymPy's `simplify` and `round`, which math-verify compares with, take for ever on some
answers and forgive differences below 1e-6. Here expressions are evaluated, those with letters at several random points:
two that agree at all of them are the same almost surely (Schwartz 1980, for polynomials).
Invariant: work is bounded by `_MOST_BITS`, the size of the largest number on the way to a value.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import mpmath
from sympy import oo

from specrl.rewards.math.operations import Number, Undefined, as_complex, value_at
from specrl.rewards.math.values import Unreadable

_MOST_BITS = 30_000
"""Size of the largest number. A published reference, 2^{2005}, has 2005 bits; a verdict at this size takes 0.1 s."""
_SPARE_BITS = 160
"""Precision beyond the size of the numbers; agreement within all but `_ROUNDING_BITS` of it is equality."""
_ROUNDING_BITS = 64
_POINTS = 6
_DEFINED_POINTS = 3
"""At how many points both expressions must have a value."""
_POWERS = ("Pow", "exp")
_FACTORIALS = ("factorial", "factorial2", "gamma", "binomial")
_MOST_MAGNITUDE = 64.0
"""Logarithms of sizes are cut here; what reaches it is far beyond `_MOST_BITS`."""


def are_equal(first: Any, second: Any) -> bool:
    """Whether two SymPy trees are equal wherever both have a value. Raises Unreadable when they are too large."""
    if first == second:
        return True
    if first.has(oo, -oo) or second.has(oo, -oo):
        return False
    agreed = 0
    precision = _precision(first, second)
    with mpmath.workprec(precision):
        for point in _points(first, second):
            values = _value(first, point), _value(second, point)
            if values == (None, None):
                continue
            if not _agree(*values, precision):
                return False
            agreed += 1
    return agreed >= (_DEFINED_POINTS if _letters(first, second) else 1)


def are_proportional(first: Any, second: Any) -> bool:
    """Whether one tree is a constant, not 0, times the other. Raises Unreadable when they are too large."""
    precision = _precision(first, second)
    quotients: list[Number] = []
    with mpmath.workprec(precision):
        for point in _points(first, second):
            dividend, divisor = _value(first, point), _value(second, point)
            if dividend is None or divisor is None or dividend == 0 or divisor == 0:
                continue
            is_rational = isinstance(dividend, Fraction) and isinstance(divisor, Fraction)
            quotients.append(dividend / divisor if is_rational else as_complex(dividend) / as_complex(divisor))
        agree = all(_agree(quotients[0], quotient, precision) for quotient in quotients)
    return len(quotients) >= _DEFINED_POINTS and agree


def real_value(tree: Any) -> Fraction | None:
    """The value of a tree without letters, as closely as a float has it; None where it has no real one."""
    if _letters(tree) or _bits(tree) > _MOST_BITS:
        return None
    with mpmath.workprec(_SPARE_BITS):
        value = _value(tree, {})
    if value is None or isinstance(value, Fraction):
        return value
    return Fraction(float(value.real)) if value.imag == 0 and abs(value) < 2.0**1000 else None


def _agree(first: Number | None, second: Number | None, precision: int) -> bool:
    """Whether two values are equal: rational ones exactly, others up to rounding, relative to their size."""
    if first is None or second is None:
        return False
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    a, b = as_complex(first), as_complex(second)
    rounding = mpmath.ldexp(1, _ROUNDING_BITS - precision)
    largest = max(abs(a), abs(b))
    return bool(largest < rounding or abs(a - b) <= rounding * largest)


def _value(tree: Any, point: Mapping[str, Fraction]) -> Number | None:
    try:
        return value_at(tree, point)
    except Undefined:
        return None


def _letters(*trees: Any) -> list[str]:
    return sorted({symbol.name for tree in trees for symbol in tree.free_symbols} - {"i"})


def _points(*trees: Any) -> list[dict[str, Fraction]]:
    letters = _letters(*trees)
    return [{letter: _coordinate(letter, place) for letter in letters} for place in range(_POINTS if letters else 1)]


def _coordinate(letter: str, place: int) -> Fraction:
    """A rational number between -4 and 4, the same in every process."""
    digest = hashlib.blake2b(f"{letter} {place}".encode(), digest_size=4).digest()
    return Fraction(int.from_bytes(digest, "big") % 7919 + 1, 1980) * (-1 if digest[0] % 3 == 0 else 1)


def _precision(*trees: Any) -> int:
    bits = sum(_bits(tree) for tree in trees)
    if bits > _MOST_BITS:
        raise Unreadable("too large to be computed")
    return int(bits) + _SPARE_BITS


def _bits(tree: Any) -> float:
    """About how many bits the largest number has on the way to the tree's value."""
    if tree.is_Rational:
        return float(int(tree.p).bit_length() + int(tree.q).bit_length())
    kind = type(tree).__name__
    bits = [_bits(argument) for argument in tree.args]
    if kind in _POWERS:
        return max(bits[0], 4.0) * math.exp2(_magnitude(tree.args[-1])) + bits[-1]
    if kind in _FACTORIALS:
        magnitude = _magnitude(tree.args[0])
        return math.exp2(magnitude) * max(1.0, magnitude) + bits[0]
    return sum(bits, start=0.0) or 4.0


def _magnitude(tree: Any) -> float:
    """An upper bound of log2 of the absolute value, for letters between -4 and 4."""
    if tree.is_Rational:
        return max(0.0, min(float(int(tree.p).bit_length() - int(tree.q).bit_length() + 1), _MOST_MAGNITUDE))
    magnitudes = [_magnitude(argument) for argument in tree.args]
    kind = type(tree).__name__
    found = max(magnitudes, default=3.0)
    if kind == "Add":
        found += len(magnitudes) / 2
    elif kind == "Mul":
        found = sum(magnitudes)
    elif kind in _POWERS and not _is_negative(tree.args[-1]):
        found = max(magnitudes[0], 2.0) * 2.0 ** magnitudes[-1]
    elif kind in _FACTORIALS:
        found = 2.0 ** magnitudes[0] * max(1.0, magnitudes[0])
    return min(found, _MOST_MAGNITUDE)


def _is_negative(tree: Any) -> bool:
    """Whether it is written with a minus sign. SymPy's `is_negative` computes the value, in unbounded time."""
    return any(part.is_Rational and part < 0 for part in (tree.args if tree.is_Mul else (tree,)))
