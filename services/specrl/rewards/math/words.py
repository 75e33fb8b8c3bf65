"""Words around mathematics: which letters are words and units, and which are variables and functions.

Called by `reading.py` with text in the one spelling of `notation.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from specrl.rewards.math.brackets import depths
from specrl.rewards.math.notation import FUNCTION_NAMES
from specrl.rewards.math.units import SYMBOLS

Names = frozenset[str] | None
"""Of an answer, the letters that are variables in its reference: other letters behind a number are units. None: the
text is a reference itself."""

_TEXT = r"\\text\s*\{(?:[^{}]|\{[^{}]*\})*\}"
_UNIT = "|".join(sorted(SYMBOLS, key=len, reverse=True))
_POWER = r"(?:\s*\^\s*\{?[23]\}?)?"
_PER = rf"(?:\s*/\s*(?:{_TEXT}|[a-zA-Z]+){_POWER})*"
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
_OPERATOR_BEFORE = re.compile(r"[-+/^_=<>|]\s*$|\\(?:cdot|times|le|ge|ne|pm|frac)\s*$")
_OPERATOR_AFTER = re.compile(r"\s*[-+/^_=<>|)},]|\s*\\(?:cdot|times|le|ge|ne|pm)")
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
_NUMBER = re.compile(r"(?<![\^{\d])\d")


class Kind(Enum):
    """What a piece of an answer is."""

    FORMULA = 1
    WORDS = 2
    SEPARATOR = 3
    """A word between two candidates: "or", "and"."""


def split_words(latex: str, names: Names) -> Iterator[tuple[Kind, str]]:
    """The text in order: formulas, the words outside of all brackets, and the separators of candidates."""
    start, depth_at = 0, depths(latex)
    for match in _WORD.finditer(latex):
        if depth_at[match.start()] or not _is_word(match, latex, names):
            continue
        yield Kind.FORMULA, latex[start : match.start()]
        inside = re.sub(r"^\\text\s*\{(.*)\}$", r"\1", match.group()).strip()
        yield Kind.SEPARATOR if _SEPARATOR.fullmatch(inside) else Kind.WORDS, match.group()
        start = match.end()
    yield Kind.FORMULA, latex[start:]


def change_value(before: str, after: str) -> bool:
    """Whether words around a number make another value of it, as in `not 18` or `at least 18`, or hold another one."""
    return bool(_CHANGES.search(before) or _DENIES.search(after) or _NUMBER.search(before + after))


def _is_word(match: re.Match[str], latex: str, names: Names) -> bool:
    """Whether letters side by side are a word or a unit, not a product of variables or a function."""
    found, before, after = match.group(), latex[: match.start()], latex[match.end() :]
    if found[0].isascii() and found[0].isalpha() and found not in ("a", "A") and found[1:2] in ("", " ", "^", "/"):
        if re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", before.rpartition("=")[2]):
            return False  # a letter behind variables is one of them, as in pi r^2 h
        return before[-1].isspace() if names is None else found[0] not in names
    if found[0] == "/":
        return names is not None and not names.issuperset(found[1:].strip())
    if not found[0].isalpha() or not found.isascii() or found[1:2] == ".":
        return True
    if found.lower() in FUNCTION_NAMES:
        return False
    if len(found) > 3 or found.lower() in ("or", "and", "a", "an"):
        return True
    touches = before[-1:] and not before[-1:].isspace() and before[-1:] not in ".:;\"'"
    if touches and before[-1] in "0123456789}" and re.fullmatch(_UNIT, found):
        return True
    if touches or _OPERATOR_BEFORE.search(before) or _OPERATOR_AFTER.match(after):
        return False
    return bool(before.strip() or after.strip()) or found.lower() in ("no", "yes", "not", "all", "the")
