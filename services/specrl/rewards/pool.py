"""Grade completions in worker processes that may hang or crash. The coordinator awaits `grade` for every rollout.

Invariant: an answer cannot avoid its grade. An exception that it causes gives reward 0 (`judging.py`). A crash or a
timeout gives reward 0 as well, unless the reference alone already fails:

    judge --crash--> judge, in a fresh worker --crash, timeout--> read the reference alone --reads--> 0
          --timeout-------------------------------------------->                           --fails--> ungraded

The second try covers workers that were killed from outside, for example by the kernel's OOM killer. `workers.py` lists
how a process may end and what bounds each wait.
"""

from __future__ import annotations

import asyncio

from specrl.errors import VerifierFailed
from specrl.records import Prompt, Reward
from specrl.rewards.judging import judge_completion, read_reference_alone
from specrl.rewards.verifier import Verdict, Verifier
from specrl.rewards.verifier_set import VerifierSet, WeightedVerifier, add_rewards
from specrl.rewards.workers import FailureKind, WorkerAnswer, WorkerPool
from specrl.spec.data import WorkerLimits

_SHOWN = 1000
"""Characters of the extracted answer and of the reason that are kept with a rollout. An answer may have 10 MB."""


class VerifierPool(WorkerPool[VerifierSet]):
    """Worker processes that run the verifiers of a run."""

    noun = "verifier"
    error = VerifierFailed

    def __init__(self, verifiers: VerifierSet | Verifier, limits: WorkerLimits) -> None:
        """verifiers: a single verifier is the only one of a run."""
        if not isinstance(verifiers, VerifierSet):
            verifiers = VerifierSet((WeightedVerifier(verifiers),))
        super().__init__(verifiers, limits)

    @property
    def verifiers(self) -> VerifierSet:
        """The verifiers that grade."""
        return self._work

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        """Grade one completion with all verifiers that apply to its prompt.

        Returns an ungraded Reward with the reason if no verdict was possible for a reason that no answer can cause.
        Raises VerifierFailed if the pool is closed or cannot be restarted; no rollout can be graded then.
        """
        if not self._work.is_sum:
            return await self.grade_with(self._work.terms[0].verifier, prompt, text)
        if fault := self._work.find_fault(prompt.source, prompt.row):  # the check before the run refuses such records
            return Reward(None, fault)
        terms = self._work.select_terms(prompt.source, prompt.row)
        # A question each, so that a verifier that crashes or times out costs its own reward alone.
        rewards = await asyncio.gather(*(self.grade_with(term.verifier, prompt, text) for term in terms))
        return add_rewards(terms, rewards)

    async def grade_with(self, verifier: Verifier, prompt: Prompt, text: str) -> Reward:
        """Grade one completion with one verifier. Returns and raises what `grade` does."""
        row = {**prompt.row, "prompt": prompt.text}
        answer = await self._ask_worker(judge_completion, verifier, prompt.answer, text, row)
        if answer.failure_kind is FailureKind.CRASH:  # the worker may have been killed from outside: try a fresh one
            answer = await self._ask_worker(judge_completion, verifier, prompt.answer, text, row)
        if answer.failure_kind in (FailureKind.CRASH, FailureKind.TIMEOUT):
            # If the reference alone can be read, the answer caused the failure and gets 0.
            alone = await self._ask_worker(read_reference_alone, verifier, prompt.answer)
            if not alone.failure:
                answer = WorkerAnswer(Verdict(0.0, reason=answer.failure, error=answer.failure_kind.value))
        if answer.failure:
            return Reward(None, answer.failure)
        verdict = answer.value
        assert isinstance(verdict, Verdict), "what every verifier returns"
        return Reward(
            verdict.reward,
            extracted=_shorten_text(verdict.extracted or ""),
            reason=_shorten_text(verdict.reason),
            lacks_answer=verifier.extracts and verdict.extracted is None and not verdict.error,
            error=verdict.error,
        )


def _shorten_text(text: str) -> str:
    """Cut the text to `_SHOWN` characters, and replace lone surrogates, which UTF-8 cannot encode."""
    return text[:_SHOWN].encode(errors="replace").decode()
