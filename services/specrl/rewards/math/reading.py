"""Read the text of an answer as one mathematical value.

    text -> strip decoration -> normalise (notation) -> split off words (words) -> structure (here) -> expressions

Called by `grading.py`. Invariant: text that is not understood raises Unreadable. Only words are ever dropped to make
the rest readable. This module reads the structure, because math-verify's parser loses it: the parser replaces a set of
one by its member, and drops the brackets of a tuple and the degree sign.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sympy import Expr, Mul, oo

from specrl.rewards.math.expressions import read_expression
from specrl.rewards.math.extraction import LONGEST_ANSWER
from specrl.rewards.math.notation import bracket_depths, split_outside, to_latex
from specrl.rewards.math.units import DEGREE, PERCENT, canonical_unit
from specrl.rewards.math.values import (
    Collection,
    Expression,
    Matrix,
    Numeral,
    OptionLetter,
    Quantity,
    Ratio,
    Relation,
    SetUnion,
    SpecialSet,
    Unreadable,
    Value,
)
from specrl.rewards.math.words import PieceKind, VariableNames, split_words, words_change_value

_DEEPEST = 8
"""Most nested brackets. The parser's time grows with the square of the depth: 0.4 s at 8, 1.5 s at 12."""

# Decoration that `_strip_decoration` removes.
_PAIRS = (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"), ('"', '"'), ("'", "'"))
_EMPHASIS = re.compile(r"(?<![\w*)}])(\*{1,3}|_{1,3})(?=\S)([^*_]*?)(?<=\S)\1(?![\w*({])")
_PICTURE = re.compile("[\u2600-\u27bf\ufe0f\U0001f300-\U0001faff]")
_FULL_STOP = re.compile(r"(?<!\.)\.$")
_GROUP = re.compile(r"(?:\\(?:boxed|fbox)\s*|\\text\s*(?=\{[^{}]*\d))?\{")
"""The opening of braces, of a box, or of `\\text` that contains a number."""
_ALIGNMENT = re.compile(r"\\(?:begin|end)\{(?:equation|align|aligned|gather|gathered|multline|displaymath|split)\*?\}")
_WORDS_IN_PARENTHESES = re.compile(r"\s\(([^()\d\\=<>]*[a-zA-Z]{3}[^()\d\\=<>]*)\)")

# A multiple-choice answer: `B`, `(b)`, `Option B: because ...`; but not `A and B`, nor the variable of `A = 3`.
_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s*:?\s*)?(?:\\text\s*\{\s*)?"
    r"(?:\(\s*([A-Ja-j])\s*\)|\b([A-J])(?=\s*(?:$|[.:)}](?!\d))|,?\s(?:because|since|as|which)\b))"
    r"\s*\}?(?!\s*(?:[,;&]|(?:\\text\s*\{\s*)?(?:and|or)\b))\s*(?:[.:)]?\s*(.*))?",
    re.DOTALL,
)

_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx)(?![a-zA-Z])|[=<>]")
_PART = re.compile(rf"[,;:&]|\\\\|{_RELATION.pattern}")
_MAX_PARTS = 40
"""Most parts between separators and relations. The parser takes about 10 ms for each."""
_LETTER = r"[a-zA-Z](?:_\{?\w+\}?)?"
_NAME = re.compile(
    rf"(?:{_LETTER}(?:\^\{{-1\}}(?=\())?|\\[a-z]+(?:_\{{?\w+\}}?)?|[A-Z]{{2,3}}|\\text\s*\{{[^{{}}]*\}})'?\s*(?:\(\s*[\w\\,+\s-]{{1,20}}\s*\))?"
    rf"|\(\s*{_LETTER}(?:\s*,\s*{_LETTER})+\s*\)"
    r"|\|\s*[A-Z]{2}\s*\||m?\\angle\s*[A-Z]{1,3}|\\(?:sin|cos|tan)\s*\\?[a-zA-Z]+"
)
"""A name, which may stand on the left of `=` without making it an equation to solve: x, f(x), AB, (x, y), P(A)."""
_SETS = frozenset((r"\emptyset", r"\mathbb{Z}", r"\mathbb{N}", r"\mathbb{Q}", r"\mathbb{C}"))
_MATRIX = re.compile(
    r"([^&]*?)\s*(?:\\cdot\s*)?\\begin\{([pbvVB]?(?:small)?matrix|cases|array)\}(?:\{[^{}]*\})?(.*)\\end\{\2\}",
    re.DOTALL,
)
_MATRIX_BRACKETS = re.compile(r"^(?:[\[(]|\\\{)\s*(?=\\begin)|(?<=\})\s*[\])]$")
_OPENING = re.compile(r"\\\{|\\langle|[(\[]")
_CLOSING = re.compile(r"(?:\\\}|\\rangle|[)\]])$")
_SET_OF = re.compile(rf"\s*{_LETTER}\s*(?:\\in\s*(?:\\mathbb\{{R\}}|R)\s*)?[:|]")
"""The beginning of a set with a condition, such as `\\{x : x > 1\\}`."""
_ORDER = frozenset(("<", ">", r"\le", r"\ge"))
_SIGN = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_SIGNS = {r"^\circ": DEGREE, r"^\circ C": "celsius", r"^\circ F": "fahrenheit", r"\%": PERCENT}
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_MONEY = re.compile(
    r"(?:(?:^|(?<=[-+/=(])|(?<=\\times)|(?<=\\cdot))\s*)(\\\$|[€£¥])\s*(?=[-+]?[\d.(\\])|(?<=[\d}])\s*(\\\$|[€£¥¢])$"
)
"""A currency sign: before a number, or at the end."""


