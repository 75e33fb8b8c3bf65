"""The text of an answer, read as one mathematical value.

    text -> decoration gone -> one spelling (notation) -> words apart (words) -> structure (here) -> expressions

Called by `grading.py`. Invariant: what is not understood raises Unreadable; nothing but words is dropped to make the
rest readable. Structure is read here: the parser of math-verify takes a set for its only member, loses the brackets of
a tuple and the sign of a degree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sympy import Expr, Mul, oo

from specrl.rewards.math.brackets import depths, split_outside
from specrl.rewards.math.expressions import read_expression
from specrl.rewards.math.extraction import LONGEST_ANSWER
from specrl.rewards.math.notation import to_latex
from specrl.rewards.math.units import DEGREE, PERCENT, canonical_unit
from specrl.rewards.math.values import (
    Choice,
    Collection,
    Expression,
    Matrix,
    Numeral,
    Quantity,
    Ratio,
    Relation,
    SpecialSet,
    Union,
    Unreadable,
    Value,
)
from specrl.rewards.math.words import Kind, Names, change_value, split_words

_DEEPEST = 8
"""Nested brackets. The parser's time grows with the square of the depth: 0.4 s at 8, 1.5 s at 12."""
_PAIRS = (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"), ('"', '"'), ("'", "'"))
_EMPHASIS = re.compile(r"(?<![\w*)}])(\*{1,3}|_{1,3})(?=\S)([^*_]*?)(?<=\S)\1(?![\w*({])")
_PICTURE = re.compile("[\u2600-\u27bf\ufe0f\U0001f300-\U0001faff]")
_FULL_STOP = re.compile(r"(?<!\.)\.$")
_GROUP = re.compile(r"(?:\\(?:boxed|fbox)\s*|\\text\s*(?=\{[^{}]*\d))?\{")
"""Braces, a box, or words with a number in them."""
_ALIGNMENT = re.compile(r"\\(?:begin|end)\{(?:equation|align|aligned|gather|gathered|multline|displaymath|split)\*?\}")
_WORDS_IN_PARENTHESES = re.compile(r"\s\(([^()\d\\=<>]*[a-zA-Z]{3}[^()\d\\=<>]*)\)")
_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s*:?\s*)?(?:\\text\s*\{\s*)?"
    r"(?:\(\s*([A-Ja-j])\s*\)|\b([A-J])(?=\s*(?:$|[.:)}](?!\d))|,?\s(?:because|since|as|which)\b))"
    r"\s*\}?(?!\s*(?:[,;&]|(?:\\text\s*\{\s*)?(?:and|or)\b))\s*(?:[.:)]?\s*(.*))?",
    re.DOTALL,
)
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx)(?![a-zA-Z])|[=<>]")
_PART = re.compile(rf"[,;:&]|\\\\|{_RELATION.pattern}")
_MOST_PARTS = 40
"""Each is read by the parser, in about 10 ms."""
_LETTER = r"[a-zA-Z](?:_\{?\w+\}?)?"
_NAME = re.compile(
    rf"(?:{_LETTER}(?:\^\{{-1\}}(?=\())?|\\[a-z]+(?:_\{{?\w+\}}?)?|[A-Z]{{2,3}}|\\text\s*\{{[^{{}}]*\}})'?\s*(?:\(\s*[\w\\,+\s-]{{1,20}}\s*\))?"
    rf"|\(\s*{_LETTER}(?:\s*,\s*{_LETTER})+\s*\)"
    r"|\|\s*[A-Z]{2}\s*\||m?\\angle\s*[A-Z]{1,3}|\\(?:sin|cos|tan)\s*\\?[a-zA-Z]+"
)
"""What can stand on the left of `=` without being an equation to solve: x, f(x), AB, (x, y), P(A)."""
_SETS = frozenset((r"\emptyset", r"\mathbb{Z}", r"\mathbb{N}", r"\mathbb{Q}", r"\mathbb{C}"))
_MATRIX = re.compile(
    r"([^&]*?)\s*(?:\\cdot\s*)?\\begin\{([pbvVB]?(?:small)?matrix|cases|array)\}(?:\{[^{}]*\})?(.*)\\end\{\2\}",
    re.DOTALL,
)
_MATRIX_BRACKETS = re.compile(r"^(?:[\[(]|\\\{)\s*(?=\\begin)|(?<=\})\s*[\])]$")
_OPENING = re.compile(r"\\\{|\\langle|[(\[]")
_CLOSING = re.compile(r"(?:\\\}|\\rangle|[)\]])$")
_SET_OF = re.compile(rf"\s*{_LETTER}\s*(?:\\in\s*(?:\\mathbb\{{R\}}|R)\s*)?[:|]")
"""The beginning of `\\{x : x > 1\\}`."""
_ORDER = frozenset(("<", ">", r"\le", r"\ge"))
_SIGN = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_SIGNS = {r"^\circ": DEGREE, r"^\circ C": "celsius", r"^\circ F": "fahrenheit", r"\%": PERCENT}
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_MONEY = re.compile(
    r"(?:(?:^|(?<=[-+/=(])|(?<=\\times)|(?<=\\cdot))\s*)(\\\$|[€£¥])\s*(?=[-+]?[\d.(\\])|(?<=[\d}])\s*(\\\$|[€£¥¢])$"
)
"""The sign of a currency: before a number, or at the end."""


