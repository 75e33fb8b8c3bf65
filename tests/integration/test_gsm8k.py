"""Reads the published GSM8K with the product's source, stream and verifiers. Right answers score 1, wrong ones 0.

`SPECRL_GSM8K` names the folder with train.jsonl and test.jsonl. The default is ../shared/data/gsm8k, beside the
repository.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.requirements import GSM8K, GSM8K_FOLDER
from tokenizers import Tokenizer, models, pre_tokenizers

from specrl.prompts import PromptStream, load_prompts, load_validation, open_problem_source, open_sources
from specrl.records import Prompt
from specrl.rewards.choice import verifier_for
from specrl.rewards.pool import VerifierPool
from specrl.rewards.text.exact import Exact
from specrl.rewards.text.final_answer import find_marked_answer
from specrl.spec import RunSpec, parse_spec
from specrl.spec.data import RewardPool

REPOSITORY = Path(__file__).parents[2]
SIZES = {"train": 7473, "test": 1319}  # as published

pytestmark = pytest.mark.needs(GSM8K)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """GSM8K's two files, and a tokenizer of one token per byte."""
    folder = tmp_path_factory.mktemp("policy")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return parse_spec(
        {
            "name": "gsm8k",
            "model": {"path": str(folder)},
            "prompts": {"source": {"jsonl": {"path": str(GSM8K_FOLDER / "train.jsonl")}}, "maxTokens": 1024},
            "rewards": {"exact": {}},
            "generation": {"sampling": {"maxTokens": 512}},
            "trainer": {"optimizer": {"learningRate": "1e-6"}},
            "schedule": {"steps": 1, "promptsPerStep": 8, "groupSize": 8},
            "validation": {"source": {"jsonl": {"path": str(GSM8K_FOLDER / "test.jsonl")}}, "limit": 100_000},
        }
    )


@pytest.fixture(scope="module")
def stream(spec: RunSpec) -> PromptStream:
    return load_prompts(spec)


@pytest.fixture(scope="module")
def prompts(spec: RunSpec, stream: PromptStream) -> dict[str, list[Prompt]]:
    """Every problem: those of one epoch of the stream, and those of the validation set."""
    return {
        "train": [stream.prompt(place) for place in range(len(stream))],
        "test": load_validation(spec, open_sources(spec).validation),
    }


def answer_of(prompt: Prompt) -> str:
    answer = find_marked_answer(prompt.answer, "####")
    assert answer is not None
    return answer


def with_answer(prompt: Prompt, answer: str) -> str:
    """Return the worked solution with another final answer."""
    work, _, _ = prompt.answer.rpartition("####")
    return f"{work}#### {answer}"


CORRUPTIONS: dict[str, Callable[[Prompt], str]] = {
    "one more": lambda prompt: with_answer(prompt, str(int(answer_of(prompt).replace(",", "")) + 1)),
    "the other sign": lambda prompt: with_answer(prompt, f"-{answer_of(prompt)}1"),
    "a digit more": lambda prompt: with_answer(prompt, f"{answer_of(prompt)}7"),
    "two answers": lambda prompt: with_answer(prompt, f"{answer_of(prompt)} {answer_of(prompt)}1"),
    "a half more": lambda prompt: with_answer(prompt, f"{answer_of(prompt)}.5"),
    "a word": lambda prompt: with_answer(prompt, "unknown"),
    "nothing after the mark": lambda prompt: with_answer(prompt, ""),
    "a second, wrong answer": lambda prompt: f"{prompt.answer}\n#### {answer_of(prompt)}9",
    "cut before the answer": lambda prompt: prompt.answer.rpartition("####")[0] + "####",
    "empty": lambda prompt: "",
}


def test_every_problem_is_read_once_an_epoch(stream: PromptStream, prompts: dict[str, list[Prompt]]) -> None:
    for name, size in SIZES.items():
        assert len(prompts[name]) == len({prompt.prompt_id for prompt in prompts[name]}) == size
    again = {stream.prompt(len(stream) + place).prompt_id for place in range(len(stream))}
    assert again == {prompt.prompt_id for prompt in prompts["train"]}


