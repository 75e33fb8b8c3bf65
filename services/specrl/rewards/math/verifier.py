"""Verifier `math`: gives 1 if a completion's answer equals the reference, else 0. Called by `pool.VerifierPool`.

The methods import `grading` late: it loads SymPy, which takes seconds, and only workers need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrl.rewards.verifier import Verdict, Verifier


@dataclass(frozen=True)
class Math(Verifier):
    """Compares mathematical values by the conventions of docs/rewards.md.

    answer_after: the mark that precedes the final answer; "" if there is none.
    """

    answer_after: str

    @property
    def preloads(self) -> tuple[str, ...]:
        return ("specrl.rewards.math.grading",)

    def prepare_worker(self) -> None:
        self.check_reference("1")  # the parser initializes itself on first use, which takes 0.1 s

    def check_reference(self, reference: str) -> None:
        from specrl.rewards.math import grading

        grading.check_math_reference(reference, self.answer_after)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        from specrl.rewards.math import grading

        return grading.grade_answer(reference, completion, self.answer_after)
