"""The verifier, tried on made-up completions before anything starts.

Called by `coordinator/checked_prompts.py`. A function of the user's can be wrong in every verdict: it raises, returns a
list, or has another library's signature. Such a run would train on zeros, and say so hours later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from specrl.errors import Problem, SpecInvalid, VerifierFailed
from specrl.records import Prompt, Reward
from specrl.rewards.pool import VerifierPool
from specrl.rewards.workers import FailureKind
from specrl.spec.data import Rewards

TRIED = 4
"""Prompts. The first may lack what others have."""
_SHOWN = 3
"""Failures that are told to the user."""


async def try_verifier(pool: VerifierPool, rewards: Rewards, prompts: Iterable[Prompt]) -> list[str]:
    """Have made-up completions of some prompts graded: no text, a short one, and the reference itself.

    Returns what a user should know of those that failed. Raises SpecInvalid when all of them did; VerifierFailed when
    none of them could be graded for a reason that no answer can cause, as a judge that is away.
    """
    failures, tried, are_graded = list[str](), 0, False
    for prompt in prompts:
        made_up = {"an empty text": "", "a short text": "The answer is 7.", "the reference itself": prompt.answer}
        verdicts = await asyncio.gather(*(pool.grade(prompt, text) for text in made_up.values()))
        tried += len(verdicts)
        are_graded |= any(verdict.value is not None for verdict in verdicts)
        failures += [
            f"{fault} for {what} as the answer to {prompt.prompt_id}"
            for what, verdict in zip(made_up, verdicts, strict=True)
            if (fault := _fault(verdict))
        ]
        if len(failures) == tried and pool.failures[FailureKind.TIMEOUT]:
            break  # each of the next would take as long
    if failures and len(failures) == tried:
        raise _refusal(rewards, failures[0], tried, are_graded)
    shown = [f"the verifier failed in a trial before the run: {failure}" for failure in failures[:_SHOWN]]
    if len(failures) > _SHOWN:
        shown.append(f"the verifier failed for {len(failures)} of {tried} made-up completions in all")
    return shown


def _fault(verdict: Reward) -> str:
    if verdict.value is None:
        return verdict.failure
    return verdict.reason if verdict.error else ""


def _refusal(rewards: Rewards, first: str, tried: int, are_graded: bool) -> SpecInvalid | VerifierFailed:
    rule = f"must grade made-up completions before the run, got errors for all {tried}, the first: {first}"
    if not are_graded:
        return VerifierFailed(f"the verifier {rule}; start what it needs")
    if rewards.python is None:
        return SpecInvalid((Problem("rewards", rule, "use another verifier, or correct the references"),))
    called = "it is called as grade(reference: str, completion: str) -> float, once for each completion"
    return SpecInvalid((Problem("rewards.python.function", rule, f"correct it: {called} (docs/rewards.md)"),))
