"""What a policy earns does not depend on what its wrong answers do to the verifier; and every step says how it judged.

A whole run with the stand-in engine and the real pool of verifiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from tests.integration.coordinator.small_run import LengthGrader, Run, a_spec

from specrl.coordinator.parts import Grader
from specrl.coordinator.report import StepReport
from specrl.records import Prompt, Reward
from specrl.rewards import VerifierPool, verifier_for
from specrl.spec.data import PythonVerifier, RewardPool, Rewards

MODULE = """
import os
import sys

def is_right(completion):
    return len(completion.split()) % 2 == 1

def honest(reference, completion):
    return 1.0 if is_right(completion) else 0.0

def escaping(reference, completion):
    if is_right(completion):
        return 1.0
    way = len(completion.split()) // 2 % 6
    if way == 0:
        raise KeyError(completion)
    if way == 1:
        sys.exit()
    if way == 2:
        return escaping(reference, completion)
    if way == 3:
        return [1.0]
    if way == 4:
        return 1e39
    bytearray(2**50)
"""
ERRORS = {
    "KeyError at my_rewards.py:16",
    "SystemExit at my_rewards.py:18",
    "RecursionError at my_rewards.py:",
    "ReturnedList at my_rewards:escaping",
    "ReturnedInfinity at my_rewards:escaping",
    "crash",
}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(MODULE)
    for name in ("honest", "escaping", "mixed"):
        (tmp_path / name).mkdir()
    return tmp_path


async def small_run(folder: Path, grader: Grader, lag: int = 0) -> Run:
    """A run to its end."""
    spec = a_spec(folder, maxPolicyLag=lag).model_copy(update={"name": folder.name})
    async with Run(folder, spec, grader=grader) as run:
        await run.finish()
    return run


async def judged_run(folders: Path, function: str) -> tuple[list[StepReport], Run]:
    rewards = Rewards(python=PythonVerifier(function=f"my_rewards:{function}", folder=str(folders)))
    async with VerifierPool(verifier_for(rewards), RewardPool(workers=2, timeout_s=30)) as pool:
        run = await small_run(folders / function, pool)
    return run.board.reports(), run


async def test_a_wrong_answer_gains_nothing_by_what_it_does_to_the_verifier(folders: Path) -> None:
    """The same policy, twice: once its wrong answers are judged, once each tries to be ungraded.

    It was then reported with a reward of 1.00 where it earned 0.08 to 0.50, at every step and in validation, and was
    trained on its right answers alone.
    """
    honest, _ = await judged_run(folders, "honest")
    with capture_logs() as logs:
        escaping, run = await judged_run(folders, "escaping")
    assert [report.reward for report in escaping] == [report.reward for report in honest]
    assert [report.validation_reward for report in escaping] == [report.validation_reward for report in honest]
    assert [report.verdicts for report in escaping] == [12] * 6
    assert all(0 < report.reward < 1 for report in escaping if report.reward is not None), "there is something to gain"
    for report, other in zip(escaping, honest, strict=True):
        assert report.verifier_error_share == pytest.approx(1 - (report.reward or 0.0))
        assert (report.ungraded, report.no_answer, report.failed) == (0, 0, {})
        assert other.verifier_errors == {}
    found = {error for report in escaping for error in report.verifier_errors}
    assert all(error.startswith(tuple(ERRORS)) for error in found)
    assert len(found) > 3
    status = run.board.status()
    wrong = sum(sum(report.verifier_errors.values()) for report in escaping)
    assert (status.counters["ungraded"], status.counters["verifierErrors"]) == (0, wrong)

    said = [(line["step"], line["error"]) for line in logs if line["event"] == "verifier_erred"]
    assert len(said) == len(set(said)) == sum(len(report.verifier_errors) for report in escaping), "once a step each"
    assert value("specrl_coordinator_verifier_error_share", "escaping") == escaping[-1].verifier_error_share
    assert sum(total for _, total in series("specrl_coordinator_verifier_errors_total", "escaping").items()) == wrong


class Mixed(LengthGrader):
    """Every fourth call has no verdict; on every third completion there is no answer."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        reward = await super().grade(prompt, text)
        if reward.value is None or self.calls % 3:
            return reward
        return Reward(0.0, reason="no answer found", lacks_answer=True)


async def test_every_step_says_how_many_had_no_answer_and_no_verdict(folders: Path) -> None:
    """Nothing beside the reward said so: cut answers looked like wrong ones, and ungraded ones like none."""
    run = await small_run(folders / "mixed", Mixed(fails=lambda call: call % 4 == 0), lag=1)
    reports = run.board.reports()
    counters = run.board.status().counters
    assert 0 < sum(report.ungraded for report in reports) <= counters["ungraded"]
    assert sum(report.no_answer for report in reports) == counters["noAnswer"] > 0
    for report in reports:
        assert report.no_answer_share == report.no_answer / 12
        assert report.ungraded_share == report.ungraded / (12 + report.ungraded)
    assert value("specrl_coordinator_no_answer_share", "mixed") == reports[-1].no_answer_share
    assert value("specrl_coordinator_ungraded_share", "mixed") == reports[-1].ungraded_share
    assert '"noAnswerShare":' in (folders / "mixed" / "metrics.jsonl").read_text()
    curves = run.board.curves(1, None, 100).numbers
    assert curves["no_answer_share"] == [pytest.approx(report.no_answer_share, abs=1e-3) for report in reports]


def value(name: str, run: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"rljob": run})


def series(name: str, run: str) -> Mapping[str, float]:
    return {
        sample.labels["error"]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and sample.labels["rljob"] == run
    }