def read_answer(text: str, names: Names = None) -> Value:
    """The one value that the text gives; several between "or" and "and" are a list. Raises Unreadable.

    names: the variables of the reference. None: the text is a reference, and no words may stand before its value.
    """
    text = _undecorated(text)
    if len(text) > LONGEST_ANSWER:
        raise Unreadable(f"longer than {LONGEST_ANSWER} letters")
    latex = _undecorated(_WORDS_IN_PARENTHESES.sub(r" \1", to_latex(text)))
    if len(_PART.findall(latex)) > _MOST_PARTS:
        raise Unreadable(f"more than {_MOST_PARTS} parts")
    if max(depths(latex), default=0) > _DEEPEST:
        raise Unreadable("nested too deeply")
    choice = _CHOICE.fullmatch(latex)
    if choice and not _RELATION.match((choice.group(3) or "").strip()):
        return Choice((choice.group(1) or choice.group(2)).upper())
    return _joined(latex, names)


def letters_of(value: object) -> frozenset[str]:
    """The letters of a value that are variables."""
    if isinstance(value, Expression):
        return value.letters
    if isinstance(value, tuple):
        return frozenset().union(*(letters_of(item) for item in value))
    return frozenset().union(*(letters_of(getattr(value, name)) for name in getattr(value, "__dataclass_fields__", ())))


def _undecorated(text: str) -> str:
    """Without markdown, the delimiters of formulas, a box or `\\text` around all of it, and closing punctuation."""
    before = None
    while text != before:
        before = text
        text = _EMPHASIS.sub(r"\2", _PICTURE.sub("", text.replace("`", "")).strip()).strip("*#~ \t\n")
        for opening, closing in _PAIRS:
            inside = text[len(opening) : -len(closing)]
            if text == f"{opening}{inside}{closing}" and inside and opening not in inside and closing not in inside:
                text = inside
        group = _GROUP.match(text)
        if group and text.endswith("}") and 0 not in depths(text)[group.end() : -1]:
            inside = text[group.end() : -1]
            is_set = group.group() == "{" and len(split_outside(inside, ",")) > 1
            text = rf"\{{{inside}\}}" if is_set else inside
        text = text[:-2] if text.endswith(("\\.", "\\,", "\\!")) else _FULL_STOP.sub("", text.rstrip(",;: \n"))
    if not re.search(r"matrix|cases|array", text):
        text = re.sub(r"\\\\|&", " ", _ALIGNMENT.sub(" ", text)).strip()
    dollars = re.findall(r"(?<!\\)\$", text)  # in pairs they are delimiters; one alone is money
    text = re.sub(r"(?<!\\)\$", "" if len(dollars) % 2 == 0 else r"\\$", text)
    return re.sub(r"\\[()]", "", re.sub(r"(?<!\\)\\[\[\]]", " ", text)).strip()


