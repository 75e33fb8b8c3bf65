"""Parse an expression of numbers, letters and operations with math-verify's parser (latex2sympy2_extended).

Called by `reading.py`, which has already split off lists, relations, units and words. Invariant: the parser never gets
text that it would misread; this module rewrites or refuses it first. The parser adds the numbers of `3(4)` and `17 18`,
drops the index of `2_1`, and misreads `9!!` and `2^3!`. It computes binomials at once, whatever their size.
"""

from __future__ import annotations

import re

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy import Expr, S

from specrl.rewards.math.values import Expression, Unreadable

_MAX_DIGITS = 2500
"""Digits of one number. Python parses integers in quadratic time, and refuses more than 4300 digits."""

# LaTeX commands that the parser reads as they are meant. All others are refused.
_COMMAND_NAMES = (
    "frac sqrt binom pi infty cdot times circ lfloor rfloor lceil rceil max min gcd lcm sum prod int lim to "
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp overline bar vec hat dot "
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi chi psi omega "
    "Gamma Delta Theta Lambda Sigma Phi Psi Omega"
)
_COMMANDS = frozenset(_COMMAND_NAMES.split())

# Text that is no expression, or that the parser misreads. The last line: `1/2\pi` is read as 1/(2 pi) by some and as
# pi/2 by others.
_NOT_EXPRESSIONS = re.compile(
    r"\d\s+\d|[^\x20-\x7e]|[\"'#&@?:;%$~`]|\.\s*\.|\d\.\d+\."
    r"|!\s*!|\^\s*(?:\w|\{[^{}]*\})\s*[!^]"
    r"|\d\s*[_{]|_\s*(?:\w|\{\w*\})\s*_|\\(?:(?:arc)?(?:sin|cos|tan)|cot|sec|csc)\s*_"
    r"|\d\s*/\s*\d+\s*(?:\(|\\(?!cdot|times))"
)

# Arguments that are computed while parsing must be small, or the parser may not return.
_SMALL = r"\s*-?\w{1,4}(?:\s*[-+]\s*\w{1,4}){0,2}\s*"
_LARGE_ARGUMENTS = re.compile(
    rf"\\(?:binom|max|min)(?!\s*[{{(]{_SMALL}(?:\}}\s*\{{|,){_SMALL}[}})])"
    r"|\\(?:gcd|lcm)(?!\s*\(\s*\d{1,9}\s*,\s*\d{1,9}\s*\))"
)

_SLOW = re.compile(r"\\(?:int|lim|sum|prod|[gG]amma)(?![a-zA-Z])|\|")
_MOST_SLOW = 6
"""Bars, integrals, limits, sums, products and gamma functions. The parser's time grows exponentially with them: 0.1 s
at 6."""
_CALL = re.compile(r"[!^]|\\(?:(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|sqrt|lfloor|lceil)(?![a-zA-Z])")
_MAX_CALLS = 24
"""Powers and functions. The parser nests functions without brackets, and each costs milliseconds."""
_SPELT_OUT: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<![\d.}])(\d+)\s+(\d+)/(\d+)(?![\d/.])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<![\d.}^_])(\d+)\s*(\\frac\{\d+\}\{\d+\})"), r"(\1+\2)"),
    (re.compile(r"(?<![\w.}^/])(\d+)/(\d+)(?=\s*[a-zA-Z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"((?<![\d.])\d+(?:\.\d+)?|\)|\\(?:pi|gamma))\s*(?=\()|(\))\s*(?=\d|\\frac)"), r"\1\2\\cdot "),
)
"""Rewrites mixed numbers as sums, `1/2x` as a half of x, and products such as `3(4)` with an explicit `\\cdot`."""
_DECIMAL = re.compile(r"(?<![\d.])(\d{1,2000})\.(\d{1,2000})(?![\d.])")
"""Decimals become fractions, which are exact: SymPy rounds functions of decimals, such as e^{0.5}."""

_CONVERSION = ConversionConfig(lowercase_symbols=False)


def read_expression(text: str) -> Expression:
    """Parse LaTeX into an expression. Raises Unreadable for text that the parser cannot read or would misread."""
    text = text.strip()
    for pattern, replacement in _SPELT_OUT:
        text = pattern.sub(replacement, text)
    _check_expression(text)
    text = _DECIMAL.sub(_decimal_to_fraction, text)
    try:
        tree = latex2sympy(
            text, is_real=True, convert_degrees=True, normalization_config=None, conversion_config=_CONVERSION
        )
    except Exception as error:  # the parser raises bare Exception, and any error of SymPy passes through
        raise Unreadable("not an expression") from error
    if not isinstance(tree, Expr) or tree.has(S.ComplexInfinity, S.NaN):
        raise Unreadable("not an expression")
    return Expression(tree)


def _decimal_to_fraction(decimal: re.Match[str]) -> str:
    whole, places = decimal.groups()
    return rf"\frac{{{int(whole + places)}}}{{1{'0' * len(places)}}}"


def _check_expression(text: str) -> None:
    unknown = [name for name in re.findall(r"\\([a-zA-Z]+|.)", text) if name not in _COMMANDS]
    if unknown:
        raise Unreadable(f"\\{unknown[0][:20]} is not understood")
    if _NOT_EXPRESSIONS.search(text):
        raise Unreadable("not an expression")
    if re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}", text):  # the parser would multiply the letters
        raise Unreadable("words")
    if _LARGE_ARGUMENTS.search(text):
        raise Unreadable("large or nested arguments")
    if len(_SLOW.findall(text)) > _MOST_SLOW or len(_CALL.findall(text)) > _MAX_CALLS:
        raise Unreadable("too many functions")
    if re.search(rf"\d{{{_MAX_DIGITS}}}", text):
        raise Unreadable("a number with too many digits")
