"""The final answer of a completion, as text: what follows a mark, and the form in which two answers are compared.

Used by the verifiers `exact`, `regex` and `jsonSchema`. Everything here is linear in the text.
"""

from __future__ import annotations

import re

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_CURRENCY = re.compile(r"^([-+]?)\s*\\?[$€£]\s*(?=[-+.\d])")
_CURRENCY_AFTER = re.compile(r"(?<=\d)\s*\\?[$€£]$")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def marked_answer(text: str, mark: str) -> str | None:
    """The first line after the last `mark`; None without one. An empty mark stands before the whole text."""
    if not mark:
        return text.strip()
    _, found, after = text.rpartition(mark)
    if not found:
        return None
    lines = after.strip().splitlines()
    return lines[0].strip() if lines else ""


def normalise(answer: str) -> str:
    """The form in which answers are compared as text: `$1,000.` is `1000`, ` New  York ` is `New York`."""
    text = " ".join(answer.split()).rstrip(".").rstrip()
    for opening, closing in _DELIMITERS:
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
            break
    text = _CURRENCY_AFTER.sub("", _CURRENCY.sub(r"\1", text)).rstrip(".").rstrip()
    return _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
