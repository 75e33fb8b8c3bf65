"""With checkpoint.keepBest, the checkpoint of the best validation stays beside the newest ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.coordinator.small_run import LengthGrader, Run, a_spec

from specrl.formats.best_version import find_best
from specrl.formats.reports import BestVersion, ValidationReport
from specrl.records import Prompt, Reward
from specrl.spec import RunSpec
from specrl.trainer.checkpointing.checkpoints import list_complete

PROBLEMS = 4  # of a validation


class BestAtVersion(LengthGrader):
    """Gives the answers of one validation the reward 1, and those of all others 0."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.validated = 0
        self.number = number

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        if prompt.position < 1000:
            return await super().grade(prompt, text)
        self.validated += 1
        return Reward(float((self.validated - 1) // PROBLEMS == self.number))


def a_best_spec(folder: Path, *, keep_best: bool) -> RunSpec:
    spec = a_spec(folder, maxPolicyLag=0)
    assert spec.validation is not None
    checkpoint = spec.checkpoint.model_copy(update={"keep": 1, "keep_best": keep_best})
    validation = spec.validation.model_copy(update={"every_steps": 2})
    return spec.model_copy(update={"checkpoint": checkpoint, "validation": validation})


@pytest.mark.parametrize(("keep_best", "left"), [(True, [2, 6]), (False, [6])])
async def test_the_checkpoint_of_the_best_validation_stays(tmp_path: Path, keep_best: bool, left: list[int]) -> None:
    """A policy that had collapsed at step 12 could not be continued from step 8, whose checkpoint was deleted."""
    # Version 2 is the second that is validated, after version 0.
    async with Run(tmp_path, a_best_spec(tmp_path, keep_best=keep_best), grader=BestAtVersion(1)) as run:
        await run.finish()
    assert [step for step, _ in list_complete(tmp_path)] == left
    summary = run.observer.build_status().summary
    assert summary is not None
    assert summary.best_version == (BestVersion(policy_version=2, reward=1.0) if keep_best else None)


async def test_the_best_checkpoint_is_known_after_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    async with Run(tmp_path, a_best_spec(tmp_path, keep_best=True), grader=BestAtVersion(1)) as run:
        await run.until(lambda: run.context.ledger.facts.checkpoints[-1] == 4)
        await run.restart_coordinator()
        await run.finish()
    assert [step for step, _ in list_complete(tmp_path)] == [2, 6]


def test_the_best_version_has_a_checkpoint_and_was_judged(tmp_path: Path) -> None:
    def validated(version: int, reward: float, failed: int = 0) -> ValidationReport:
        failures = {"timeout": failed} if failed else {}
        return ValidationReport(
            policy_version=version, reward=reward, problems=4, answers=4, seconds=1.0, failures=failures
        )

    reports = [validated(0, 0.9), validated(2, 0.5), validated(3, 0.9), validated(4, 0.5), validated(6, 0.8, failed=4)]
    spec = a_best_spec(tmp_path, keep_best=True)
    assert find_best(reports, spec) == BestVersion(policy_version=2, reward=0.5)
    assert find_best(reports, a_best_spec(tmp_path, keep_best=False)) is None
