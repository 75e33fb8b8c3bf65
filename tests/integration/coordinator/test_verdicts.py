"""What a policy earns does not depend on what its wrong answers do to the verifier; and every step says how it judged.

A whole run with the stand-in engine and the real pool of verifiers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from tests.integration.coordinator.small_run import LengthGrader, Run, a_spec

from specrl.coordinator.context import Grader
from specrl.coordinator.observe.sinks.contract import flatten_step, flatten_validation
from specrl.formats.reports import StepReport
from specrl.records import Prompt, Reward
from specrl.rewards.choice import verifier_for, verifiers_for
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifier_set import add_rewards
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
    """Run one run to its end."""
    spec = a_spec(folder, maxPolicyLag=lag).model_copy(update={"name": folder.name})
    async with Run(folder, spec, grader=grader) as run:
        await run.finish()
    return run


async def judged_run(folders: Path, function: str) -> tuple[list[StepReport], Run]:
    rewards = Rewards(python=PythonVerifier(function=f"my_rewards:{function}", folder=str(folders)))
    async with VerifierPool(verifier_for(rewards), RewardPool(workers=2, timeout_s=30)) as pool:
        run = await small_run(folders / function, pool)
    return run.observer.read_reports(), run


async def test_a_wrong_answer_gains_nothing_by_what_it_does_to_the_verifier(folders: Path) -> None:
    """Run the same policy twice. In the second run every wrong answer tries to make the verifier fail.

    Such answers were ungraded, so the second run was trained on its right answers alone. It reported a reward of 1.00
    at every step and in validation, where the first reported 0.08 to 0.50.
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
    status = run.observer.build_status()
    wrong = sum(sum(report.verifier_errors.values()) for report in escaping)
    assert (status.counters["ungraded"], status.counters["verifierErrors"]) == (0, wrong)

    said = [(line["step"], line["error"]) for line in logs if line["event"] == "verifier_failed"]
    assert len(said) == len(set(said)) == sum(len(report.verifier_errors) for report in escaping), "once a step each"
    assert value("specrl_coordinator_verifier_error_share", "escaping") == escaping[-1].verifier_error_share
    assert sum(series("specrl_coordinator_verifier_errors_total", "escaping").values()) == wrong


class Mixed(LengthGrader):
    """Fails at every fourth call, and finds no answer in every third completion."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        reward = await super().grade(prompt, text)
        if reward.value is None or self.calls % 3:
            return reward
        return Reward(0.0, reason="no answer found", lacks_answer=True)


async def test_every_step_says_how_many_had_no_answer_and_no_verdict(folders: Path) -> None:
    """Only the reward showed it: truncated answers looked like wrong ones, and ungraded ones were invisible."""
    run = await small_run(folders / "mixed", Mixed(fails=lambda call: call % 4 == 0), lag=1)
    reports = run.observer.read_reports()
    counters = run.observer.build_status().counters
    assert 0 < sum(report.ungraded for report in reports) <= counters["ungraded"]
    assert sum(report.no_answer for report in reports) == counters["noAnswer"] > 0
    for report in reports:
        assert report.no_answer_share == report.no_answer / 12
        assert report.ungraded_share == report.ungraded / (12 + report.ungraded)
    assert value("specrl_coordinator_no_answer_share", "mixed") == reports[-1].no_answer_share
    assert value("specrl_coordinator_ungraded_share", "mixed") == reports[-1].ungraded_share
    assert '"noAnswerShare":' in (folders / "mixed" / "metrics.jsonl").read_text()
    curves = run.observer.curves.downsample_steps(1, None, 100).numbers
    assert curves["no_answer_share"] == [pytest.approx(report.no_answer_share, abs=1e-3) for report in reports]


class TwoRewards(LengthGrader):
    """Adds the reward for the length, and half a reward for an even position in the stream."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        rewards = [await super().grade(prompt, text), Reward(float(prompt.position % 2 == 0))]
        return add_rewards(verifiers_for(TWO_REWARDS).terms, rewards)


