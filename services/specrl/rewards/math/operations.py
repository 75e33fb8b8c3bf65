"""Evaluate an expression at a point: rational numbers exactly, others in mpmath's working precision.

Called by `evaluation.py`, which bounds the work. SymPy's own evaluation is not used: it rounds decimals, and its
`factorial` and powers would compute numbers that do not fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from specrl.rewards.math.values import Unreadable

_GAMMA_PRECISION = 1000
"""Highest precision for the gamma function, in bits. Its time grows with the cube: 0.1 s at 1000, 5 s at 4000."""

type Number = Fraction | Any
"""An exact Fraction, or an mpmath.mpc rounded to the working precision. It is Any because mpmath has no type hints."""


class Undefined(ArithmeticError):
    """The expression has no value at this point: division by zero, or a function outside of its domain."""


def value_at(tree: Any, point: Mapping[str, Fraction]) -> Number:
    """Evaluate a SymPy tree with the variables set to the values of `point`.

    Raises Undefined if there is no value, and Unreadable for an unsupported operation such as an integral.
    """
    if tree.is_Rational:
        return Fraction(int(tree.p), int(tree.q))
    if tree.is_Symbol:
        return mpmath.mpc(0, 1) if tree.name == "i" else point[tree.name]
    kind = type(tree).__name__
    if kind in _CONSTANTS:
        return mpmath.mpc(_CONSTANTS[kind]())
    if kind not in _OPERATIONS:
        raise Unreadable(f"{kind} is not computed")
    try:
        value: Number = _OPERATIONS[kind](*(value_at(argument, point) for argument in tree.args))
    except (ZeroDivisionError, ValueError) as error:  # raised by Fraction, math and mpmath
        raise Undefined from error
    if not isinstance(value, Fraction) and not mpmath.isfinite(value):
        raise Undefined
    return value


def as_complex(value: Number) -> mpmath.mpc:
    """Convert a value to mpmath's complex type, rounded to the working precision."""
    if isinstance(value, Fraction):
        return mpmath.mpc(mpmath.mpf(value.numerator) / mpmath.mpf(value.denominator))
    return value


def _add_values(*values: Number) -> Number:
    if all(isinstance(value, Fraction) for value in values):
        return sum(values, Fraction(0))
    return mpmath.fsum(as_complex(value) for value in values)


def _multiply_values(*values: Number) -> Number:
    if all(isinstance(value, Fraction) for value in values):
        return math.prod(values, start=Fraction(1))
    return mpmath.fprod(as_complex(value) for value in values)


def _raise_power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        return base ** int(exponent)
    if base == 0 and as_complex(exponent).real <= 0:
        raise Undefined
    return Fraction(0) if base == 0 else as_complex(base) ** as_complex(exponent)  # the principal value


def _compute_factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1:
        return Fraction(math.factorial(int(value)))
    return _compute_gamma(value + 1)


def _compute_gamma(value: Number) -> Number:
    if mpmath.mp.prec > _GAMMA_PRECISION:
        raise Unreadable("too large to be computed")
    return mpmath.gamma(as_complex(value))


def _compute_binomial(total: Number, chosen: Number) -> Number:
    return _multiply_values(
        _compute_factorial(total), 1 / _multiply_values(_compute_factorial(chosen), _compute_factorial(total - chosen))
    )


def _compute_logarithm(value: Number, base: Number | None = None) -> Number:
    if value == 0 or base in (0, 1):
        raise Undefined
    natural = mpmath.log(as_complex(value))
    return natural if base is None else natural / mpmath.log(as_complex(base))


def _round_down(value: Number) -> Number:
    return Fraction(math.floor(value) if isinstance(value, Fraction) else int(mpmath.floor(_require_real(value))))


def _round_up(value: Number) -> Number:
    return Fraction(math.ceil(value) if isinstance(value, Fraction) else int(mpmath.ceil(_require_real(value))))


def _absolute_value(value: Number) -> Number:
    return abs(value) if isinstance(value, Fraction) else mpmath.mpc(abs(value))


def _select_extreme(choose: Callable[..., Number]) -> Callable[..., Number]:
    """Wrap `max` or `min`. The result keeps its type, so that a Fraction stays exact."""
    return lambda *values: choose(
        values, key=lambda value: value if isinstance(value, Fraction) else _require_real(value)
    )


def _require_real(value: mpmath.mpc) -> mpmath.mpf:
    if value.imag != 0:
        raise Undefined
    return value.real


def _by_mpmath(name: str) -> Callable[..., Number]:
    function = getattr(mpmath, name)
    return lambda *values: mpmath.mpc(function(*(as_complex(value) for value in values)))


# Keys of the tables below are the names of SymPy's classes. mpmath's unary plus rounds to the precision of the call.
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "Pi": lambda: +mpmath.pi,
    "Exp1": lambda: +mpmath.e,
    "GoldenRatio": lambda: +mpmath.phi,
    "ImaginaryUnit": lambda: mpmath.mpc(0, 1),
}
_FUNCTIONS = (
    "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh acoth exp"
)
_OPERATIONS: dict[str, Callable[..., Number]] = {
    "Add": _add_values,
    "Mul": _multiply_values,
    "Pow": _raise_power,
    "UnevaluatedExpr": lambda value: value,  # the parser wraps parts in it so that SymPy does not simplify them
    "factorial": _compute_factorial,
    "gamma": _compute_gamma,
    "binomial": _compute_binomial,
    "log": _compute_logarithm,
    "Abs": _absolute_value,
    "floor": _round_down,
    "ceiling": _round_up,
    "Max": _select_extreme(max),
    "Min": _select_extreme(min),
    **{name: _by_mpmath(name) for name in _FUNCTIONS.split()},
}