def _joined(latex: str, names: Names) -> Value:
    """The value of one formula with words around it; of several, their list, or the union that "or" makes of ranges."""
    values, separators = _values(latex, names)
    if len(values) == 1:
        return values[0]
    if set(separators) == {"or"} and all(isinstance(v, Relation) and _ORDER.issuperset(v.operators) for v in values):
        return Union(tuple(values))
    return _list(values)


def _list(values: Iterable[Value], opening: str = "", closing: str = "") -> Collection:
    """A list or a set; the entries of lists in it are its own."""
    flat = [value.entries if isinstance(value, Collection) and not value.opening else (value,) for value in values]
    return Collection(opening, closing, tuple(entry for entries in flat for entry in entries))


def _values(latex: str, names: Names) -> tuple[list[Value], list[str]]:
    """The values of formulas with words around them, and the separators between them."""
    values: list[Value] = []
    separators: list[str] = []
    before, formula, after = "", "", ""
    for kind, piece in [*split_words(latex, names), (Kind.SEPARATOR, "")]:
        if kind is Kind.FORMULA and piece.strip(" .,:;"):
            if formula:
                raise Unreadable("more than one value")
            formula = piece
        elif kind is Kind.WORDS:
            before, after = (before, f"{after} {piece}") if formula else (f"{before} {piece}", after)
        elif kind is Kind.SEPARATOR:
            if not formula.strip(" .,:;-="):
                raise Unreadable("words without mathematics" if before.strip() else "no mathematics")
            values.append(_value(before, formula, after, names))
            separators.append(re.sub(r"\\text|[^a-zA-Z]", "", piece).lower())
            before, formula, after = "", "", ""
    return values, separators[:-1]


def _value(before: str, formula: str, after: str, names: Names) -> Value:
    if change_value(before, after):
        raise Unreadable("words that change the value")
    if names is None and before.strip():
        raise Unreadable("words before the value")
    value = _mathematics(_FULL_STOP.sub("", formula.strip(" =:,;")), names)
    units = canonical_unit(after)
    return _with_units(value, units) if units else value


def _with_units(value: Value, units: tuple[str, ...]) -> Value:
    if isinstance(value, Relation) and value.terms[-1] is not None:
        return Relation((*value.terms[:-1], _with_units(value.terms[-1], units)), value.operators, value.names)
    if isinstance(value, Quantity):
        return Quantity(value.value, value.units + units)
    return Quantity(value, units)


def _entry(text: str, names: Names) -> Value:
    """One entry of a list, a bracket or a matrix."""
    values, _ = _values(text, names)
    if len(values) > 1:
        raise Unreadable("more than one value in an entry")
    return values[0]


def _mathematics(text: str, names: Names) -> Value:
    """A value without words around it: the outermost structure first."""
    text = text.strip()
    for separator in (";", ","):
        entries = split_outside(text, separator)
        if len(entries) > 1:
            return _list(_entry(entry, names) for entry in entries)
    if len(_SIGN.findall(text)) == 1:
        upper = _SIGN.sub(lambda sign: "+" if sign.group() == r"\pm" else "-", text)
        lower = _SIGN.sub(lambda sign: "-" if sign.group() == r"\pm" else "+", text)
        return _list(_mathematics(side, names) for side in (upper, lower))
    relation = _relation(text, names)
    if relation is not None:
        return relation
    members = split_outside(text, r"\cup")
    if len(members) > 1:
        return Union(tuple(_mathematics(member, names) for member in members))
    if text == r"\mathbb{R}":
        return Collection("(", ")", (Expression(-oo), Expression(oo)))
    if text in _SETS:
        return SpecialSet(text)
    matrix = _MATRIX.fullmatch(_MATRIX_BRACKETS.sub("", text))
    if matrix:
        return _matrix(matrix.group(1), matrix.group(2), matrix.group(3), names)
    return _bracketed(text, names) or _signed_quantity(text, names) or _numeral(text) or read_expression(text)


def _relation(text: str, names: Names) -> Value | None:
    """A chain of =, <, > and their kin. None where there is no such sign."""
    depth_at = depths(text)
    found = [match for match in _RELATION.finditer(text) if not depth_at[match.start()]]
    if not found:
        return None
    bounds = [0, *(edge for match in found for edge in match.span()), len(text)]
    sides = [text[bounds[i] : bounds[i + 1]].strip() for i in range(0, len(bounds), 2)]
    operators = tuple(match.group() for match in found)
    terms = (_left_side(sides[0], names), *(_entry(side, names) for side in sides[1:]))
    return Relation(terms, operators, tuple("".join(s.split()) if _NAME.fullmatch(s) else "" for s in sides))