def read_answer(text: str, names: VariableNames = None) -> Value:
    """Read the value of a text; several values joined by "or" or "and" are a list.

    names: the variables of the reference. None if the text is itself a reference; then no words may stand before the
    value. Raises Unreadable if the text is not one value, or exceeds a limit.
    """
    text = _strip_decoration(text)
    if len(text) > LONGEST_ANSWER:
        raise Unreadable(f"longer than {LONGEST_ANSWER} letters")
    # A second time, since the rewriting may uncover decoration. Words in parentheses become plain words.
    latex = _strip_decoration(_WORDS_IN_PARENTHESES.sub(r" \1", to_latex(text)))
    if len(_PART.findall(latex)) > _MAX_PARTS:
        raise Unreadable(f"more than {_MAX_PARTS} parts")
    if max(bracket_depths(latex), default=0) > _DEEPEST:
        raise Unreadable("nested too deeply")
    choice = _CHOICE.fullmatch(latex)
    if choice and not _RELATION.match((choice.group(3) or "").strip()):
        return OptionLetter((choice.group(1) or choice.group(2)).upper())
    return _join_values(latex, names)


def collect_letters(value: object) -> frozenset[str]:
    """Collect the variables of a value and of all values in it."""
    if isinstance(value, Expression):
        return value.letters
    if isinstance(value, tuple):
        return frozenset().union(*(collect_letters(item) for item in value))
    fields = getattr(value, "__dataclass_fields__", ())
    return frozenset().union(*(collect_letters(getattr(value, name)) for name in fields))


def _strip_decoration(text: str) -> str:
    """Strip Markdown, delimiters of formulas, a box or `\\text` around the whole text, and closing punctuation."""
    before = None
    # Decoration may be nested in any order, so repeat until nothing changes.
    while text != before:
        before = text
        text = _EMPHASIS.sub(r"\2", _PICTURE.sub("", text.replace("`", "")).strip()).strip("*#~ \t\n")
        for opening, closing in _PAIRS:
            inside = text[len(opening) : -len(closing)]
            if text == f"{opening}{inside}{closing}" and inside and opening not in inside and closing not in inside:
                text = inside
        group = _GROUP.match(text)
        if group and text.endswith("}") and 0 not in bracket_depths(text)[group.end() : -1]:
            inside = text[group.end() : -1]
            is_set = group.group() == "{" and len(split_outside(inside, ",")) > 1  # `{1, 2}`, without backslashes
            text = rf"\{{{inside}\}}" if is_set else inside
        text = text[:-2] if text.endswith(("\\.", "\\,", "\\!")) else _FULL_STOP.sub("", text.rstrip(",;: \n"))
    # Line breaks and alignment marks mean something only in matrices.
    if not re.search(r"matrix|cases|array", text):
        text = re.sub(r"\\\\|&", " ", _ALIGNMENT.sub(" ", text)).strip()
    dollars = re.findall(r"(?<!\\)\$", text)  # in pairs they are delimiters; one alone is money
    text = re.sub(r"(?<!\\)\$", "" if len(dollars) % 2 == 0 else r"\\$", text)
    return re.sub(r"\\[()]", "", re.sub(r"(?<!\\)\\[\[\]]", " ", text)).strip()


def _join_values(latex: str, names: VariableNames) -> Value:
    """Read formulas with words around them: one value, a list, or the union of inequalities joined by "or"."""
    values, separators = _read_values(latex, names)
    if len(values) == 1:
        return values[0]
    if set(separators) == {"or"} and all(isinstance(v, Relation) and _ORDER.issuperset(v.operators) for v in values):
        return SetUnion(tuple(values))
    return _build_list(values)


