"""An expression of numbers, letters and operations, read by the parser of math-verify.

Called by `reading.py`, which has taken lists, relations, units and words apart. What the parser would read as something
else than it says is refused before: `17 18`, which it adds up, `9!!`, and binomials, which it computes at once.
"""

from __future__ import annotations

import re

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy import Expr, S

from specrl.rewards.math.brackets import depths
from specrl.rewards.math.values import Expression, Unreadable

_DEEPEST = 12
"""Nested brackets, and powers. The parser's time grows with the square of the depth: 0.4 s at 12."""
_MOST_DIGITS = 2500
"""Digits of one number. Python reads them in quadratic time and refuses 4300."""
_COMMANDS = frozenset(
    [
        "frac",
        "sqrt",
        "binom",
        "pi",
        "infty",
        "cdot",
        "times",
        "circ",
        "lfloor",
        "rfloor",
        "lceil",
        "rceil",
        "max",
        "min",
        "gcd",
        "lcm",
        "sum",
        "prod",
        "int",
        "lim",
        "to",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "ln",
        "exp",
        "overline",
        "bar",
        "vec",
        "hat",
        "dot",
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
        "phi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Sigma",
        "Phi",
        "Psi",
        "Omega",
    ]
)
_NOT_EXPRESSIONS = re.compile(r"\d\s+\d|!\s*!|[^\x20-\x7e]|[\"'#&@?:;%$~`]|\d\s*\.\s*\.|\d\.\d+\.")
_SMALL_ARGUMENTS = r"\s*[{(]\s*-?\w{1,4}\s*(?:\}\s*\{|,)\s*-?\w{1,4}\s*[})]"
_LARGE_ARGUMENTS = re.compile(rf"\\(?:binom|gcd|lcm|max|min)(?!{_SMALL_ARGUMENTS})")
_MIXED_NUMBER = re.compile(r"(?<![\d.}])(\d+)\s+(\d+)/(\d+)(?![\d/.])")
_CONVERSION = ConversionConfig(lowercase_symbols=False)


def read_expression(text: str) -> Expression:
    """The expression of LaTeX. Raises Unreadable for what the parser cannot read, or would misread."""
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text.strip())
    _check(text)
    try:
        tree = latex2sympy(
            text, is_real=True, convert_degrees=True, normalization_config=None, conversion_config=_CONVERSION
        )
    except Exception as error:  # the parser raises Exception itself, and whatever SymPy raises
        raise Unreadable("not an expression") from error
    if not isinstance(tree, Expr) or tree.has(S.ComplexInfinity, S.NaN):
        raise Unreadable("not an expression")
    return Expression(tree)


def _check(text: str) -> None:
    unknown = [name for name in re.findall(r"\\([a-zA-Z]+|.)", text) if name not in _COMMANDS]
    if unknown:
        raise Unreadable(f"\\{unknown[0][:20]} is not understood")
    if _NOT_EXPRESSIONS.search(text):
        raise Unreadable("not an expression")
    if re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}", text):
        raise Unreadable("words")
    if _LARGE_ARGUMENTS.search(text):
        raise Unreadable("large or nested arguments")
    if max(depths(text), default=0) > _DEEPEST or text.count("^") > _DEEPEST:
        raise Unreadable("nested too deeply")
    if re.search(rf"\d{{{_MOST_DIGITS}}}", text):
        raise Unreadable("a number with too many digits")
