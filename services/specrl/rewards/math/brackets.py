"""Which letters of a formula stand in brackets, so that lists and relations are split outside of them only."""

from __future__ import annotations

import re

_BRACKET = re.compile(r"\\begin\{|\\end\{|\\langle|\\rangle|\\[{}\\]|[()\[\]{}]")
_OPENS = {"(": 1, "[": 1, "{": 1, r"\{": 1, r"\langle": 1, r"\begin{": 2}
"""`\\begin{` opens a brace and an environment."""
_CLOSES = {")": 0, "]": 0, "}": 0, r"\}": 0, r"\rangle": 0, r"\end{": 1}
"""`\\end{` closes an environment, then opens a brace."""


def depths(text: str) -> list[int]:
    """Of each letter, how many brackets of any kind are open before it; closing ones count as outside."""
    found, depth, start = [], 0, 0
    for match in _BRACKET.finditer(text):
        bracket = match.group()
        found += [depth] * (match.start() - start)
        if bracket in _CLOSES:
            depth = max(0, depth - 1)
        found += [depth] * len(bracket)
        depth += _OPENS.get(bracket, 0) + _CLOSES.get(bracket, 0)
        start = match.end()
    return found + [depth] * (len(text) - start)


def split_outside(text: str, *separators: str) -> list[str]:
    """The parts between separators that stand outside of all brackets."""
    depth_at = depths(text)
    pattern = re.compile("|".join(re.escape(s) + (r"(?![a-zA-Z])" if s[-1].isalpha() else "") for s in separators))
    parts, start = [], 0
    for match in pattern.finditer(text):
        if not depth_at[match.start()]:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]
