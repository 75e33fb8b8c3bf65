"""Grade one completion against one reference: find the answer, read it, compare. Called by `verifier.Math`.

    completion -> find_answer -> read_answer -> is_equal_value <- read_answer <- find_reference <- reference

Importing this module imports SymPy, which takes seconds, so `verifier.py` imports it late.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from specrl.errors import VerifierFailed
from specrl.rewards.math.comparison import is_equal_value
from specrl.rewards.math.extraction import find_answer, find_reference
from specrl.rewards.math.reading import collect_letters, read_answer
from specrl.rewards.math.values import Unreadable, Value
from specrl.rewards.verifier import NO_ANSWER, Verdict


@dataclass(frozen=True)
class ParsedReference:
    """A parsed reference.

    text: the answer in the reference. names: the letters that are variables in it.
    """

    text: str
    value: Value
    names: frozenset[str]


@lru_cache(maxsize=1024)  # the rollouts of a group share their reference, and so do epochs of a small data set
def parse_reference(reference: str, mark: str) -> ParsedReference:
    """Parse a reference without an answer. Raises VerifierFailed if it is not one value, or does not equal itself."""
    text = find_reference(reference, mark)
    try:
        value = read_answer(text)
        is_sound = is_equal_value(value, value)
    except Unreadable as error:
        raise _reference_error(text, str(error)) from error
    except Exception as error:  # SymPy documents no common base class of its errors
        raise _reference_error(text, type(error).__name__) from error
    if not is_sound:
        raise _reference_error(text, "a value that does not equal itself")
    return ParsedReference(text, value, collect_letters(value))


def check_math_reference(reference: str, mark: str) -> None:
    """Raise VerifierFailed unless the reference can be parsed and an answer of the same text would get reward 1."""
    text = parse_reference(reference, mark).text
    if grade_answer(reference, f"{mark} {text}", mark).reward != 1:
        raise _reference_error(text, "an answer of the same text would be wrong")


def grade_answer(reference: str, completion: str, mark: str) -> Verdict:
    """Grade a completion. Raises VerifierFailed if the reference is at fault."""
    expected = parse_reference(reference, mark)
    found = find_answer(completion, mark)
    if found is None:
        return NO_ANSWER
    try:
        is_right = is_equal_value(expected.value, read_answer(found, expected.names))
    except Unreadable as error:
        return Verdict(0.0, None, f"no answer understood: {error}")
    return Verdict(float(is_right), found, "equal to the reference" if is_right else "not equal to the reference")


def _reference_error(text: str, reason: str) -> VerifierFailed:
    return VerifierFailed(
        f"the reference must be one mathematical value, got {text[-80:]!r} ({reason}); "
        "correct the data set, or use the verifier `exact`"
    )
