"""Measures the length of the sentences in Markdown pages: mean, and share of short ones.

    python -m tools.readability README.md docs/architecture.md

Counted are paragraphs and list items. Headings, tables, code blocks, pictures and the bold words that begin an item are
not sentences. A link counts as its text, inline code as one word. `tests/unit/test_readability.py` bounds the pages
that a newcomer reads first.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.doc_links import FENCE

SHORT_WORDS = 25
"""A sentence with fewer words is short."""

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_NO_PROSE = re.compile(r"^(#|\||!\[| {4}|\t)")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]*`")
_BOLD_LEAD = re.compile(r"^\*\*[^*]+[.:]\*\*\s*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z`*\"(\[])")


@dataclass(frozen=True)
class Readability:
    """Sentences of one page. mean_words: per sentence. short_share: of sentences below SHORT_WORDS."""

    sentences: int
    mean_words: float
    short_share: float


def split_sentences(page: str) -> list[str]:
    """Split the prose of a Markdown page into sentences."""
    blocks: list[list[str]] = [[]]
    for line in _COMMENT.sub("", FENCE.sub("", page)).splitlines():
        inside_item = bool(blocks[-1]) and bool(re.match(r"^\s+\S", line))
        if not line.strip() or (_NO_PROSE.match(line) and not inside_item):
            blocks.append([])
        elif _ITEM.match(line):
            blocks.append([_ITEM.sub("", line)])
        else:
            blocks[-1].append(line.strip())
    sentences: list[str] = []
    for block in blocks:
        text = _BOLD_LEAD.sub("", _CODE.sub("code", _LINK.sub(r"\1", " ".join(block))))
        sentences += [part.strip() for part in _SENTENCE_END.split(text) if re.search(r"\w", part)]
    return sentences


def measure_page(page: str) -> Readability:
    """Measure the sentences of a page."""
    words = [len(re.findall(r"\S*\w\S*", sentence)) for sentence in split_sentences(page)]
    short = sum(count < SHORT_WORDS for count in words)
    return Readability(len(words), statistics.mean(words), short / len(words))


def main(paths: Sequence[str]) -> None:
    for path in paths:
        found = measure_page(Path(path).read_text(encoding="utf-8"))
        print(
            f"{path}: {found.sentences} sentences, {found.mean_words:.1f} words on average, "
            f"{found.short_share:.0%} below {SHORT_WORDS}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
