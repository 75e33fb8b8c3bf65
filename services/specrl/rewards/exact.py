"""Verifier `exact`: the final answer is the reference's, compared as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrl.errors import VerifierFailed
from specrl.rewards.final_answer import marked_answer, normalise
from specrl.rewards.verifier import NO_ANSWER, Verdict, Verifier


@dataclass(frozen=True)
class Exact(Verifier):
    """Equality of text, once white space, currency signs, thousands separators and a closing full stop are gone.

    The reference may be a worked solution that ends in `#### 18`, as in GSM8K, or the bare answer.
    """

    answer_after: str

    def check_reference(self, reference: str) -> None:
        _reference_answer(reference, self.answer_after)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        expected = _reference_answer(reference, self.answer_after)
        given = marked_answer(completion, self.answer_after)
        if given is None:
            return NO_ANSWER
        answer = normalise(given)
        if answer != expected:
            return Verdict(0.0, answer, "the answer differs from the reference")
        return Verdict(1.0, answer, "the answer equals the reference")


def _reference_answer(reference: str, mark: str) -> str:
    marked = marked_answer(reference, mark)
    answer = normalise(marked if marked is not None else reference)
    if not answer:
        raise VerifierFailed(f"the reference must have a final answer, got {reference[-80:]!r}; correct the data set")
    return answer