def test_every_prompt_is_its_question(spec: RunSpec, prompts: dict[str, list[Prompt]]) -> None:
    questions = {path: open_problem_source(source) for path, source in _sources(spec).items()}
    for name, source in questions.items():
        assert {prompt.text for prompt in prompts[name]} == {problem.question for problem in source.problems}
    assert all(len(prompt.token_ids) == len(prompt.text.encode()) for prompt in prompts["train"])


def _sources(spec: RunSpec):  # type: ignore[no-untyped-def] # a mapping for one test
    assert spec.validation is not None
    return {"train": spec.prompts.all_sources[0].source, "test": spec.validation.all_sets[0].source}


def test_every_reference_has_an_answer(spec: RunSpec, prompts: dict[str, list[Prompt]]) -> None:
    """Exact reads all of them, math every tenth, which costs a hundred times as much."""
    references = [prompt.answer for prompt in (*prompts["train"], *prompts["test"])]
    for rewards, checked in ((spec.rewards, references), (parse_math(spec).rewards, references[::10])):
        verifier = verifier_for(rewards)
        for reference in checked:
            verifier.check_reference(reference)


def parse_math(spec: RunSpec) -> RunSpec:
    return parse_spec(spec.model_dump(by_alias=True, mode="json", exclude_none=True) | {"rewards": {"math": {}}})


@pytest.mark.parametrize("name", SIZES)
def test_exact_scores_every_reference_one(name: str, spec: RunSpec, prompts: dict[str, list[Prompt]]) -> None:
    verifier = verifier_for(spec.rewards)
    for prompt in prompts[name]:
        for completion in (prompt.answer, f"#### {answer_of(prompt)}", f"so\n#### ${answer_of(prompt)}.\n"):
            assert verifier.compute_reward(prompt.answer, completion) == 1.0, (prompt.prompt_id, completion)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_exact_scores_no_corrupted_answer(name: str, corruption: str, prompts: dict[str, list[Prompt]]) -> None:
    verifier = Exact("####")
    for prompt in prompts[name]:
        completion = CORRUPTIONS[corruption](prompt)
        assert verifier.compute_reward(prompt.answer, completion) == 0.0, (prompt.prompt_id, completion)


async def test_math_agrees_on_the_test_file_in_the_pool(spec: RunSpec, prompts: dict[str, list[Prompt]]) -> None:
    """Grade every fourth reference, and one corruption of it. Kinds take turns, so each occurs more than 30 times."""
    kinds = [kind for name, kind in CORRUPTIONS.items() if name != "empty"]
    graded = prompts["test"][::4]
    wrong = [(prompt, kinds[i % len(kinds)](prompt)) for i, prompt in enumerate(graded)]
    right = [(prompt, prompt.answer) for prompt in graded]
    async with VerifierPool(verifier_for(parse_math(spec).rewards), RewardPool(workers=2, timeout_s=60)) as pool:
        for cases, expected in ((right, 1.0), (wrong, 0.0)):
            rewards = await asyncio.gather(*(pool.grade(prompt, text) for prompt, text in cases))
            other = [(case[1], reward) for case, reward in zip(cases, rewards, strict=True) if reward.value != expected]
            assert other == []
    assert not pool.failures


async def test_math_reads_the_same_answers_in_other_spellings(spec: RunSpec, prompts: dict[str, list[Prompt]]) -> None:
    def spellings(answer: str) -> list[str]:
        value = answer.replace(",", "")
        return [rf"\boxed{{{value}}}", f"The answer is {value}.", f"#### {value}.00", rf"#### $\frac{{{value}}}{{1}}$"]

    async with VerifierPool(verifier_for(parse_math(spec).rewards), RewardPool(workers=2, timeout_s=60)) as pool:
        for prompt in prompts["test"][::20]:
            assert re.fullmatch(r"-?[\d,]+", answer_of(prompt))
            for completion in spellings(answer_of(prompt)):
                assert (await pool.grade(prompt, completion)).value == 1.0, completion
