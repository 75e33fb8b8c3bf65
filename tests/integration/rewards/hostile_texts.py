"""Strategies for texts that a policy may write.

Any characters, random mixes of the tokens that verifiers look for, long repetitions, deep nesting, and expressions that
are expensive to evaluate.
"""

from __future__ import annotations

import json
import struct

from hypothesis import strategies as st
from tests.integration.border.fuzzing import EXAMPLES

MARKS = ("", "#### ", "\\boxed{", "The answer is ", "$$", "\\[", "**", "```python\n", "```json\n", "```\n", "<tool>")
LATEX = (
    "\\frac{", "\\dfrac12", "\\sqrt", "[3]{", "{", "}", "^", "_", "^{", "\\left(", "\\right]", "\\begin{pmatrix}", "&",
    "\\\\", "\\end{pmatrix}", "\\text{", "\\pm", "\\cup", "\\infty", "\\%", "\\circ", "\\sum_{i=1}^{n}", "\\int", "x",
    "\\pi", "=", "\\le", "!", ",", " ", "\n", "#### ", "\\boxed{", "$", "7", "1/2", "0.5", "-", "(", ")", "[", "]",
    "1e9", "\\cdot", "½", "٣", "\u2212", "\u2028", "10^{10}", "\\log", "\\sin", "e", "i", "\\choose", "or", "and",
    "'", "|",
)  # fmt: skip
JSON = (
    "{", "}", "[", "]", ":", ",", '"a"', '"', "\\", "\\ud800", "\\u0000", "null", "true", "NaN", "Infinity", "-",
    "1e999", "1e308", "0.01", "1" + "0" * 400, "9" * 5000, " ", "\n", "```", "é", "\ud83d",
)  # fmt: skip
PYTHON = (
    "def add(a, b):\n    return a + b\n", "class add:\n    pass\n", "add = 3\n", "import os\n", "import sys\n",
    "raise KeyError\n", "exit()\n", "print(3)\n", "print(sum(map(int, input().split())))\n", "add = add\n",
    "sys.setrecursionlimit(10 ** 9)\n", "x = [[]] * 9\n", "os._exit(0)\n", "os.kill(os.getpid(), 9)\n",
    "(" * 200 + "\n", "os.write(3, b'junk')\n", "os.close(3)\n", "x = bytearray(2 ** 40)\n", "x = 9 ** 9 ** 9\n",
    "\x00", "\t", "```\n",
    "```python\n", "add = type('C', (), {'__call__': lambda s, *a: s, '__eq__': lambda s, o: True})()\n", "\ud800",
    "while True: pass\n", "import time; time.sleep(99)\n", "add = lambda *a: float('nan')\n", "yield\n", "°\n",
)  # fmt: skip
BOMBS = (
    "9^{9^{9}}", "9^{9^{9^{9}}}", "9!!!!", "100000000!", "2^{10^{10}}", "10^{-10^{9}}", "1/(10^{9999}-10^{9999})",
    "\\sum_{i=1}^{10^{12}} i", "\\binom{10^9}{10^8}", "x^{99999}+1", "(x+1)^{5000}", "\\sqrt{" * 300 + "2" + "}" * 300,
    "\\frac{1}{" * 300 + "2" + "}" * 300, "\\gcd(10^{5000}, 3^{9999})", "\\prod_{p=1}^{10^6} p", "1" + "0" * 400,
    "\\sin(" * 200 + "1" + ")" * 200, "\\int_0^1 x^{x^x} dx", "a" * 50_000 + "!", "1," * 20_000, "\\$" * 20_000,
    "&" * 20_000, "####" * 20_000, "\\boxed{" * 20_000, "```python\n" * 5_000, "is " * 20_000, "the answer is " * 5_000,
)  # fmt: skip
SETS = [{"int": hex(number * (2**61 - 1))} for number in range(2_000)]
"""Integers that all hash to 0, so building a set of them takes quadratic time."""
FRAMES = (
    b"", b"[]", b"3", b"{}", b'{"failed": []}', b'{"failed": ""}', b"\xff\xfe", b'{"failed": "' + b"x" * 70_000 + b'"}',
    b"[" * 50_000, json.dumps({"failed": "", "result": {"set": SETS}}).encode(),
    json.dumps({"failed": "", "result": {"dict": [[number, 1] for number in SETS]}}).encode(),
)  # fmt: skip


def frame_writer(frames: list[bytes], pause_s: float) -> str:
    """Return a program that writes its own frames to its judge's socket, descriptor 3."""
    content = b"".join(struct.pack("!I", len(frame)) + frame for frame in frames)
    return f"import os, time\nos.write(3, {content!r})\ntime.sleep({pause_s})\ndef add(a, b):\n    return a + b\n"


def repeated(unit: st.SearchStrategy[str], least: int, most: int) -> st.SearchStrategy[str]:
    return st.builds(lambda text, count: text * count, unit, st.integers(least, most))


def soup(parts: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(parts), max_size=24).map("".join)


any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates included
digits = repeated(st.sampled_from("0123456789"), 20_000, 60_000)
nests = repeated(
    st.sampled_from(["(", "[", "{", "[(", "\\left(", "\\frac{", "{{", '{"a":', "[[", ")", "}", "x(", "f'{"]), 1, 20_000
)
programs = soup(PYTHON) | st.builds(
    frame_writer, st.lists(st.sampled_from(FRAMES), max_size=4), st.sampled_from([0.0, 0.5])
)
contents = (
    any_text | soup(LATEX) | soup(JSON) | soup(MARKS + LATEX) | digits | nests | st.sampled_from(BOMBS) | programs
)
hostile_texts = st.builds(
    lambda before, mark, content, after: before + mark + content + after,
    st.sampled_from(["", "", "so it is 7\n", "x" * 1000]),
    st.sampled_from(MARKS),
    contents,
    st.sampled_from(["", "", "}", "\n```\n", "$$", "\n#### 7", "\\]", "</tool>"]),
)

LONG = (10 if EXAMPLES else 2) * 2**20
LONGEST_TEXTS = {
    "digits": "#### " + "7" * LONG,
    "brackets": "#### " + "[" * LONG,
    "boxes": "\\boxed{" * (LONG // 7),
    "spaces": " " * LONG,
    "lines": "\n" * LONG,
    "words": "the answer is " * (LONG // 14),
    "quotes": '"' * LONG,
    "fences": "```python\n" * (LONG // 10),
    "marks": "####" * (LONG // 4),
    "halves": "\ud800" * LONG,
    "commas": "#### " + "1,000" * (LONG // 5),
}
