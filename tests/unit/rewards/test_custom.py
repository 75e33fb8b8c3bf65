"""Verifier `python`: the function's number is the reward; any other result or exception gives 0 and is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.errors import SpecInvalid
from specrl.records import Prompt, Reward
from specrl.rewards import choice
from specrl.rewards.choice import check_worker_start, verifier_for
from specrl.rewards.custom import Custom, UserFunction
from specrl.rewards.judging import judge_completion
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifier import Verdict
from specrl.rewards.workers import FailureKind
from specrl.spec.data import PythonVerifier, RewardPool, Rewards

MODULE = """
import json
from decimal import Decimal
from fractions import Fraction

import numpy as np

from specrl.rewards import Ungraded

not_a_function = 3

class JudgeAway(Ungraded):
    pass

RETURNED = {
    "whole": 2, "true": True, "float": 0.5, "float32": np.float32(0.5), "int64": np.int64(2), "bool_": np.bool_(True),
    "fraction": Fraction(1, 2), "decimal": Decimal("0.5"), "largest": 3.4028234e38,
    "nothing": None, "text": "1", "numpy text": np.str_("1"), "list": [1.0], "array": np.ones(1), "complex": 1j,
    "numpy complex": np.complex64(1), "nan": float("nan"), "infinity": float("-inf"), "too large": 1e39,
    "too large for any float": 10**400,
}

def grade(reference, completion):
    if completion in RETURNED:
        return RETURNED[completion]
    if completion == "raise":
        raise KeyError("no")
    if completion == "in a library":
        json.loads("no JSON")
    if completion == "judge away":
        raise JudgeAway("the judge must answer, got status 503")
    return completion.count(reference) / 2

def with_row(reference, completion, row):
    return row["points"] if row["prompt"] in completion else 0.0

def with_third(reference, completion, columns, /):
    return with_row(reference, completion, columns)

def with_keyword(reference, completion, *, row=None):
    return with_row(reference, completion, row)

class WithMethod:
    def __call__(self, reference, completion, row):
        return with_row(reference, completion, row)

with_method = WithMethod()

def with_option(reference, completion, tolerance=0.25):
    return tolerance

def of_trl(prompts, completions, **kwargs):
    return [float(bool(kwargs))] * len(completions)

def of_batch(references, answers):
    return [1.0] * len(answers)

def of_four(reference, completion, row, fourth):
    return 1.0

def of_one(completion):
    return 1.0
