"""Decide whether two expressions are equal, by evaluating them. Rational numbers are compared exactly.

Called by `comparison.py`. math-verify compares with SymPy's `simplify` and `round`, which may not end and which accept
differences below 1e-6. Here, expressions with variables are evaluated at several pseudo-random points. Two that agree
at all of them are equal almost surely (Schwartz 1980, for polynomials). Irrational values are computed with
`_SPARE_BITS` more bits than the size of their numbers.
Invariant: the work is bounded by `_MAX_BITS`, the size of the largest number in the evaluation.
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

_MAX_BITS = 30_000
"""Bits of the largest number. The published reference 2^{2005} has 2005; a verdict at this limit takes 0.1 s."""

_SPARE_BITS = 160
"""Bits of precision beyond the size of the numbers. Values are equal if they agree in all but `_ROUNDING_BITS`."""

_ROUNDING_BITS = 64
_POINTS = 6  # points at which expressions with variables are evaluated
_DEFINED_POINTS = 3
"""Points, of `_POINTS`, at which both expressions must have a value."""

# Operations whose result can be much larger than their arguments, by the names of SymPy's classes.
_POWERS = ("Pow", "exp")
_FACTORIALS = ("factorial", "factorial2", "gamma", "binomial")
_MAX_MAGNITUDE = 64.0
"""Cap for log2 of a magnitude, so that estimates stay finite. A power with such an exponent exceeds `_MAX_BITS`."""


def are_equal(first: Any, second: Any) -> bool:
    """Whether two SymPy trees have equal values at all points. Raises Unreadable if their numbers are too large.

    A point where only one of them has a value makes them different.
    """
    if first == second:
        return True
    # The bounds of intervals are compared by the line above; an infinity cannot be evaluated.
    if first.has(oo, -oo) or second.has(oo, -oo):
        return False
    agreed = 0
    precision = _choose_precision(first, second)
    with mpmath.workprec(precision):
        for point in _draw_points(first, second):
            values = _evaluate_at(first, point), _evaluate_at(second, point)
            if values == (None, None):
                continue
            if not _values_agree(*values, precision):
                return False
            agreed += 1
    return agreed >= (_DEFINED_POINTS if _sort_letters(first, second) else 1)


def are_proportional(first: Any, second: Any) -> bool:
    """Whether one tree is a non-zero constant times the other. Raises Unreadable if their numbers are too large."""
    precision = _choose_precision(first, second)
    quotients: list[Number] = []
    with mpmath.workprec(precision):
        for point in _draw_points(first, second):
            dividend = _evaluate_at(first, point)
            divisor = _evaluate_at(second, point)
            if dividend is None or divisor is None or dividend == 0 or divisor == 0:
                continue
            is_rational = isinstance(dividend, Fraction) and isinstance(divisor, Fraction)
            quotients.append(dividend / divisor if is_rational else as_complex(dividend) / as_complex(divisor))
        agree = all(_values_agree(quotients[0], quotient, precision) for quotient in quotients)
    return len(quotients) >= _DEFINED_POINTS and agree


def real_value(tree: Any) -> Fraction | None:
    """Return the real value of a tree without variables, rounded to a float if irrational; None if it has none."""
    if _sort_letters(tree) or _estimate_bits(tree) > _MAX_BITS:
        return None
    with mpmath.workprec(_SPARE_BITS):
        value = _evaluate_at(tree, {})
    if value is None or isinstance(value, Fraction):
        return value
    return Fraction(float(value.real)) if value.imag == 0 and abs(value) < 2.0**1000 else None


def _values_agree(first: Number | None, second: Number | None, precision: int) -> bool:
    """Whether two values are equal: rational ones exactly, others up to a relative rounding error."""
    if first is None or second is None:
        return False
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    a = as_complex(first)
    b = as_complex(second)
    rounding = mpmath.ldexp(1, _ROUNDING_BITS - precision)
    largest = max(abs(a), abs(b))
    return bool(largest < rounding or abs(a - b) <= rounding * largest)


def _evaluate_at(tree: Any, point: Mapping[str, Fraction]) -> Number | None:
    try:
        return value_at(tree, point)
    except Undefined:
        return None


def _sort_letters(*trees: Any) -> list[str]:
    # The parser reads `i` as a symbol; `value_at` gives it the imaginary unit.
    return sorted({symbol.name for tree in trees for symbol in tree.free_symbols} - {"i"})


def _draw_points(*trees: Any) -> list[dict[str, Fraction]]:
    letters = _sort_letters(*trees)
    return [
        {letter: _draw_coordinate(letter, place) for letter in letters} for place in range(_POINTS if letters else 1)
    ]


def _draw_coordinate(letter: str, place: int) -> Fraction:
    """Return a rational number between -4 and 4 that depends only on the letter and the place."""
    # A hash, so that every process and every run gives the same verdict.
    digest = hashlib.blake2b(f"{letter} {place}".encode(), digest_size=4).digest()
    return Fraction(int.from_bytes(digest, "big") % 7919 + 1, 1980) * (-1 if digest[0] % 3 == 0 else 1)


def _choose_precision(*trees: Any) -> int:
    bits = sum(_estimate_bits(tree) for tree in trees)
    if bits > _MAX_BITS:
        raise Unreadable("too large to be computed")
    return int(bits) + _SPARE_BITS


def _estimate_bits(tree: Any) -> float:
    """Estimate the bits of the largest number in the evaluation of a tree, without evaluating it."""
    if tree.is_Rational:
        return float(int(tree.p).bit_length() + int(tree.q).bit_length())
    kind = type(tree).__name__
    bits = [_estimate_bits(argument) for argument in tree.args]
    if kind in _POWERS:
        return max(bits[0], 4.0) * math.exp2(_bound_magnitude(tree.args[-1])) + bits[-1]
    if kind in _FACTORIALS:
        magnitude = _bound_magnitude(tree.args[0])
        return math.exp2(magnitude) * max(1.0, magnitude) + bits[0]
    return sum(bits, start=0.0) or 4.0


def _bound_magnitude(tree: Any) -> float:
    """Return an upper bound of log2 of the absolute value, with variables between -4 and 4."""
    if tree.is_Rational:
        return max(0.0, min(float(int(tree.p).bit_length() - int(tree.q).bit_length() + 1), _MAX_MAGNITUDE))
    magnitudes = [_bound_magnitude(argument) for argument in tree.args]
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
    return min(found, _MAX_MAGNITUDE)


def _is_negative(tree: Any) -> bool:
    """Whether a tree is written with a minus sign. SymPy's `is_negative` would evaluate it, in unbounded time."""
    return any(part.is_Rational and part < 0 for part in (tree.args if tree.is_Mul else (tree,)))
