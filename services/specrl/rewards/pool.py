"""Verdicts from processes that may hang or die: stage 3 of the loop, awaited for every finished rollout.

Invariant: a verdict is the verifier's own; whatever else happens, the rollout is ungraded with the reason, never 0.
How a verifier's process may end, and what bounds each wait: `workers.py`.
"""

from __future__ import annotations

import numpy as np

from specrl.errors import VerifierFailed
from specrl.records import Prompt, Reward
from specrl.rewards.verifier import Verdict, Verifier
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
        answer = await self._ask(self._verifier.grade, prompt.answer, text, prompt.row)
        if answer.failure:
            return Reward(None, answer.failure)
        verdict = answer.value
        assert isinstance(verdict, Verdict), "what every verifier returns"
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(np.float32(verdict.reward))
        if not is_finite:
            rule = f"the verifier must return a finite number (in float32), got {verdict.reward}"
            return Reward(None, self._failed(FailureKind.ERROR, rule).failure)
        self.graded += 1
        return Reward(verdict.reward, extracted=verdict.extracted or "", reason=verdict.reason)
