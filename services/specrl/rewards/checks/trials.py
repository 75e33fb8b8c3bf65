"""Try the verifiers on made-up completions before anything starts.

Called by `coordinator/rollouts/checked_prompts.py`. A user's function may fail on every completion: it raises, returns
a list, or has another library's signature. Such a run would train on zeros, and the user would notice hours later. So
would a user whose function gives every completion the same reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

from specrl.errors import SpecInvalid, SpecProblem, VerifierFailed, raise_problems
from specrl.records import Prompt, Reward
from specrl.rewards.custom import Custom
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifier_set import WeightedVerifier
from specrl.rewards.workers import FailureKind

TRIAL_PROMPTS = 4
"""Prompts whose completions are tried. More than one, since the first record may lack a column that others have."""

_SHOWN = 3
"""Most failures that are shown to the user."""


async def try_verifiers(pool: VerifierPool, prompts: Sequence[Prompt]) -> list[str]:
    """Grade made-up completions with every verifier: an empty text, a short text, and the reference in two forms.

    prompts: each verifier is tried on the first of them that it applies to. Returns warnings for the user about
    completions that failed, and about verifiers that tell no completions apart. Raises SpecInvalid with every verifier
    that failed on all. Raises VerifierFailed if one could grade none, for a reason that no answer can cause, such as an
    unreachable judge.
    """
    warnings = list[str]()
    problems = list[SpecProblem]()
    for term in pool.verifiers.terms:
        chosen = list(islice((it for it in prompts if term.applies_to(it.source, it.row)), TRIAL_PROMPTS))
        if not chosen:
            warnings.append(f"the reward {term.name} applies to none of the first {len(prompts)} prompts")
            continue
        try:
            warnings += await _try_verifier(pool, term, chosen)
        except SpecInvalid as error:
            problems += error.problems
    raise_problems(problems)
    return warnings


async def _try_verifier(pool: VerifierPool, term: WeightedVerifier, prompts: Sequence[Prompt]) -> list[str]:
    """Try one verifier, as `try_verifiers` says."""
    failures = list[str]()
    tried = 0
    are_graded = False
    rewards = list[set[float]]()  # of each prompt
    for prompt in prompts:
        made_up = {
            "an empty text": "",
            "a short text": "The answer is 7.",
            "the reference itself": prompt.answer,
            # Functions often look for this mark, and read the record's columns only where they find it.
            "#### and the reference": f"It is known.\n#### {prompt.answer}",
        }
        verdicts = await asyncio.gather(*(pool.grade_with(term.verifier, prompt, text) for text in made_up.values()))
        tried += len(verdicts)
        rewards.append({verdict.value for verdict in verdicts if verdict.value is not None})
        are_graded |= any(verdict.value is not None for verdict in verdicts)
        failures += [
            f"{fault} for {what} as the answer to {prompt.prompt_id}"
            for what, verdict in zip(made_up, verdicts, strict=True)
            if (fault := _describe_fault(verdict))
        ]
        if len(failures) == tried and pool.failures[FailureKind.TIMEOUT]:
            break  # all of them failed, one by timeout: further prompts would wait for the timeout again
    if failures and len(failures) == tried:
        raise _build_refusal(term, failures[0], tried, are_graded)
    verifier = _name_verifier(term)
    if not failures and (notice := _describe_constant(term, rewards)):
        return [f"{verifier} {notice}"]
    shown = [f"{verifier} failed in a trial before the run: {failure}" for failure in failures[:_SHOWN]]
    if len(failures) > _SHOWN:
        shown.append(f"{verifier} failed for {len(failures)} of {tried} made-up completions in all")
    return shown


def _name_verifier(term: WeightedVerifier) -> str:
    return f"the verifier of the reward {term.name}" if term.name else "the verifier"


def _describe_constant(term: WeightedVerifier, rewards: Sequence[set[float]]) -> str:
    """Say that the completions of each prompt have equal rewards; "" if they differ, or need not.

    rewards: of each prompt, the different rewards of its made-up completions.
    """
    if any(len(values) > 1 for values in rewards):
        return ""
    given = sorted(set[float]().union(*rewards))
    if given == [0] and not isinstance(term.verifier, Custom):  # it grades a form that no made-up completion has
        return ""
    shown = f"{given[0]:g}" if len(given) == 1 else f"{given[0]:g} to {given[-1]:g}, depending on the prompt alone"
    return (
        f"gave an empty text, a short text and the reference the same reward: {shown}; a group whose rewards are all "
        "equal teaches nothing, so correct the verifier unless it looks for another form of answer"
    )


def _describe_fault(verdict: Reward) -> str:
    if verdict.value is None:
        return verdict.failure
    return verdict.reason if verdict.error else ""


def _build_refusal(term: WeightedVerifier, first: str, tried: int, are_graded: bool) -> SpecInvalid | VerifierFailed:
    rule = f"must grade made-up completions before the run, got errors for all {tried}, the first: {first}"
    if not are_graded:
        return VerifierFailed(f"{_name_verifier(term)} {rule}; start what it needs")
    if not isinstance(term.verifier, Custom):
        return SpecInvalid((SpecProblem(term.path, rule, "use another verifier, or correct the references"),))
    called = "it is called as grade(reference: str, completion: str) -> float, once per completion"
    return SpecInvalid((SpecProblem(f"{term.path}.python.function", rule, f"correct it: {called} (docs/rewards.md)"),))
