"""A user's own function: what it says counts, what it raises does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.errors import SpecInvalid, VerifierFailed
from specrl.records import Prompt
from specrl.rewards import FailureKind, VerifierPool, check_verifier, choice, verifier_for
from specrl.rewards.custom import Custom, UserFunction
from specrl.spec.data import PythonVerifier, RewardPool, Rewards

MODULE = """
not_a_function = 3

def grade(reference, completion):
    if completion == "raise":
        raise KeyError("no")
    if completion == "nothing":
        return None
    if completion == "infinity":
        return float("inf")
    return completion.count(reference) / 2
"""
PROMPT = Prompt("p0", 0, (1,), "question", "a")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("raise OSError('no licence')")
    (tmp_path / "dying_rewards.py").write_text("import os; os._exit(3)")
    (tmp_path / "hanging_rewards.py").write_text("import time; time.sleep(3600)")
    return tmp_path


async def test_its_number_is_the_reward_and_its_failures_are_counted(folder: Path) -> None:
    rewards = Rewards(python=PythonVerifier(function="my_rewards:grade", folder=str(folder)))
    check_verifier(rewards)
    async with VerifierPool(verifier_for(rewards), RewardPool(workers=1, timeout_s=30)) as pool:
        assert (await pool.grade(PROMPT, "banana")).value == 1.5
        assert (await pool.grade(PROMPT, "b")).value == 0.0
        for completion, said in [("raise", "KeyError"), ("nothing", "finite number"), ("infinity", "finite number")]:
            reward = await pool.grade(PROMPT, completion)
            assert reward.value is None
            assert said in reward.failure
    assert dict(pool.failures) == {FailureKind.ERROR: 3}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("my_rewards:score", "got AttributeError"),
        ("your_rewards:grade", "got ModuleNotFoundError"),
        ("broken_rewards:grade", "got OSError: no licence"),
        ("my_rewards:not_a_function", "must be a function, got int"),
    ],
)
async def test_what_cannot_be_called_is_refused_before_the_run(folder: Path, function: str, said: str) -> None:
    rewards = Rewards(python=PythonVerifier(function=function, folder=str(folder)))
    with pytest.raises(SpecInvalid, match=said):
        check_verifier(rewards)
    with pytest.raises(SpecInvalid, match=said):
        async with VerifierPool(verifier_for(rewards), RewardPool(workers=1)):
            pass


@pytest.mark.parametrize("function", ["dying_rewards:grade", "hanging_rewards:grade"])
def test_a_module_that_dies_or_hangs_is_refused_too(
    folder: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_READY_S", 5)
    with pytest.raises(SpecInvalid, match="rewards: must be ready in 5 s"):
        check_verifier(Rewards(python=PythonVerifier(function=function, folder=str(folder))))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match=r"rewards\.python\.folder: must be a folder"):
        Custom(UserFunction("my_rewards:grade", str(tmp_path / "nowhere"), "rewards.python")).ready()


def test_a_function_that_raises_is_no_verdict(folder: Path) -> None:
    with pytest.raises(VerifierFailed, match="my_rewards:grade must answer, got KeyError"):
        Custom(UserFunction("my_rewards:grade", str(folder), "rewards.python")).reward("a", "raise")
