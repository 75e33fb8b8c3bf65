"""Verifier `math`: equality of mathematical expressions by math-verify."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from specrl.errors import VerifierFailed
from specrl.rewards.final_answer import marked_answer, normalise
from specrl.rewards.verifier import NO_ANSWER, Verdict, Verifier

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:/\d+(?:\.\d+)?)?%?|(?<!\w)[-+]?\.\d+%?"
)
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)/(\d+)")
_TWO_NUMBERS = re.compile(r"\d\s+[-+]?[.\d]")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}")


@dataclass(frozen=True)
class Math(Verifier):
    """Equality of mathematical expressions by math-verify: 0.5 is 1/2 is \\frac{1}{2} is 50%."""

    preloads: ClassVar[tuple[str, ...]] = ("math_verify",)
    answer_after: str

    def ready(self) -> None:
        _parse("1")  # loads SymPy and the parser, so that the first verdict is as fast as the others

    def check_reference(self, reference: str) -> None:
        _reference_expression(reference, self.answer_after)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        gold = _parsed_reference(reference, self.answer_after)
        given = marked_answer(completion, self.answer_after)
        expression = math_expression(given if given is not None else unmarked_answer(completion))
        parsed = _parse(expression)
        if not parsed:
            return NO_ANSWER
        is_equal = _verify(list(gold), parsed)
        reason = "equal to the reference" if is_equal else "not equal to the reference"
        return Verdict(float(is_equal), expression, reason)


def unmarked_answer(text: str) -> str:
    """The last boxed expression, else the last number, else nothing."""
    start = text.rfind(r"\boxed{")
    if start >= 0:
        return _braced(text, start + len(r"\boxed"))
    numbers = [match.group() for match in _NUMBER.finditer(text)]
    return numbers[-1] if numbers else ""


def math_expression(answer: str) -> str:
    """LaTeX of one mathematical answer; empty when there is none, or more than one.

    math-verify adds up `17 18`, drops the fraction of `3 1/2` and multiplies the letters of a word: what it would
    read wrongly is written out or refused here.
    """
    text = normalise(answer)
    if text.startswith(r"\boxed{"):
        text = normalise(_braced(text, len(r"\boxed")))
    text = _MIXED.sub(r"\1\2\\frac{\3}{\4}", text)
    if "$" in text or "\n" in text:
        return ""
    if _WORD.search(_TEXT.sub("", text)):  # units, as in `18 dollars`; words alone are no mathematics
        numbers = [match.group() for match in _NUMBER.finditer(text)]
        text = numbers[0].replace(",", "") if len(numbers) == 1 else ""
    return "" if _TWO_NUMBERS.search(text) else text


def _braced(text: str, start: int) -> str:
    """What stands between the brace at `start` and the one that closes it; nothing if none does."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + 1 : index]
    return ""


def _reference_expression(reference: str, mark: str) -> str:
    marked = marked_answer(reference, mark)
    expression = math_expression(marked if marked is not None else reference)
    if not expression and marked is None:
        expression = math_expression(unmarked_answer(reference))
    if not expression:
        raise VerifierFailed(
            f"the reference must end in a mathematical answer, got {reference[-80:]!r}; "
            "correct the data set, or use the verifier `exact`"
        )
    return expression


@lru_cache(maxsize=1024)  # the rollouts of a group share their reference, and so do epochs of a small data set
def _parsed_reference(reference: str, mark: str) -> tuple[Any, ...]:
    expression = _reference_expression(reference, mark)
    parsed = _parse(expression)
    if not parsed:
        raise VerifierFailed(
            f"the reference must be mathematics that math-verify can read, got {expression[:80]!r}; "
            "correct the data set, or use the verifier `exact`"
        )
    return tuple(parsed)


def _parse(expression: str) -> list[Any]:
    """SymPy expressions of one LaTeX expression; [] when it cannot be read."""
    if not expression:
        return []
    from math_verify import LatexExtractionConfig, parse

    # The library's own time limit is an alarm signal, which a native loop does not see; the pool kills instead.
    parsed: list[Any] = parse(
        f"${expression}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    return parsed


def _verify(gold: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    try:
        return bool(verify(gold, given, timeout_seconds=None, raise_on_error=True))
    except Exception as error:  # SymPy raises whatever its parts raise
        raise VerifierFailed(
            f"math-verify must compare two answers that it has read, got {type(error).__name__}; it is ungraded"
        ) from error