TWO_REWARDS = Rewards.model_validate(
    {
        "sum": {
            "terms": [
                {"name": "length", "verifier": {"exact": {}}},
                {"name": "even", "weight": "0.5", "verifier": {"exact": {}}},
            ]
        }
    }
)


async def test_every_step_and_validation_reports_each_of_several_rewards(folders: Path) -> None:
    folder = folders / "mixed"
    spec = a_spec(folder).model_copy(update={"name": "two", "rewards": TWO_REWARDS})
    async with Run(folder, spec, grader=TwoRewards()) as run:
        await run.finish()
    reports = run.observer.read_reports()
    for report in reports:
        assert report.reward == pytest.approx(report.rewards["length"] + report.rewards["even"] / 2)
        assert report.rewards["even"] in (pytest.approx(1 / 3), pytest.approx(2 / 3)), "positions alternate"
    validations = run.observer.read_validations()
    assert all(it.reward == pytest.approx(it.rewards["length"] + it.rewards["even"] / 2) for it in validations)
    assert reports[2].validation_rewards == validations[1].rewards
    summary = run.observer.build_status().summary
    assert summary is not None
    assert summary.first_rewards.keys() == summary.last_rewards.keys() == {"length", "even"}
    curves = run.observer.curves.downsample_steps(1, None, 100)
    assert curves.rewards["length"] == [pytest.approx(it.rewards["length"], abs=1e-3) for it in reports]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["rewards"] for line in lines] == [report.rewards for report in reports]
    flat = flatten_step(reports[2])
    assert flat["rewards/even"] == reports[2].rewards["even"]
    assert flat["validation_rewards/even"] == validations[1].rewards["even"]
    assert flatten_validation(validations[1])["validation/rewards/even"] == validations[1].rewards["even"]


class Nothing(LengthGrader):
    """Gives every completion of a step above `last` the reward 0."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        is_hopeless = self.last * 3 <= prompt.position < 1000  # three prompts a step; those of the validation are above
        return Reward(0.0) if is_hopeless else await super().grade(prompt, text)


@pytest.mark.parametrize(("last", "since", "remedy"), [(2, 3, "learningRate"), (0, 1, "easier prompts")])
async def test_rewards_and_gradients_that_stay_at_zero_are_reported_with_what_to_try(
    folders: Path, last: int, since: int, remedy: str
) -> None:
    """A run whose policy had collapsed went on for its remaining steps, without a word."""
    with capture_logs() as logs:
        run = await small_run(folders / "mixed", Nothing(last))
    reports = run.observer.read_reports()
    assert [report.reward == 0 for report in reports] == [step > last for step in range(1, 7)]
    said = [line for line in logs if line["event"] == "policy_collapsed"]
    assert [(line["log_level"], line["step"]) for line in said] == [("warning", since + 2)], "once"
    status = run.observer.build_status()
    assert status.collapsed_since == since
    assert f"since step {since} every reward and every gradient is 0" in status.warnings[0]
    assert remedy in status.warnings[0]


async def test_a_run_says_that_it_validates_and_writes_samples_of_each_step(tmp_path: Path) -> None:
    """The validation before the first step took minutes under the word `training`. No completion could be read."""
    said = set()
    async with Run(tmp_path, a_spec(tmp_path, maxPolicyLag=0)) as run:

        def note_detail() -> bool:
            said.add(run.observer.build_status().detail)
            return run.running.done()

        await run.until(note_detail)
    assert {"training", "validating the policy on 4 problems"} <= said
    samples = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys(range(1, 7), 4)
    assert all(sample["completion"] for sample in samples)


def value(name: str, run: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"rljob": run})


def series(name: str, run: str) -> Mapping[str, float]:
    return {
        sample.labels["error"]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and sample.labels["rljob"] == run
    }
