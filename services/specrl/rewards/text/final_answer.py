"""Find the final answer of a completion as text, and normalise it for comparison.

Called by the other modules of this folder, and by `math`. Invariant: time is linear in the text, since
answers may be hostile.
"""

from __future__ import annotations

import re

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_CURRENCY = re.compile(r"^([-+]?)\s*\\?[$€£]\s*(?=[-+.\d])")
_CURRENCY_AFTER = re.compile(r"(?<=\d)\s*\\?[$€£]$")
_TAG = re.compile(r"<([A-Za-z][\w-]*)>")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def find_marked_answer(text: str, mark: str) -> str | None:
    """Return the first line after the last `mark`, or None if there is no mark. An empty mark selects all text.

    If the mark is a tag, as `<answer>`, the answer ends before `</answer>`.
    """
    if not mark:
        return text.strip()
    _, found, after = text.rpartition(mark)
    if not found:
        return None
    lines = cut_at_closing_tag(after, mark).strip().splitlines()
    return lines[0].strip() if lines else ""


def cut_at_closing_tag(after: str, mark: str) -> str:
    """Return the text before the closing tag of a mark that is a tag. Other marks, and unclosed tags, keep all text."""
    tag = _TAG.fullmatch(mark.strip())
    return after if tag is None else after.partition(f"</{tag.group(1)}>")[0]


def normalise_answer(answer: str) -> str:
    """Normalise an answer for comparison as text: `$1,000.` becomes `1000`, ` New  York ` becomes `New York`."""
    text = " ".join(answer.split()).rstrip(".").rstrip()
    for opening, closing in _DELIMITERS:
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
            break  # one pair of formula delimiters at most
    # The full stop may also stand inside the delimiters or before the currency sign, so it is stripped again.
    text = _CURRENCY_AFTER.sub("", _CURRENCY.sub(r"\1", text)).rstrip(".").rstrip()
    return remove_thousands_separators(text)


def remove_thousands_separators(text: str) -> str:
    """Write `1,000` as `1000`. A comma that does not separate thousands stays."""
    return _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