def _left_side(text: str, names: Names) -> Value | None:
    """The value of the first term; None where it is empty, or a name that is no expression."""
    if not text or re.fullmatch(r"[\w\s]*[a-z]{4,}[\w\s]*", text):
        return None
    try:
        return _entry(text, names)
    except Unreadable:
        if _NAME.fullmatch(text):
            return None
        raise


def _matrix(factor: str, environment: str, content: str, names: Names) -> Value:
    rows = [split_outside(row, "&") for row in split_outside(content, r"\\") if row.strip()]
    cells = tuple(tuple(_entry(cell, names) for cell in row if cell.strip()) for row in rows)
    if not cells or len({len(row) for row in cells}) > 1:
        raise Unreadable("a matrix with rows of different lengths")
    kind = "cases" if environment == "cases" else "vmatrix" if environment[0] in "vV" else "matrix"
    if factor and kind != "matrix":
        raise Unreadable("a multiple of what is no matrix")
    if factor:
        scale = read_expression(f"{factor}1" if factor == "-" else factor).tree
        cells = tuple(tuple(_scaled(cell, scale) for cell in row) for row in cells)
    return Matrix(kind, cells)


def _scaled(value: Value, factor: Expr) -> Value:
    if not isinstance(value, Expression):
        raise Unreadable("a multiple of what is no number")
    return Expression(Mul(factor, value.tree, evaluate=False))


def _bracketed(text: str, names: Names) -> Value | None:
    """Entries between two brackets that hold all of the text; None where the text is not that."""
    opening, closing = _OPENING.match(text), _CLOSING.search(text)
    if not opening or not closing or opening.end() > closing.start():
        return None
    if 0 in depths(text)[opening.end() : closing.start()]:
        return None
    inside = text[opening.end() : closing.start()]
    condition = _SET_OF.match(inside) if opening.group() == r"\{" else None
    if condition:
        return _joined(inside[condition.end() :], names)
    entries = split_outside(inside, ",", ";")
    if len(entries) == 1 and opening.group() == "(" and closing.group() == ")":
        has_words = any(kind is Kind.WORDS for kind, _ in split_words(inside, names))
        return _entry(inside, names) if has_words or _signed_quantity(inside, names) else None
    values = tuple(_entry(entry, names) for entry in entries)
    if opening.group() == r"\{":
        return _list(values, "{", closing.group().lstrip("\\"))
    return Collection(opening.group().lstrip("\\"), closing.group().lstrip("\\"), values)


def _signed_quantity(text: str, names: Names) -> Value | None:
    """A percentage, degrees or money written with signs; None where the text is none of them."""
    for sign, unit in _SIGNS.items():
        terms = re.split(r"(?<=[^-+(^/])\s*[-+]", text)
        is_sum = all(term.rstrip().endswith(sign) for term in terms) and text.count(sign) == len(terms)
        if is_sum and not _TRIGONOMETRY.search(text):
            return Quantity(_mathematics(text.replace(sign, ""), names), (unit,))
    signs = {match.group(1) or match.group(2) for match in _MONEY.finditer(text)}
    amount = _MONEY.sub(" ", text)
    if len(signs) == 1 and not _MONEY.search(amount):
        return Quantity(_mathematics(amount, names), canonical_unit(signs.pop()))
    return None


def _numeral(text: str) -> Value | None:
    """Numbers that are no expressions: 3:45, and 101 with the base 2."""
    terms = split_outside(text, ":")
    if len(terms) > 1:
        return Ratio(tuple(read_expression(term) for term in terms))
    based = re.fullmatch(r"[({]?(\d[\dA-F]{0,199}|[A-F][\dA-F]{1,199})[)}]?\s*_\s*\{\s*\(?(\d{1,2})\)?\s*\}", text)
    if based and all(int(digit, 16) < int(based.group(2)) for digit in based.group(1)):
        return Numeral(based.group(1), int(based.group(2)))
    return None
