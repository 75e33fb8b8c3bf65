"""Verdicts from processes that may hang or die: stage 3 of the loop, awaited for every finished rollout.

Invariant: an answer cannot choose whether it is graded. What its worker raises for it is a verdict of 0 (`judging.py`);
so is the end of its worker, and that of its time, once the worker reads the reference alone:

    judge --crash--> judge, in a fresh worker --crash, timeout--> read the reference alone --reads--> 0
          --timeout-------------------------------------------->                           --fails--> ungraded

A worker that somebody else killed answers at the second try. How a process may end, and what bounds each wait:
`workers.py`.
"""

from __future__ import annotations

from specrl.errors import VerifierFailed
from specrl.records import Prompt, Reward
from specrl.rewards.judging import judge, read_reference
from specrl.rewards.verifier import Verdict, Verifier
from specrl.rewards.workers import Answer, FailureKind, WorkerPool
from specrl.spec.data import RewardPool

_SHOWN = 1000
"""Letters of an extracted answer, which may be a value of 10 MB, and of a reason that travel with a rollout."""


class VerifierPool(WorkerPool):
    """Verifier processes."""

    def __init__(self, verifier: Verifier, limits: RewardPool) -> None:
        super().__init__(verifier, limits, "verifier", VerifierFailed)
        self._verifier = verifier
        self.graded = 0
        """Verdicts given."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        """The verdict on one completion, or an ungraded Reward with the reason, which no answer can cause.

        Raises VerifierFailed only when the pool is closed or cannot be started again: then no rollout can be graded.
        """
        row = {**prompt.row, "prompt": prompt.text}
        answer = await self._ask(judge, self._verifier, prompt.answer, text, row)
        if answer.failed is FailureKind.CRASH:
            answer = await self._ask(judge, self._verifier, prompt.answer, text, row)
        if answer.failed in (FailureKind.CRASH, FailureKind.TIMEOUT):
            alone = await self._ask(read_reference, self._verifier, prompt.answer)
            if not alone.failure:
                answer = Answer(Verdict(0.0, reason=answer.failure, error=answer.failed.value))
        if answer.failure:
            return Reward(None, answer.failure)
        verdict = answer.value
        assert isinstance(verdict, Verdict), "what every verifier returns"
        self.graded += 1
        return Reward(
            verdict.reward,
            extracted=_shown(verdict.extracted or ""),
            reason=_shown(verdict.reason),
            lacks_answer=self._verifier.extracts and verdict.extracted is None and not verdict.error,
            error=verdict.error,
        )


def _shown(text: str) -> str:
    """Its beginning, without halves of surrogate pairs, which no message can carry."""
    return text[:_SHOWN].encode(errors="replace").decode()