"""
PROMPT = Prompt("p0", 0, (1,), "question", "a", row={"points": 3, "prompt": "a column of that name"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "my_rewards.py").write_text(MODULE)
    (folder / "broken_rewards.py").write_text("import os\nraise OSError('no licence\\nfor you')")
    (folder / "misspelled_rewards.py").write_text("def grade(reference, completion)\n    return 1\n")
    (folder / "lacking_rewards.py").write_text("import os\nimport not_installed\n")
    (folder / "leaving_rewards.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "dying_rewards.py").write_text("import os; os._exit(3)")
    (folder / "hanging_rewards.py").write_text("import time; time.sleep(3600)")
    return folder


def rewards_of(folder: Path, function: str) -> Rewards:
    return Rewards(python=PythonVerifier(function=function, folder=str(folder)))


async def test_a_number_is_the_reward_and_anything_else_gives_0_and_is_counted(folder: Path) -> None:
    """An exception, a list or NaN used to leave the rollout ungraded, so a policy could avoid its grade that way.

    JudgeAway is a class that this process cannot import and therefore cannot unpickle. 1e39 is finite only in float64:
    it used to end the run, and each restart, when advantages were computed.
    """
    rewards = rewards_of(folder, "my_rewards:grade")
    check_worker_start(verifier_for(rewards), "rewards")
    async with VerifierPool(verifier_for(rewards), RewardPool(workers=1, timeout_s=30)) as pool:
        for completion, value in {
            "banana": 1.5,
            "b": 0.0,
            "whole": 2.0,
            "true": 1.0,
            "float": 0.5,
            "float32": 0.5,
            "int64": 2.0,
            "bool_": 1.0,
            "fraction": 0.5,
            "decimal": 0.5,
            "largest": 3.4028234e38,
        }.items():
            assert await pool.grade(PROMPT, completion) == Reward(value)
        for completion, error in {
            "nothing": "ReturnedNoneType at my_rewards:grade",
            "text": "ReturnedStr at my_rewards:grade",
            "numpy text": "ReturnedStr_ at my_rewards:grade",
            "list": "ReturnedList at my_rewards:grade",
            "array": "ReturnedNdarray at my_rewards:grade",
            "complex": "ReturnedComplex at my_rewards:grade",
            "numpy complex": "ReturnedComplex64 at my_rewards:grade",
            "nan": "ReturnedNaN at my_rewards:grade",
            "infinity": "ReturnedInfinity at my_rewards:grade",
            "too large": "ReturnedInfinity at my_rewards:grade",
            "too large for any float": "ReturnedInfinity at my_rewards:grade",
            "raise": "KeyError at my_rewards.py:27",
            "in a library": "JSONDecodeError at my_rewards.py:29",
        }.items():
            reward = await pool.grade(PROMPT, completion)
            assert (reward.value, reward.error) == (0.0, error)
            assert reward.reason
        reward = await pool.grade(PROMPT, "judge away")
        assert reward == Reward(None, "ungraded: the judge must answer, got status 503")
    assert dict(pool.failures) == {FailureKind.UNGRADED: 1}


@pytest.mark.parametrize("function", ["with_row", "with_third", "with_keyword", "with_method"])
async def test_a_function_that_asks_for_the_row_gets_it_with_the_prompt(folder: Path, function: str) -> None:
    async with VerifierPool(verifier_for(rewards_of(folder, f"my_rewards:{function}")), RewardPool()) as pool:
        assert (await pool.grade(PROMPT, "the question")).value == 3.0
        assert (await pool.grade(PROMPT, "nothing")).value == 0.0


def test_a_third_parameter_with_a_default_does_not_get_the_row(folder: Path) -> None:
    verdict = verifier_for(rewards_of(folder, "my_rewards:with_option")).grade("a", "b", {"points": 3})
    assert verdict == Verdict(0.25)


def test_a_list_of_rewards_gives_0(folder: Path) -> None:
    """A list used to leave every rollout of the run ungraded."""
    verdict = judge_completion(verifier_for(rewards_of(folder, "my_rewards:of_batch")), "a", "b", {"points": 3})
    assert verdict.reason == "my_rewards:of_batch must return a number that is finite in float32, got list"
    assert verdict.error == "ReturnedList at my_rewards:of_batch"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("my_rewards:score", "got AttributeError"),
        ("unknown:grade", "No module named 'unknown'; .*/rewards.* has no unknown.py; add it, or name the folder"),
        ("my_rewards.py:grade", "'my_rewards' is not a package; write my_rewards:grade"),
        ("my_reward:grade", "got ModuleNotFoundError: No module named 'my_reward'; did you mean my_rewards[?]"),
        ("broken_rewards:grade", r"got OSError at .*/broken_rewards\.py:2: no licence for you; correct the module$"),
        ("misspelled_rewards:grade", r"got SyntaxError at .*/misspelled_rewards\.py:1: expected ':'"),
        ("lacking_rewards:grade", r"got ModuleNotFoundError at .*/lacking_rewards\.py:2: No module named"),
        ("leaving_rewards:grade", r"got SystemExit at .*/leaving_rewards\.py:2: 3"),
        ("my_rewards:not_a_function", "must be a function, got int"),
        (
            "my_rewards:of_four",
            r"must take \(reference, completion\) or .*, got \(reference, completion, row, fourth\)",
        ),
        ("my_rewards:of_one", r"must take \(reference, completion\) or .*, got \(completion\)"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(folder: Path, function: str, said: str) -> None:
    with pytest.raises(SpecInvalid, match=said) as refusal:
        verifier_for(rewards_of(folder, function)).prepare_worker()
    (problem,) = refusal.value.problems
    assert "\n" not in problem.rule


def test_a_module_without_a_folder_comes_with_the_field_for_it() -> None:
    rewards = Rewards(python=PythonVerifier(function="nowhere_rewards:grade"))
    with pytest.raises(SpecInvalid, match=r"name the module's folder in rewards\.python\.folder, or install it"):
        verifier_for(rewards).prepare_worker()


async def test_a_refusal_in_a_worker_reaches_the_caller(folder: Path) -> None:
    rewards = rewards_of(folder, "broken_rewards:grade")
    with pytest.raises(SpecInvalid, match="no licence"):
        check_worker_start(verifier_for(rewards), "rewards")
    with pytest.raises(SpecInvalid, match="no licence"):
        async with VerifierPool(verifier_for(rewards), RewardPool(workers=1)):
            pass


@pytest.mark.parametrize("function", ["dying_rewards:grade", "hanging_rewards:grade"])
def test_a_module_that_crashes_or_hangs_is_refused(
    folder: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_READY_S", 5)
    with pytest.raises(SpecInvalid, match="rewards: must be ready within 5 s"):
        check_worker_start(verifier_for(rewards_of(folder, function)), "rewards")


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match=r"rewards\.python\.folder: must be a folder"):
        Custom(UserFunction("my_rewards:grade", str(tmp_path / "nowhere"), "rewards.python")).prepare_worker()
