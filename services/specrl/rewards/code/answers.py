"""Find the parts of a completion that may be its program: fenced code blocks, as models write them.

Called by `verifier.Code`. Invariant: time is linear in the completion's length. This module parses no Python, since a
hostile text can make the parser very slow. If there are several blocks, `inside/choose.py` chooses one in the sandbox.
docs/rewards.md, "Programs", has the rules.
"""

from __future__ import annotations

import re

from specrl.rewards.text.fenced_blocks import find_fenced_blocks

_THOUGHT_ENDS = "</think>"
_THOUGHT_BEGINS = "<think>"
_PYTHON = re.compile(r"(i?py|i?python|pypy)[\d.]*|plain|plaintext|text|txt|code|", re.IGNORECASE)
"""Languages of a block that may be the program. Models often omit the language or call it text."""

_MAX_BLOCKS = 64
"""Only the last blocks are kept, since the sandbox parses each of them."""


def find_program_blocks(completion: str) -> list[str]:
    """Return the blocks that may be the program, in order; without any fence, the whole answer.

    The list is empty if the completion has no program, for example because its thought never ends.
    """
    text = _drop_thoughts(completion)
    if text is None:
        return []
    found = find_fenced_blocks(text)
    programs = [block.content for block in found if _PYTHON.fullmatch(block.language)] if found else [text]
    return [program for program in programs if program.strip()][-_MAX_BLOCKS:]


def _drop_thoughts(completion: str) -> str | None:
    """Return the text after the last thought, or None if the completion is a thought that never ends."""
    _, ended, rest = completion.rpartition(_THOUGHT_ENDS)
    if ended:
        return rest
    return None if completion.lstrip().startswith(_THOUGHT_BEGINS) else completion
