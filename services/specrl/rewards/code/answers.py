"""Which part of a completion is the program."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_PYTHON = {"", "python", "python3", "py"}


def answer_code(completion: str) -> str:
    """The last fenced block of Python, to the end if it is not closed; without any fence, all of it."""
    blocks: list[str] = []
    opened: tuple[str, str, int] | None = None
    has_fence = False
    for fence in _FENCE.finditer(completion):
        marks, language = fence.group(1), fence.group(2).lower()
        has_fence = True
        if opened is None:
            opened = (marks, language, fence.end() + 1)
        elif marks.startswith(opened[0]) and not language:
            if opened[1] in _PYTHON:
                blocks.append(completion[opened[2] : fence.start()])
            opened = None
    if opened is not None and opened[1] in _PYTHON:
        blocks.append(completion[opened[2] :])
    if not has_fence:
        return completion
    return blocks[-1] if blocks else ""
