"""A function that fails on all completions is refused before the run, with its name and error."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.errors import SpecInvalid, VerifierFailed
from specrl.records import Prompt
from specrl.rewards import workers
from specrl.rewards.checks.trials import try_verifiers
from specrl.rewards.choice import verifiers_for
from specrl.rewards.pool import VerifierPool
from specrl.spec.data import ExactVerifier, PatternVerifier, PythonVerifier, RewardPool, Rewards

MODULE = """from specrl.rewards import Ungraded

def raises(reference, completion):
    return {}[reference]

def lists(reference, completion):
    return [1.0]

def nan(reference, completion):
    return float("nan")

def nothing(reference, completion):
    print("no return")

def text(reference, completion):
    return "1.0"

def trl(prompts, completions, **kwargs):
    return [1.0 for _ in completions]

def hangs(reference, completion):
    while True:
        pass

def away(reference, completion):
    raise Ungraded("the judge is away")

def first_word(reference, completion):
    return float(completion.split()[0] == reference)

def by_level(reference, completion, row):
    return float(row["level"])

def constant(reference, completion):
    return 0.5

def zero(reference, completion):
    return float("<answer>" in completion)

def by_prompt(reference, completion):
    return float(reference)

def good(reference, completion):
    return reference == completion
"""
PROMPTS = [Prompt(f"p{i}", i, (1,), "question", str(i), {"level": i} if i else {}) for i in range(4)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the cap on waiting: on a loaded machine, a function that hangs would be ungraded instead of timing out."""
    monkeypatch.setattr(workers, "MAX_WAITING", 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "my_rewards.py").write_text(MODULE)
    return folder


async def tried(folder: Path, function: str) -> list[str]:
    rewards = Rewards(python=PythonVerifier(function=f"my_rewards:{function}", folder=str(folder)))
    async with VerifierPool(verifiers_for(rewards), RewardPool(workers=1, timeout_s=1)) as pool:
        return await try_verifiers(pool, PROMPTS)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", r"for all 16, the first: KeyError at my_rewards\.py:4"),
        ("lists", "my_rewards:lists must return a number that is finite in float32, got list"),
        ("nan", "my_rewards:nan must return a number that is finite in float32, got nan"),
        ("nothing", "my_rewards:nothing must return a number that is finite in float32, got NoneType"),
        ("text", "my_rewards:text must return a number that is finite in float32, got str"),
        ("hangs", "for all 4, the first: timeout: the verifier took longer than timeoutS=1"),
    ],
)
async def test_a_function_that_always_fails_is_refused_with_its_error(folder: Path, function: str, said: str) -> None:
    """Such runs used to finish with exit code 0 and a policy that had learnt nothing."""
    with pytest.raises(SpecInvalid, match=said) as caught:
        await tried(folder, function)
    (problem,) = caught.value.problems
    assert problem.path == "rewards.python.function"
    assert "it is called as grade(reference: str, completion: str) -> float, once per completion" in problem.remedy
    assert "\n" not in str(problem)


async def test_trls_signature_is_refused_with_the_expected_one(folder: Path) -> None:
    with pytest.raises(SpecInvalid, match=r"TRL's signature \(prompts, completions, \*\*kwargs\); write def grade\("):
        await tried(folder, "trl")


async def test_a_judge_that_is_down_is_not_reported_as_a_fault_of_the_run_file(folder: Path) -> None:
    with pytest.raises(VerifierFailed, match=r"for all 16, the first: ungraded: the judge is away.*start"):
        await tried(folder, "away")


async def test_a_function_that_fails_for_some_completions_only_warns(folder: Path) -> None:
    first, *others, count = await tried(folder, "first_word")
    assert first.startswith("the verifier failed in a trial before the run: IndexError at my_rewards.py:29")
    assert first.endswith("for an empty text as the answer to p0")
    assert len(others) == 2
    assert count.endswith("failed for 4 of 16 made-up completions in all")


async def test_a_first_prompt_that_lacks_a_column_only_warns(folder: Path) -> None:
    notices = await tried(folder, "by_level")
    assert [notice.rpartition(" ")[2] for notice in notices] == ["p0", "p0", "p0", "all"]
    assert "KeyError at my_rewards.py:32: 'level'" in notices[0]


async def test_a_working_function_gives_no_warning(folder: Path) -> None:
    assert await tried(folder, "good") == []


@pytest.mark.parametrize(
    ("function", "reward"),
    [("constant", "0.5"), ("zero", "0"), ("by_prompt", "0 to 3, depending on the prompt alone")],
)
async def test_a_function_that_tells_no_completions_apart_warns(folder: Path, function: str, reward: str) -> None:
    """A dry run showed the same reward twice and said nothing; the run had groups without signal alone."""
    (notice,) = await tried(folder, function)
    assert f"the reference the same reward: {reward}; a group whose rewards are all equal teaches nothing" in notice


async def test_a_pattern_that_matches_everything_warns_and_one_that_needs_a_form_does_not() -> None:
    said = dict[str, list[str]]()
    for expression in ("(?s).*", "<answer>"):
        rewards = Rewards(pattern=PatternVerifier(expression=expression))
        async with VerifierPool(verifiers_for(rewards), RewardPool(workers=1)) as pool:
            said[expression] = await try_verifiers(pool, PROMPTS)
    assert said["<answer>"] == []
    assert "the same reward: 1;" in said["(?s).*"][0]


async def test_a_built_in_verifier_passes_its_trial() -> None:
    rewards = Rewards(exact=ExactVerifier())
    async with VerifierPool(verifiers_for(rewards), RewardPool(workers=1)) as pool:
        assert await try_verifiers(pool, PROMPTS) == []
