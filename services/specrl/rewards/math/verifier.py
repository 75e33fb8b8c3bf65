"""Verifier `math`: 1 for a completion whose answer is the reference's value, else 0. Called by `pool.VerifierPool`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specrl.rewards.verifier import Verdict, Verifier


@dataclass(frozen=True)
class Math(Verifier):
    """Equality of mathematical values; the conventions are those of docs/rewards.md."""

    preloads: ClassVar[tuple[str, ...]] = ("specrl.rewards.math.grading",)
    answer_after: str

    def ready(self) -> None:
        self.check_reference("1")  # the parser's first use takes a tenth of a second

    def check_reference(self, reference: str) -> None:
        from specrl.rewards.math import grading

        grading.check_reference(reference, self.answer_after)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        from specrl.rewards.math import grading

        return grading.grade(reference, completion, self.answer_after)
