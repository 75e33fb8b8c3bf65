"""Verifier `exact`: compares the final answer with the reference's as text. Called by `pool.VerifierPool`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrl.errors import VerifierFailed
from specrl.rewards.text.final_answer import find_marked_answer, normalise_answer
from specrl.rewards.verifier import NO_ANSWER, Verdict, Verifier


@dataclass(frozen=True)
class Exact(Verifier):
    """Gives 1 if the texts are equal after white space, currency signs, thousands separators and a final full stop are
    removed, else 0.

    The reference may be a worked solution that ends in `#### 18`, as in GSM8K, or the bare answer.
    """

    answer_after: str

    def check_reference(self, reference: str) -> None:
        _read_reference_answer(reference, self.answer_after)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        expected = _read_reference_answer(reference, self.answer_after)
        given = find_marked_answer(completion, self.answer_after)
        if given is None:
            return NO_ANSWER
        answer = normalise_answer(given)
        if answer != expected:
            return Verdict(0.0, answer, "the answer differs from the reference")
        return Verdict(1.0, answer, "the answer equals the reference")


def _read_reference_answer(reference: str, mark: str) -> str:
    marked = find_marked_answer(reference, mark)
    answer = normalise_answer(marked if marked is not None else reference)
    if not answer:
        raise VerifierFailed(f"the reference must have a final answer, got {reference[-80:]!r}; correct the data set")
    return answer
