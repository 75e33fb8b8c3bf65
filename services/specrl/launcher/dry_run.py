"""Checks a run as `specrl run` does, and finds out what it would do first. Starts no process of a run.

Preflight does the checks. Beyond it, this module renders the first prompt and has the verifier grade two completions
that are made from its reference. Called by `specrl run --dry-run`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from specrl.coordinator.rollouts.checked_prompts import CheckedPrompts, ProgressCallback
from specrl.errors import SpecProblem, collect_problems, raise_problems
from specrl.hub.fetching import FetchDisplay
from specrl.launcher.disk import check_disk
from specrl.launcher.launch import check_checkpoint, describe_start
from specrl.launcher.preflight import PreflightResult, check_run
from specrl.records import Prompt, Reward
from specrl.rewards.checks.references import ReferencePool
from specrl.rewards.choice import verifiers_for
from specrl.spec import RunSpec


@dataclass(frozen=True)
class GradedExample:
    """A completion that is made from a reference, and its verdict. made_from: how, in words."""

    made_from: str
    reward: Reward


@dataclass(frozen=True)
class RunPlan:
    """What a run would begin with. examples: completions made from the reference of `first_prompt`, graded."""

    spec: RunSpec
    ready: PreflightResult
    first_prompt: Prompt
    examples: tuple[GradedExample, ...]


def plan_run(
    spec: RunSpec, runs: Path, checkpoint: Path | None, progress: ProgressCallback, display: FetchDisplay
) -> RunPlan:
    """Check a run and find out what it would begin with. Raises SpecInvalid with every problem.

    What the run names on the hub is fetched. runs: where the run's folder would be made. checkpoint: of another run,
    which the run would start from.
    """
    problems = list[SpecProblem]()
    data: CheckedPrompts | None = None  # it stays None if preflight finds a problem
    with collect_problems(problems):
        ready = check_run(spec, None, progress, display=display)
        data = ready.data
        if ready.disk_need is not None:
            check_disk(ready.disk_need, runs)
    step = 0
    if checkpoint is not None:
        with collect_problems(problems):
            step = check_checkpoint(checkpoint, spec, data)
    raise_problems(problems)
    assert data is not None  # preflight has found no problem
    if checkpoint is not None:
        ready.notices += (describe_start(checkpoint, step),)
    first = data.stream.prompt(0)
    return RunPlan(ready.spec, ready, first, asyncio.run(_grade_examples(ready.spec, first)))


async def _grade_examples(spec: RunSpec, prompt: Prompt) -> tuple[GradedExample, ...]:
    """Grade completions that are made from the prompt's reference."""
    completions = {
        "the reference itself": prompt.answer,
        # Most templates ask for the answer behind this mark.
        "#### and the reference": f"#### {prompt.answer}",
    }
    # The pool's processes are spawned, so no fork server stays behind. One is enough for two completions.
    pool = ReferencePool(verifiers_for(spec.rewards), spec.reward_pool.model_copy(update={"workers": 1}))
    try:
        await pool.start()
        rewards = [await pool.grade(prompt, text) for text in completions.values()]
    finally:
        await pool.close()
    return tuple(GradedExample(made_from, reward) for made_from, reward in zip(completions, rewards, strict=True))
