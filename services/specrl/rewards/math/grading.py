"""One completion against one reference: find, read, compare. Called by `verifier.Math`, in the pool's workers.

    completion -> find_answer -> read_answer -> is_same <- read_answer <- find_reference <- reference

Loading this module loads SymPy, which takes seconds; `verifier.py` loads it where it is first needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from specrl.errors import VerifierFailed
from specrl.rewards.math.comparison import is_same
from specrl.rewards.math.extraction import find_answer, find_reference
from specrl.rewards.math.reading import letters_of, read_answer
from specrl.rewards.math.values import Unreadable, Value
from specrl.rewards.verifier import NO_ANSWER, Verdict


@dataclass(frozen=True)
class Reference:
    """A reference that has been read; names are its variables."""

    text: str
    value: Value
    names: frozenset[str]


@lru_cache(maxsize=1024)  # the rollouts of a group share their reference, and so do epochs of a small data set
def read_reference(reference: str, mark: str) -> Reference:
    """Read a reference without an answer. Raises VerifierFailed when it is not one value that equals itself."""
    text = find_reference(reference, mark)
    try:
        value = read_answer(text)
        is_sound = is_same(value, value)
    except Unreadable as error:
        raise _refused(text, str(error)) from error
    except Exception as error:  # SymPy raises whatever its parts raise
        raise _refused(text, type(error).__name__) from error
    if not is_sound:
        raise _refused(text, "a value that does not equal itself")
    return Reference(text, value, letters_of(value))


def check_reference(reference: str, mark: str) -> None:
    """Raise VerifierFailed unless the reference can be read, and an answer of the same text would be right."""
    text = read_reference(reference, mark).text
    if grade(reference, f"{mark} {text}", mark).reward != 1:
        raise _refused(text, "an answer of the same text would be wrong")


def grade(reference: str, completion: str, mark: str) -> Verdict:
    """The verdict on a completion. Raises VerifierFailed when the reference is at fault."""
    expected = read_reference(reference, mark)
    found = find_answer(completion, mark)
    if found is None:
        return NO_ANSWER
    try:
        is_right = is_same(expected.value, read_answer(found, expected.names))
    except Unreadable as error:
        return Verdict(0.0, None, f"no answer understood: {error}")
    return Verdict(float(is_right), found, "equal to the reference" if is_right else "not equal to the reference")


def _refused(text: str, reason: str) -> VerifierFailed:
    return VerifierFailed(
        f"the reference must be one mathematical value, got {text[-80:]!r} ({reason}); "
        "correct the data set, or use the verifier `exact`"
    )
