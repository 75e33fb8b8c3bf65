"""Normalise notation: rewrite Unicode and plain text as the LaTeX that math-verify's parser reads.

Called by `reading.py`, `words.py` and `extraction.py`, the first two of which also use the bracket helpers. Invariant:
nothing is dropped or guessed. Every replacement is another spelling of the same mathematics and takes time linear in
the text, whose length is bounded by `extraction.LONGEST_ANSWER`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from specrl.rewards.text.final_answer import remove_thousands_separators

# Names that are read as commands in plain text: `sin x` is `\sin x`, `pi` is `\pi`.
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp"
_LETTERS = "pi|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|omega|sigma|rho|tau"
_FONTS = "textbf|textit|textrm|textnormal|textsf|mbox|hbox|mathrm|mathit|mathbf|mathsf|bold|operatorname\\*?"
FUNCTION_NAMES = frozenset(f"{_FUNCTIONS}|{_LETTERS}|sqrt|cbrt|abs|infinity|inf".split("|"))
"""Words that are mathematics, not words, in plain text."""

_CHARACTERS = {
    "−": "-", "–": "-", "﹣": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≦": r"\le ", "≥": r"\ge ",
    "⩾": r"\ge ", "≧": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ",
    "º": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "∛": r"\sqrt[3]",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta ",
    "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "σ": r"\sigma ", "ρ": r"\rho ", "τ": r"\tau ",
    "。": ".", "、": ",", "٫": ".", "٬": ",", "’": "'", "′": "'", "“": '"', "”": '"', "\u00a0": " ", "\u202f": r"\,",
    "\u2009": r"\,", "⟨": r"\langle ", "⟩": r"\rangle ",
}  # fmt: skip
_SUPERSCRIPTS = {"⁺": "+", "⁻": "-", "ⁿ": "n", "ˣ": "x"} | {c: str(i) for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_SUBSCRIPTS = {c: str(i) for i, c in enumerate("₀₁₂₃₄₅₆₇₈₉")} | {"ₙ": "n", "ₓ": "x"}
_SUPERSCRIPT = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SUBSCRIPT = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")

# Number words after a number: `2.5 million` is 2.5 times 10^6.
_MULTIPLES = {
    "dozen": "12", "hundred": "100", "thousand": "10^3", "million": "10^6", "billion": "10^9", "trillion": "10^{12}",
}  # fmt: skip

# Applied from top to bottom: later rules rely on the spelling that earlier ones produce. The control characters
# \x00 and \x01 stand for a comma between thousands and for a thin space until their rules below decide about them.
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Commands that affect only the layout, and fonts.
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|phantom)(?![a-zA-Z])", ""),
        (r"\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:dbinom|tbinom)(?![a-zA-Z])", r"\\binom"),
        (r"\\(?:mathbf|boldsymbol|bold|mathit)\s*{\s*([a-zA-Z])\s*}", r"\1"),  # a variable, never a unit
        (rf"\\(?:{_FONTS})\s*(?={{)", r"\\text"),
        (r"\\frac\s*{\s*\\text\s*{([^{}]*)}\s*}\s*{\s*\\text\s*{([^{}]*)}\s*}", r"\\text{\1/\2}"),
        (r"\\text\s*(?={[^{}a-zA-Z]*[\\}])", ""),
        (r"{\\(?:rm|bf|it)\s+", r"\\text{"),
        (r"\\(?:large|Large|LARGE|huge|small|bf|rm)(?![a-zA-Z])", ""),
        (r"\\text\s*{\s*(gcd|lcm|max|min|sin|cos|tan|ln|log|arcsin|arccos|arctan)\s*}(?=\s*[\\({\w])", r"\\\1 "),
        (r"\\text\s*{\s*([eid])\s*}(?=\s*(?:[\^}]|$|[-+]))|\\text\s*{\s*([eid])\s*}(?=\^)", r"\1\2"),
        (r"(?<![\d}\s])\\text\s*{\s*([A-Z])\s*}", r"\1"),
        # Separators of thousands, spaces, and signs in front of currencies.
        (r"\{,\}|\\mathord\{,\}|,\s*\\!\s*(?=\d{3})", "\x00"),
        (r"\+/-", r"\\pm "),
        (r"([-+])\s*(\\\$|[$€£¥])\s*(?=[\d.])", r"\2\1"),
        (r"(?<!\\)\\(?:,|!|:|;|>|thinspace|medspace)", "\x01"),
        (r"\\(?:quad|qquad|enspace|hspace\*?{[^{}]*})(?![a-zA-Z])|(?<!\\)\\ |~", " "),
        (r"{\s*\\\$\s*}", r"\\$"),
        (r"(?<=\d)\s+[xX]\s+(?=\d)", r"\\times "),
        (r"(?<=\d)[\x00\x01](?=\d{3}(?!\d))", ""),
        (r"\x00", ","),
        (r"\x01", " "),
        # Relations, brackets and operators with several names.
        (r"\\(?:geq|geqslant)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\(?:leq|leqslant)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:neq)(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])", "|"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:varnothing)(?![a-zA-Z])|\\{\s*\\}", r"\\emptyset "),
        (r"\\(?:degree|deg)(?![a-zA-Z])", r"^\\circ "),
        (r"(?:{}\s*)?\^\s*(?:{\s*\\circ\s*}|\\circ(?![a-zA-Z]))", r"^\\circ "),
        (r"\\(?:approxeq|simeq)(?![a-zA-Z])", r"\\approx "),
        (r"\\(?:div)(?![a-zA-Z])", "/"),
        (r"\\(?:ast|star)(?![a-zA-Z])|(?<!\*)\*(?!\*)", r"\\cdot "),
        (r"\*\*", "^"),
        (r"\\varepsilon(?![a-zA-Z])", r"\\epsilon"),
        (r"\\varphi(?![a-zA-Z])", r"\\phi"),
        (r"\\colon(?![a-zA-Z])", ":"),
        (r"\\bigcup(?![a-zA-Z])", r"\\cup"),
        (r"(\\\\)\s*\[[\d.]+\s*[a-z]{2}\]", r"\1"),  # the distance between rows of a matrix
        (r"(?:{|^)([^{}]*)\\over(?![a-zA-Z])([^{}]*)(?:}|$)", r"\\frac{\1}{\2}"),
        (r"(?:{|^)([^{}]*)\\choose(?![a-zA-Z])([^{}]*)(?:}|$)", r"\\binom{\1}{\2}"),
        (r"\\(max|min|gcd|lcm)\s*\\{([^{}]*)\\}", r"\\\1(\2)"),
        (r"\\text\s*{\s*([\dA-F]+)\s*}\s*(?=_)", r"\1"),
        (r"\\(?:text\s*{\s*(arc)?tg\s*}|(arc)?tg(?![a-zA-Z]))", r"\\\1\2tan "),
        (r"\\(?:text\s*{\s*(?:ctg|cotg)\s*}|c(?:o)?tg(?![a-zA-Z]))", r"\\cot "),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
        (r"\\log_(?:e|{e})", r"\\ln "),
        (r"(\\in|\\cup|=)\s*{([^{}]*,[^{}]*)}", r"\1 \\{\2\\}"),  # a set in braces that lack their backslash
        (r"(?<!\\)%", r"\\%"),
        (r"\b(?:percent|per cent|pct)\b\.?", r"\\%"),
        (r"\b(?:negative|minus)\s+(?=[\d.$\\])", "-"),
        # Numbers.
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,6})(?!\w)", r"\1\\times 10^{\2}"),
        (r"(?<![\w.\\}])\.(?=\d)", "0."),
        (r"(?<=\d)\.(?!\d)(?=\s*(?:$|[^\w\s\\.]))", ""),
        *(
            (rf"(?<=[\d}}])\s*(\\text\s*{{)?\s*{word}(?![\w-])", rf"\\cdot {value}\1")
            for word, value in _MULTIPLES.items()
        ),
        # Plain text.
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*([-+]?\d+)", r"^{\1}"),
        (r"_\s*(\d+)", r"_{\1}"),
        (r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])", r"\\infty "),
        (rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])", r"\\\1 "),
        (rf"(?<![\\a-zA-Z])({_LETTERS})(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(gcd|lcm|max|min)(?=\s*\([^(),]+,)", r"\\\1 "),
        (r"(?<![\\a-zA-Z])sqrt(?![a-zA-Z])", r"\\sqrt "),
        (r"(?<![\\a-zA-Z])cbrt(?![a-zA-Z])", r"\\sqrt[3]"),
        # Arguments without braces.
        (r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9a-zA-Z])\s*{", r"\\frac{\1}{"),
        (r"(\\frac\s*{[^{}]*})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (r"\\binom\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\binom{\1}{\2}"),
        (r"\\sqrt\s*(\[\d+\])?\s*(\d+|[a-zA-Z]|\\pi)", r"\\sqrt\1{\2}"),
    )
)  # fmt: skip

# Used by `to_latex` after the table above.
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*{?(\d+)}?")
_THOUSANDS_APART = re.compile(r"(?<![\d.,}])(?<!\d )\d{1,3}(?: \d{3})+(?!\d| ?\d)")
_ROOT_OF_PARENTHESIS = re.compile(r"\\sqrt\s*(\[\d+\])?\s*\(")
_ABSOLUTE = re.compile(r"(?<![\\a-zA-Z])abs\s*\(")

# Changes of the bracket depth, for `bracket_depths`.
_BRACKET = re.compile(r"\\begin\{|\\end\{|\\langle|\\rangle|\\[{}\\]|[()\[\]{}]")
_OPENS = {"(": 1, "[": 1, "{": 1, r"\{": 1, r"\langle": 1, r"\begin{": 2}
"""Number of levels that a bracket opens. `\\begin{` opens its brace and the environment."""
_CLOSES = {")": 0, "]": 0, "}": 0, r"\}": 0, r"\rangle": 0, r"\end{": 1}
"""How many levels a closing bracket opens again. `\\end{` closes the environment, then opens its own brace."""


def to_latex(text: str) -> str:
    """Rewrite the text in the common spelling, and remove thousands separators outside of brackets."""
    text = replace_unicode(text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_repeating_fraction, text)
    text = _replace_parentheses(text, _ROOT_OF_PARENTHESIS, lambda match: rf"\sqrt{match.group(1) or ''}{{", "}")
    text = _replace_parentheses(text, _ABSOLUTE, lambda _: "|", "|")
    text = _THOUSANDS_APART.sub(lambda match: match.group().replace(" ", ""), text)
    return " ".join(_outside_brackets(text, remove_thousands_separators).split())


def replace_unicode(text: str) -> str:
    """Rewrite signs, digits and fractions of Unicode as LaTeX or ASCII; leave other characters."""
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda match: "^{" + "".join(_SUPERSCRIPTS[c] for c in match.group()) + "}", text)
    text = _SUBSCRIPT.sub(lambda match: "_{" + "".join(_SUBSCRIPTS[c] for c in match.group()) + "}", text)
    return "".join(c if c.isascii() else _spell_character(c) for c in text)


def bracket_depths(text: str) -> list[int]:
    """Return for each character how many brackets of any kind are open around it.

    A closing bracket has the depth of the text outside it. Unmatched closing brackets are ignored.
    """
    found = []
    depth = 0
    start = 0
    for match in _BRACKET.finditer(text):
        bracket = match.group()
        found += [depth] * (match.start() - start)
        if bracket in _CLOSES:
            depth = max(0, depth - 1)
        found += [depth] * len(bracket)
        depth += _OPENS.get(bracket, 0) + _CLOSES.get(bracket, 0)
        start = match.end()
    return found + [depth] * (len(text) - start)


def split_outside(text: str, *separators: str) -> list[str]:
    """Split the text at those separators that stand outside of all brackets."""
    depth_at = bracket_depths(text)
    pattern = re.compile("|".join(re.escape(s) + (r"(?![a-zA-Z])" if s[-1].isalpha() else "") for s in separators))
    parts = []
    start = 0
    for match in pattern.finditer(text):
        if not depth_at[match.start()]:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _spell_character(character: str) -> str:
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    normal = unicodedata.normalize("NFKC", character)
    numerator, slash, denominator = normal.partition("⁄")
    if slash and numerator.isdigit() and denominator.isdigit():
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    # Only fullwidth forms may become ASCII: NFKC would also turn a subscript or a circled digit into a plain one.
    return normal if normal.isascii() and unicodedata.east_asian_width(character) == "F" else character


def _repeating_fraction(match: re.Match[str]) -> str:
    """Write a repeating decimal as an exact fraction: `0.1\\overline{6}` is (16 - 1) / 90."""
    whole, once, again = (match.group(i) for i in (1, 2, 3))
    value = int((whole or "0") + once + again) - int((whole or "0") + once)
    return rf"\frac{{{value}}}{{{'9' * len(again)}{'0' * len(once)}}}"


def _replace_parentheses(
    text: str, pattern: re.Pattern[str], opening: Callable[[re.Match[str]], str], closing: str
) -> str:
    """Replace the pair of parentheses that opens at the end of each match by other delimiters."""
    # From the right, so that inner pairs are replaced before outer ones and earlier matches keep their places.
    for match in reversed(list(pattern.finditer(text))):
        depth = 1
        for place in range(match.end(), len(text)):
            depth += {"(": 1, ")": -1}.get(text[place], 0)
            if depth == 0:
                text = text[: match.start()] + opening(match) + text[match.end() : place] + closing + text[place + 1 :]
                break
    return text


def _outside_brackets(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the text outside of round, square and set brackets. Inside them a comma separates entries."""
    parts = []
    depth = 0
    start = 0
    for match in re.finditer(r"\\[{}]|[()\[\]]", text):
        opens = match.group() in ("(", "[", r"\{")
        if opens and depth == 0:
            parts.append(change(text[start : match.start()]))
            start = match.start()
        depth = max(0, depth + (1 if opens else -1))
        if not opens and depth == 0:
            parts.append(text[start : match.end()])
            start = match.end()
    parts.append(change(text[start:]) if depth == 0 else text[start:])
    return "".join(parts)
