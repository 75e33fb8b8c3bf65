"""The value of an expression at a point: rational numbers exactly, others in the working precision of mpmath.

Called by `evaluation.py`, which bounds the work. SymPy's own evaluation would round decimals, and `factorial` and
powers of it compute what no machine can hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from specrl.rewards.math.values import Unreadable

_GAMMA_PRECISION = 1000
"""In bits. The gamma function's time grows with the third power of the precision: 0.1 s at 1000, 5 s at 4000."""

type Number = Fraction | Any
"""A rational number, or an mpmath.mpc, complex and rounded to the working precision; mpmath has no types."""


class Undefined(ArithmeticError):
    """No value at this point: a division by zero, or a function outside of its domain."""


def value_at(tree: Any, point: Mapping[str, Fraction]) -> Number:
    """The value of a SymPy tree where its letters have the values of `point`.

    Raises Undefined, and Unreadable for an operation that is not computed, as an integral.
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
    except (ZeroDivisionError, ValueError) as error:  # of Fraction and mpmath
        raise Undefined from error
    if not isinstance(value, Fraction) and not mpmath.isfinite(value):
        raise Undefined
    return value


def as_complex(value: Number) -> mpmath.mpc:
    """The value, rounded."""
    if isinstance(value, Fraction):
        return mpmath.mpc(mpmath.mpf(value.numerator) / mpmath.mpf(value.denominator))
    return value


def _sum(*values: Number) -> Number:
    if all(isinstance(value, Fraction) for value in values):
        return sum(values, Fraction(0))
    return mpmath.fsum(as_complex(value) for value in values)


def _product(*values: Number) -> Number:
    if all(isinstance(value, Fraction) for value in values):
        return math.prod(values, start=Fraction(1))
    return mpmath.fprod(as_complex(value) for value in values)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        return base ** int(exponent)
    if base == 0 and as_complex(exponent).real <= 0:
        raise Undefined
    return Fraction(0) if base == 0 else as_complex(base) ** as_complex(exponent)


def _factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1:
        return Fraction(math.factorial(int(value)))
    return _gamma(value + 1)


def _gamma(value: Number) -> Number:
    if mpmath.mp.prec > _GAMMA_PRECISION:
        raise Unreadable("too large to be computed")
    return mpmath.gamma(as_complex(value))


def _binomial(total: Number, chosen: Number) -> Number:
    return _product(_factorial(total), 1 / _product(_factorial(chosen), _factorial(total - chosen)))


def _logarithm(value: Number, base: Number | None = None) -> Number:
    if value == 0 or base in (0, 1):
        raise Undefined
    natural = mpmath.log(as_complex(value))
    return natural if base is None else natural / mpmath.log(as_complex(base))


def _floor(value: Number) -> Number:
    return Fraction(math.floor(value)) if isinstance(value, Fraction) else Fraction(int(mpmath.floor(_real(value))))


def _ceiling(value: Number) -> Number:
    return Fraction(math.ceil(value)) if isinstance(value, Fraction) else Fraction(int(mpmath.ceil(_real(value))))


def _absolute(value: Number) -> Number:
    return abs(value) if isinstance(value, Fraction) else mpmath.mpc(abs(value))


def _extreme(choose: Callable[..., Number]) -> Callable[..., Number]:
    return lambda *values: choose(values, key=lambda value: value if isinstance(value, Fraction) else _real(value))


def _real(value: mpmath.mpc) -> mpmath.mpf:
    if value.imag != 0:
        raise Undefined
    return value.real


def _by_mpmath(name: str) -> Callable[..., Number]:
    function = getattr(mpmath, name)
    return lambda *values: mpmath.mpc(function(*(as_complex(value) for value in values)))


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
    "Add": _sum,
    "Mul": _product,
    "Pow": _power,
    "UnevaluatedExpr": lambda value: value,
    "factorial": _factorial,
    "gamma": _gamma,
    "binomial": _binomial,
    "log": _logarithm,
    "Abs": _absolute,
    "floor": _floor,
    "ceiling": _ceiling,
    "Max": _extreme(max),
    "Min": _extreme(min),
    **{name: _by_mpmath(name) for name in _FUNCTIONS.split()},
}
