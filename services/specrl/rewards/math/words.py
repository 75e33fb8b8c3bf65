"""Separate words and units from mathematics: decide which letters are words and which are variables or functions.

Called by `reading.py` with text in the spelling that `notation.to_latex` produces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from specrl.rewards.math.notation import FUNCTION_NAMES, bracket_depths
from specrl.rewards.math.units import SYMBOLS

VariableNames = frozenset[str] | None
"""The letters that are variables in the reference. In an answer, any other single letter behind a number is a unit.
None: the text is itself a reference."""

# Building blocks of _WORD: LaTeX text, known units, and powers and quotients that follow a unit.
_TEXT = r"\\text\s*\{(?:[^{}]|\{[^{}]*\})*\}"
_UNIT = "|".join(sorted(SYMBOLS, key=len, reverse=True))
_POWER = r"(?:\s*\^\s*\{?[23]\}?)?"
_PER = rf"(?:\s*/\s*(?:{_TEXT}|[a-zA-Z]+){_POWER})*"

# A word or unit: LaTeX text; a known unit after a number; a one-letter unit after a number; a quotient such as `/hour`;
# am and pm; an article; any word of two or more letters; a letter of another script after a number.
_WORD = re.compile(
    rf"{_TEXT}{_POWER}{_PER}"
    rf"|(?<=[\d}}\s)])(?<![a-zA-Z])(?:{_UNIT}){_POWER}{_PER}(?![a-zA-Z\d(])"
    rf"|(?:(?<=[\d}}])|(?<=[\d}}]\s))[mgshlLVWNJAKCF]{_POWER}{_PER}(?=\s*$|\s+(?:and|or)\b)"
    r"|(?<=\d)\s*/\s*[a-z]{3,}(?![a-zA-Z(])"
    r"|\b[aApP]\.\s?[mM]\b\.?"
    r"|(?<![\\\w])[aA]n?(?=\s+[a-z]{3,})"
    r"|(?<![\\a-zA-Z])[^\W\d_]{2,}(?:['’.-][^\W\d_]+)*['’]?"
    r"|(?<=[\d}\s])[^\W\d_a-zA-Z]"
)

# Two or three letters next to an operator are a product of variables, not a word.
_OPERATOR_BEFORE = re.compile(r"[-+/^_=<>|]\s*$|\\(?:cdot|times|le|ge|ne|pm|frac)\s*$")
_OPERATOR_AFTER = re.compile(r"\s*[-+/^_=<>|)},]|\s*\\(?:cdot|times|le|ge|ne|pm)")

# Words that separate candidates, and words before (_CHANGES) or after (_DENIES) a number that change its value.
_SEPARATOR = re.compile(r"(?:,?\s*)(?:or|and|und|oder|et|ou)", re.IGNORECASE)
_DENIES = re.compile(
    r"\b(?:not|isn't|never|wrong|incorrect|false|or|at most|at least|factorial)\b|^\s*(?:squared|cubed)\s*$",
    re.IGNORECASE,
)
_CHANGES = re.compile(
    r"\b(?:not|no|isn't|never|neither|nor|but|less|fewer|least|most|under|below|above|over|between|except|unless|if|or|"
    r"half|twice|double|almost|nearly|up to|more than)\b|\b(?:root|square|cube|logarithm|reciprocal|inverse) of\s*$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![\^{\d])\d")  # not the exponent of a unit


class PieceKind(Enum):
    """The kind of a piece of an answer."""

    FORMULA = 1
    WORDS = 2
    SEPARATOR = 3
    """A word between two candidates, such as "or" and "and"."""


def split_words(latex: str, names: VariableNames) -> Iterator[tuple[PieceKind, str]]:
    """Split the text into formulas, words outside of all brackets, and separators of candidates, in order.

    Formulas may be empty; the last piece is always a formula.
    """
    start = 0
    depth_at = bracket_depths(latex)
    for match in _WORD.finditer(latex):
        if depth_at[match.start()] or not _is_word(match, latex, names):
            continue
        yield PieceKind.FORMULA, latex[start : match.start()]
        inside = re.sub(r"^\\text\s*\{(.*)\}$", r"\1", match.group()).strip()
        yield PieceKind.SEPARATOR if _SEPARATOR.fullmatch(inside) else PieceKind.WORDS, match.group()
        start = match.end()
    yield PieceKind.FORMULA, latex[start:]


def words_change_value(before: str, after: str) -> bool:
    """Whether words around a number change its value, as in `not 18` or `at least 18`, or contain another number."""
    return bool(_CHANGES.search(before) or _DENIES.search(after) or _NUMBER.search(before + after))


def _is_word(match: re.Match[str], latex: str, names: VariableNames) -> bool:
    """Whether a match of _WORD is a word or a unit, rather than a product of variables or a function."""
    found = match.group()
    before = latex[: match.start()]
    after = latex[match.end() :]

    # A single letter, perhaps with a power or a quotient: a unit or a variable.
    if found[0].isascii() and found[0].isalpha() and found not in ("a", "A") and found[1:2] in ("", " ", "^", "/"):
        if re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", before.rpartition("=")[2]):
            return False  # a letter behind variables is one of them, as in pi r^2 h
        return before[-1].isspace() if names is None else found[0] not in names
    if found[0] == "/":
        return names is not None and not names.issuperset(found[1:].strip())

    # LaTeX text, other scripts and "a.m." are never variables; function names are never words; long words always are.
    if not found[0].isalpha() or not found.isascii() or found[1:2] == ".":
        return True
    if found.lower() in FUNCTION_NAMES:
        return False
    if len(found) > 3 or found.lower() in ("or", "and", "a", "an"):
        return True

    # Two or three letters: a unit directly after a number, a product of variables next to an operator, else a word.
    touches = before[-1:] and not before[-1:].isspace() and before[-1:] not in ".:;\"'"
    if touches and before[-1] in "0123456789}" and re.fullmatch(_UNIT, found):
        return True
    if touches or _OPERATOR_BEFORE.search(before) or _OPERATOR_AFTER.match(after):
        return False
    return bool(before.strip() or after.strip()) or found.lower() in ("no", "yes", "not", "all", "the")
