"""Verdicts from processes that may hang or die: stage 3 of the loop, awaited for every finished rollout.

Invariant: a verdict is the verifier's own; whatever else happens, the rollout is ungraded with the reason, never 0.
How a verifier's process may end, and what bounds each wait: `workers.py`.
"""

from __future__ import annotations

import math

from specrl.errors import VerifierFailed
from specrl.records import Prompt, Reward
from specrl.rewards.verifiers import Verifier
from specrl.rewards.workers import FailureKind, WorkerPool
from specrl.spec.data import RewardPool


class VerifierPool(WorkerPool):
    """Verifier processes."""

    def __init__(self, verifier: Verifier, limits: RewardPool) -> None:
        super().__init__(verifier, limits, "verifier", VerifierFailed)
        self._verifier = verifier
        self.graded = 0
        """Verdicts given."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        """The verdict on one completion, or an ungraded Reward with the reason.

        Raises VerifierFailed only when the pool is closed or cannot be started again: then no rollout can be graded.
        """
        answer = await self._ask(self._verifier.reward, prompt.answer, text)
        if not answer.failure and not (isinstance(answer.value, float) and math.isfinite(answer.value)):
            got = answer.value if isinstance(answer.value, float) else type(answer.value).__name__
            answer = self._failed(FailureKind.ERROR, f"the verifier must answer a finite number, got {got}")
        if answer.failure:
            return Reward(None, answer.failure)
        assert isinstance(answer.value, float)
        self.graded += 1
        return Reward(answer.value)