def _build_list(values: Iterable[Value], opening: str = "", closing: str = "") -> Collection:
    """Build a list or a set. Entries of lists without brackets inside it become its own entries."""
    flat = [value.entries if isinstance(value, Collection) and not value.opening else (value,) for value in values]
    return Collection(opening, closing, tuple(entry for entries in flat for entry in entries))


def _read_values(latex: str, names: VariableNames) -> tuple[list[Value], list[str]]:
    """Read the values of formulas with words around them. Returns them and the separators between them."""
    values: list[Value] = []
    separators: list[str] = []
    before = ""
    formula = ""
    after = ""
    pieces = [*split_words(latex, names), (PieceKind.SEPARATOR, "")]  # the last separator closes the last value
    for kind, piece in pieces:
        if kind is PieceKind.FORMULA and piece.strip(" .,:;"):
            if formula:
                raise Unreadable("more than one value")
            formula = piece
        elif kind is PieceKind.WORDS:
            before, after = (before, f"{after} {piece}") if formula else (f"{before} {piece}", after)
        elif kind is PieceKind.SEPARATOR:
            if not formula.strip(" .,:;-="):
                raise Unreadable("words without mathematics" if before.strip() else "no mathematics")
            values.append(_read_value(before, formula, after, names))
            separators.append(re.sub(r"\\text|[^a-zA-Z]", "", piece).lower())
            before = ""
            formula = ""
            after = ""
    return values, separators[:-1]


def _read_value(before: str, formula: str, after: str, names: VariableNames) -> Value:
    if words_change_value(before, after):
        raise Unreadable("words that change the value")
    if names is None and before.strip():
        raise Unreadable("words before the value")
    value = _read_mathematics(_FULL_STOP.sub("", formula.strip(" =:,;")), names)
    units = canonical_unit(after)
    return _add_units(value, units) if units else value


def _add_units(value: Value, units: tuple[str, ...]) -> Value:
    if isinstance(value, Relation) and value.terms[-1] is not None:
        return Relation((*value.terms[:-1], _add_units(value.terms[-1], units)), value.operators, value.names)
    if isinstance(value, Quantity):
        return Quantity(value.value, value.units + units)
    return Quantity(value, units)


def _read_entry(text: str, names: VariableNames) -> Value:
    """Read one entry of a list, a bracket or a matrix."""
    values, _ = _read_values(text, names)
    if len(values) > 1:
        raise Unreadable("more than one value in an entry")
    return values[0]


def _read_mathematics(text: str, names: VariableNames) -> Value:
    """Read a value without words around it. The outermost structure comes first, so the order of the steps matters."""
    text = text.strip()
    for separator in (";", ","):
        entries = split_outside(text, separator)
        if len(entries) > 1:
            return _build_list(_read_entry(entry, names) for entry in entries)
    # `a \pm b` is the list of its two values.
    if len(_SIGN.findall(text)) == 1:
        upper = _SIGN.sub(lambda sign: "+" if sign.group() == r"\pm" else "-", text)
        lower = _SIGN.sub(lambda sign: "-" if sign.group() == r"\pm" else "+", text)
        return _build_list(_read_mathematics(side, names) for side in (upper, lower))
    relation = _read_relation(text, names)
    if relation is not None:
        return relation
    members = split_outside(text, r"\cup")
    if len(members) > 1:
        return SetUnion(tuple(_read_mathematics(member, names) for member in members))
    if text == r"\mathbb{R}":
        return Collection("(", ")", (Expression(-oo), Expression(oo)))
    if text in _SETS:
        return SpecialSet(text)
    matrix = _MATRIX.fullmatch(_MATRIX_BRACKETS.sub("", text))
    if matrix:
        return _read_matrix(matrix.group(1), matrix.group(2), matrix.group(3), names)
    return (
        _read_brackets(text, names)
        or _read_signed_quantity(text, names)
        or _read_numeral(text)
        or read_expression(text)
    )


def _read_relation(text: str, names: VariableNames) -> Value | None:
    """Read a chain of =, <, > and the like; None if there is no such sign outside of brackets."""
    depth_at = bracket_depths(text)
    found = [match for match in _RELATION.finditer(text) if not depth_at[match.start()]]
    if not found:
        return None
    bounds = [0, *(edge for match in found for edge in match.span()), len(text)]
    sides = [text[bounds[i] : bounds[i + 1]].strip() for i in range(0, len(bounds), 2)]
    operators = tuple(match.group() for match in found)
    terms = (_read_left_side(sides[0], names), *(_read_entry(side, names) for side in sides[1:]))
    return Relation(terms, operators, tuple("".join(s.split()) if _NAME.fullmatch(s) else "" for s in sides))


