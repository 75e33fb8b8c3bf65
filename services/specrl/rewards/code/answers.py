"""The parts of a completion that may be its program: fenced blocks, as models write them.

Called by `verifier.Code`. Pure text, in time linear in the completion's length; nothing here parses Python, since that
can take long on text that somebody has made for it. Which of several blocks it is, `inside/choose.py` decides, in the
sandbox. The rules are in docs/rewards.md, "Programs".
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

_THOUGHT_ENDS = "</think>"
_THOUGHT_BEGINS = "<think>"
_FENCE = re.compile(
    r"(?P<before>(?:[ \t]{0,32}>){0,8}[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]{1,32})?)"
    r"(?P<marks>`{3,}|~{3,})"
    r"[ \t]*(?P<info>[^\r\n]*)"
)
"""A line that opens or closes a block: behind marks of quotes, white space, and the mark of an item of a list."""
_LANGUAGE = re.compile(r"[{.\s]*([^\s{},:.]*)")
_PYTHON = re.compile(r"(i?py|i?python|pypy)[\d.]*|plain|plaintext|text|txt|code|", re.IGNORECASE)
"""Languages of a block that may be the program. Models leave the language out, or say that it is text."""
_QUOTE = re.compile(r"(?:[ \t]{0,32}>){1,8}[ \t]?")
_DEEPER = 4
"""A fence that is indented by so many columns more than the one that opened is the block's content (CommonMark)."""
_TAB = 4
_MOST_BLOCKS = 64
"""The last ones are looked at."""


@dataclass(frozen=True)
class _Fence:
    column: int
    marks: str
    info: str
    is_quoted: bool
    is_item: bool

    @property
    def is_python(self) -> bool:
        language = _LANGUAGE.match(self.info)
        return language is not None and _PYTHON.fullmatch(language.group(1)) is not None

    def closes(self, opened: _Fence) -> bool:
        return self.marks.startswith(opened.marks) and not self.info and not self.is_item

    def replaces(self, opened: _Fence) -> bool:
        """Whether a block begins here although the one before was not closed."""
        return self.marks == opened.marks and bool(self.info) and self.column <= opened.column


def program_blocks(completion: str) -> list[str]:
    """The blocks that may be the program, in order; all of the answer where it has no fence. Empty: there is none."""
    text = _without_thoughts(completion)
    if text is None:
        return []
    blocks: list[str] = []
    opened: _Fence | None = None
    content: list[str] = []
    has_fence = False
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _fence(line)
        if opened is not None and fence is not None and fence.column >= opened.column + _DEEPER:
            fence = None
        if opened is None:
            if fence is not None:
                opened, content, has_fence = fence, [], True
        elif fence is not None and (fence.closes(opened) or fence.replaces(opened)):
            _keep(blocks, opened, content)
            opened, content = None if fence.closes(opened) else fence, []
        else:
            content.append(line)
    if opened is not None:
        _keep(blocks, opened, content)
    if not has_fence:
        blocks = [text]
    return [block for block in blocks if block.strip()][-_MOST_BLOCKS:]


def _without_thoughts(completion: str) -> str | None:
    """What follows the last thought; None when the completion is one that did not end."""
    _, ended, rest = completion.rpartition(_THOUGHT_ENDS)
    if ended:
        return rest
    return None if completion.lstrip().startswith(_THOUGHT_BEGINS) else completion


def _fence(line: str) -> _Fence | None:
    if "```" not in line and "~~~" not in line:
        return None
    found = _FENCE.match(line)
    if found is None or (found["marks"][0] == "`" and "`" in found["info"]):
        return None
    before = found["before"]
    is_quoted = ">" in before
    unquoted = _QUOTE.sub("", before, count=1)
    return _Fence(_width(unquoted), found["marks"], found["info"].strip(), is_quoted, bool(unquoted.strip()))


def _keep(blocks: list[str], opened: _Fence, content: list[str]) -> None:
    if opened.is_python:
        if opened.is_quoted:
            content = [_QUOTE.sub("", line, count=1) for line in content]
        lines = [_dedented(line, opened.column) for line in content]
        blocks.append(textwrap.dedent("\n".join(lines)) + "\n")


def _dedented(line: str, columns: int) -> str:
    """Without white space up to the column of the fence; a tab that reaches over it is taken off whole."""
    place = width = 0
    while width < columns and place < len(line) and line[place] in " \t":
        width += 1 if line[place] == " " else _TAB - width % _TAB
        place += 1
    return line[place:]


def _width(text: str) -> int:
    return len(text.expandtabs(_TAB))
