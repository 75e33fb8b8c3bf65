"""Find the fenced blocks of a completion, as models write them: Markdown with the usual mistakes.

Called by `code.answers` and `text.json_answers`. Invariant: time is linear in the text's length, since answers may be
hostile.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

_FENCE = re.compile(
    r"(?P<before>(?:[ \t]{0,32}>){0,8}[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]{1,32})?)"
    r"(?P<marks>`{3,}|~{3,})"
    r"[ \t]*(?P<info>[^\r\n]*)"
)
"""A line that opens or closes a block, after quote marks, white space and the marker of a list item. The counts are
bounded so that matching stays linear."""
_LANGUAGE = re.compile(r"[{.\s]*([^\s{},:.]*)")
_QUOTE = re.compile(r"(?:[ \t]{0,32}>){1,8}[ \t]?")
_CONTENT_INDENT = 4
"""A fence indented by this many more columns than the opening fence is content of the block (CommonMark)."""

_TAB = 4  # columns, as in CommonMark


@dataclass(frozen=True)
class FencedBlock:
    """A block without its fences. language: the first word after the opening fence, "" if there is none."""

    language: str
    content: str


@dataclass(frozen=True)
class _Fence:
    column: int
    marks: str
    info: str
    is_quoted: bool
    is_item: bool

    @property
    def language(self) -> str:
        found = _LANGUAGE.match(self.info)
        return found.group(1) if found is not None else ""

    def closes_block(self, opened: _Fence) -> bool:
        return self.marks.startswith(opened.marks) and not self.info and not self.is_item

    def replaces_block(self, opened: _Fence) -> bool:
        """Whether this fence opens a new block although the previous one was not closed."""
        return self.marks == opened.marks and bool(self.info) and self.column <= opened.column


def find_fenced_blocks(text: str) -> list[FencedBlock]:
    """Return the blocks in order. A block ends at its closing fence, where the next one opens, or with the text.

    The contents lose the indentation of their fence, and then the indentation that all of their lines share.
    """
    blocks: list[FencedBlock] = []
    opened: _Fence | None = None
    content: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _parse_fence(line)
        if opened is not None and fence is not None and fence.column >= opened.column + _CONTENT_INDENT:
            fence = None  # content of the open block
        if opened is None:
            if fence is not None:
                opened = fence
                content = []
        elif fence is not None and (fence.closes_block(opened) or fence.replaces_block(opened)):
            blocks.append(_build_block(opened, content))
            opened = None if fence.closes_block(opened) else fence
            content = []
        else:
            content.append(line)
    if opened is not None:  # the completion ends inside a block, perhaps cut off by maxTokens
        blocks.append(_build_block(opened, content))
    return blocks


def _parse_fence(line: str) -> _Fence | None:
    if "```" not in line and "~~~" not in line:
        return None
    found = _FENCE.match(line)
    if found is None or (found["marks"][0] == "`" and "`" in found["info"]):
        return None
    before = found["before"]
    is_quoted = ">" in before
    unquoted = _QUOTE.sub("", before, count=1)
    column = len(unquoted.expandtabs(_TAB))
    return _Fence(column, found["marks"], found["info"].strip(), is_quoted, bool(unquoted.strip()))


def _build_block(opened: _Fence, content: list[str]) -> FencedBlock:
    if opened.is_quoted:
        content = [_QUOTE.sub("", line, count=1) for line in content]
    lines = [_dedent_line(line, opened.column) for line in content]
    return FencedBlock(opened.language, textwrap.dedent("\n".join(lines)) + "\n")


def _dedent_line(line: str, columns: int) -> str:
    """Remove white space up to the fence's column. A tab that extends beyond the column is removed entirely."""
    place = width = 0
    while width < columns and place < len(line) and line[place] in " \t":
        width += 1 if line[place] == " " else _TAB - width % _TAB
        place += 1
    return line[place:]