def _read_left_side(text: str, names: VariableNames) -> Value | None:
    """Read the first term of a relation; None if it is empty, words, or a name that is no expression."""
    if not text or re.fullmatch(r"[\w\s]*[a-z]{4,}[\w\s]*", text):
        return None
    try:
        return _read_entry(text, names)
    except Unreadable:
        if _NAME.fullmatch(text):
            return None
        raise


def _read_matrix(factor: str, environment: str, content: str, names: VariableNames) -> Value:
    rows = [split_outside(row, "&") for row in split_outside(content, r"\\") if row.strip()]
    cells = tuple(tuple(_read_entry(cell, names) for cell in row if cell.strip()) for row in rows)
    if not cells or len({len(row) for row in cells}) > 1:
        raise Unreadable("a matrix with rows of different lengths")
    kind = "cases" if environment == "cases" else "vmatrix" if environment[0] in "vV" else "matrix"
    if factor and kind != "matrix":
        raise Unreadable("a multiple of what is no matrix")
    if factor:
        scale = read_expression(f"{factor}1" if factor == "-" else factor).tree
        cells = tuple(tuple(_scale_value(cell, scale) for cell in row) for row in cells)
    return Matrix(kind, cells)


def _scale_value(value: Value, factor: Expr) -> Value:
    if not isinstance(value, Expression):
        raise Unreadable("a multiple of what is no number")
    return Expression(Mul(factor, value.tree, evaluate=False))


def _read_brackets(text: str, names: VariableNames) -> Value | None:
    """Read entries between two brackets that enclose all of the text; None if the text has another form."""
    opening = _OPENING.match(text)
    closing = _CLOSING.search(text)
    if not opening or not closing or opening.end() > closing.start():
        return None
    if 0 in bracket_depths(text)[opening.end() : closing.start()]:  # `(1)(2)`: the first bracket closes early
        return None
    inside = text[opening.end() : closing.start()]
    condition = _SET_OF.match(inside) if opening.group() == r"\{" else None
    if condition:
        return _join_values(inside[condition.end() :], names)
    entries = split_outside(inside, ",", ";")
    # Parentheses around one entry only group: the parser reads them, unless they contain words or units.
    if len(entries) == 1 and opening.group() == "(" and closing.group() == ")":
        has_words = any(kind is PieceKind.WORDS for kind, _ in split_words(inside, names))
        return _read_entry(inside, names) if has_words or _read_signed_quantity(inside, names) else None
    values = tuple(_read_entry(entry, names) for entry in entries)
    if opening.group() == r"\{":
        return _build_list(values, "{", closing.group().lstrip("\\"))
    return Collection(opening.group().lstrip("\\"), closing.group().lstrip("\\"), values)


def _read_signed_quantity(text: str, names: VariableNames) -> Value | None:
    """Read a percentage, degrees or money written with signs; None if the text is none of these."""
    for sign, unit in _SIGNS.items():
        # In a sum, every term must have the sign: `30^\circ + 2` is none.
        terms = re.split(r"(?<=[^-+(^/])\s*[-+]", text)
        is_sum = all(term.rstrip().endswith(sign) for term in terms) and text.count(sign) == len(terms)
        if is_sum and not _TRIGONOMETRY.search(text):
            return Quantity(_read_mathematics(text.replace(sign, ""), names), (unit,))
    signs = {match.group(1) or match.group(2) for match in _MONEY.finditer(text)}
    amount = _MONEY.sub(" ", text)
    if len(signs) == 1 and not _MONEY.search(amount):
        return Quantity(_read_mathematics(amount, names), canonical_unit(signs.pop()))
    return None


def _read_numeral(text: str) -> Value | None:
    """Read numbers that are not expressions: times and ratios such as 3:45, and numerals with a base such as 101_2."""
    terms = split_outside(text, ":")
    if len(terms) > 1:
        return Ratio(tuple(read_expression(term) for term in terms))
    based = re.fullmatch(r"[({]?(\d[\dA-F]{0,199}|[A-F][\dA-F]{1,199})[)}]?\s*_\s*\{\s*\(?(\d{1,2})\)?\s*\}", text)
    if based and all(int(digit, 16) < int(based.group(2)) for digit in based.group(1)):
        return Numeral(based.group(1), int(based.group(2)))
    return None
