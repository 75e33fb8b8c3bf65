"""What a verifier is, and the two that compare: 1 for a completion whose final answer is the reference's, else 0.

Stage 3 of the loop. `pool.VerifierPool` calls them, in processes that it can kill. Invariant: a completion that
cannot be read is wrong (0); a reference that cannot be read, or a library that fails on two readable answers, is
VerifierFailed and never 0. Time and memory are bounded by the pool, not here.

Reference and completion go through the same reading, so a reference may be a worked solution that ends in
`#### 18`, as in GSM8K, or the bare answer. A completion without the mark has no final answer for `exact`; `math`
then reads its last boxed expression or number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from specrl.errors import VerifierFailed

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:/\d+(?:\.\d+)?)?%?|(?<!\w)[-+]?\.\d+%?"
)
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)/(\d+)")
_TWO_NUMBERS = re.compile(r"\d\s+[-+]?[.\d]")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}")
_CURRENCY = re.compile(r"^([-+]?)\s*\\?[$€£]\s*(?=[-+.\d])")
_CURRENCY_AFTER = re.compile(r"(?<=\d)\s*\\?[$€£]$")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


class Verifier(Protocol):
    """A verdict on one completion. Instances pickle: they run in other processes."""

    preloads: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to load; the pool loads them once for all of its workers."""

    def ready(self) -> None:
        """Once in a worker before the first verdict: raise SpecInvalid when there can be none on this machine."""
        return

    def check_reference(self, reference: str) -> None:
        """Raise VerifierFailed when no completion could be compared with this reference. Cheap."""
        return

    def reward(self, reference: str, completion: str) -> float:
        """1.0 or 0.0. Raises VerifierFailed when there can be no verdict."""
        raise NotImplementedError


@dataclass(frozen=True)
class Exact(Verifier):
    """Equality of text, once white space, currency signs, thousands separators and a closing full stop are gone."""

    answer_after: str

    def check_reference(self, reference: str) -> None:
        _reference_answer(reference, self.answer_after)

    def reward(self, reference: str, completion: str) -> float:
        expected = _reference_answer(reference, self.answer_after)
        given = marked_answer(completion, self.answer_after)
        return float(given is not None and normalise(given) == expected)


@dataclass(frozen=True)
class Math(Verifier):
    """Equality of mathematical expressions by math-verify: 0.5 is 1/2 is \\frac{1}{2} is 50%."""

    preloads: ClassVar[tuple[str, ...]] = ("math_verify",)
    answer_after: str

    def ready(self) -> None:
        _parse("1")  # loads SymPy and the parser, so that the first verdict is as fast as the others

    def check_reference(self, reference: str) -> None:
        _reference_expression(reference, self.answer_after)

    def reward(self, reference: str, completion: str) -> float:
        gold = _parsed_reference(reference, self.answer_after)
        given = marked_answer(completion, self.answer_after)
        expression = math_expression(given if given is not None else unmarked_answer(completion))
        parsed = _parse(expression)
        if not parsed:
            return 0.0
        return float(_verify(list(gold), parsed))


def marked_answer(text: str, mark: str) -> str | None:
    """The first line after the last `mark`; None without one. An empty mark stands before the whole text."""
    if not mark:
        return text.strip()
    _, found, after = text.rpartition(mark)
    if not found:
        return None
    lines = after.strip().splitlines()
    return lines[0].strip() if lines else ""


def unmarked_answer(text: str) -> str:
    """The last boxed expression, else the last number, else nothing."""
    start = text.rfind(r"\boxed{")
    if start >= 0:
        return _braced(text, start + len(r"\boxed"))
    numbers = [match.group() for match in _NUMBER.finditer(text)]
    return numbers[-1] if numbers else ""


def normalise(answer: str) -> str:
    """The form in which answers are compared as text: `$1,000.` is `1000`, ` New  York ` is `New York`."""
    text = " ".join(answer.split()).rstrip(".").rstrip()
    for opening, closing in _DELIMITERS:
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
            break
    text = _CURRENCY_AFTER.sub("", _CURRENCY.sub(r"\1", text)).rstrip(".").rstrip()
    return _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)


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


def _reference_answer(reference: str, mark: str) -> str:
    marked = marked_answer(reference, mark)
    answer = normalise(marked if marked is not None else reference)
    if not answer:
        raise VerifierFailed(f"the reference must have a final answer, got {reference[-80:]!r}; correct the data set")
    return answer


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
