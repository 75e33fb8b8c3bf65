"""A prompt is a function of its position, and each epoch has every problem once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.errors import CheckpointInvalid, DatasetInvalid
from specrl.prompts import load_prompts, load_validation, open_sources
from specrl.prompts.mixing import epoch_order
from specrl.prompts.templates import PromptTemplate
from specrl.spec import RunSpec

Build = Callable[..., RunSpec]


def a_file(tmp_path: Path, count: int, name: str = "train.jsonl") -> dict[str, object]:
    path = tmp_path / name
    path.write_text("".join(json.dumps({"question": f"{name} {i}?", "answer": str(i)}) + "\n" for i in range(count)))
    return {"jsonl": {"path": str(path)}}


def test_a_prompt_is_tokenized_once_per_group(tmp_path: Path, a_spec: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = load_prompts(a_spec({"source": a_file(tmp_path, 3)}))
    asked: list[str] = []
    tokenize = PromptTemplate.tokenize_text
    monkeypatch.setattr(PromptTemplate, "tokenize_text", lambda self, text: asked.append(text) or tokenize(self, text))
    first = [stream.prompt(position) for position in (0, 1, 0, 1, 0)]
    assert len(asked) == 2
    assert [prompt.position for prompt in first] == [0, 1, 0, 1, 0]
    assert stream.prompt(3).position == 3, "the first problem of the next epoch is another prompt"


@given(count=st.integers(1, 300), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(count, seed, epoch)) == list(range(count))


def test_the_order_never_changes_between_machines_and_versions() -> None:
    # Recorded with numpy 2.3: a run that is resumed after an upgrade must continue with the same prompts.
    assert epoch_order(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert epoch_order(8, 0, 1).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert epoch_order(8, -1, 0).tolist() == [0, 7, 4, 2, 6, 3, 1, 5]


def test_orders_are_uniform_over_the_permutations() -> None:
    # Chi-square with 23 degrees of freedom exceeds 49.7 once in 1,000 draws; this draw is fixed.
    draws = 4800
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(draws):
        order = tuple(epoch_order(4, 11, epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    expected = draws / 24
    assert len(counts) == 24
    assert sum((seen - expected) ** 2 / expected for seen in counts.values()) < 49.7


def test_the_stream_can_seek_to_any_position(tmp_path: Path, a_spec: Build) -> None:
    spec = a_spec({"source": a_file(tmp_path, 7), "shuffleSeed": 5})
    walked = [load_prompts(spec).prompt(position) for position in range(30)]
    stream = load_prompts(spec)
    for position in np.random.default_rng(0).permutation(30).tolist():
        assert stream.prompt(position) == walked[position]
        assert walked[position].position == position


def test_an_epoch_has_every_problem_once_with_the_same_ids_in_each_epoch(tmp_path: Path, a_spec: Build) -> None:
    stream = load_prompts(a_spec({"source": a_file(tmp_path, 7)}))
    epochs = [[stream.prompt(7 * epoch + place) for place in range(7)] for epoch in range(3)]
    ids = [{prompt.prompt_id: prompt.answer for prompt in epoch} for epoch in epochs]
    assert len(stream) == len(ids[0]) == 7
    assert ids[0] == ids[1] == ids[2]
    assert len({tuple(prompt.prompt_id for prompt in epoch) for epoch in epochs}) == 3


def test_repeated_records_have_different_ids(tmp_path: Path, a_spec: Build) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n' * 2)
    stream = load_prompts(a_spec({"source": {"jsonl": {"path": str(path)}}}))
    assert stream.prompt(0).prompt_id != stream.prompt(1).prompt_id


def test_another_seed_gives_another_order(tmp_path: Path, a_spec: Build) -> None:
    source = a_file(tmp_path, 50)
    orders = [
        [load_prompts(a_spec({"source": source, "shuffleSeed": seed})).prompt(i).answer for i in range(50)]
        for seed in (0, 1)
    ]
    assert orders[0] != orders[1]


def test_positions_start_at_zero(tmp_path: Path, a_spec: Build) -> None:
    with pytest.raises(IndexError, match="position must be >= 0"):
        load_prompts(a_spec({"source": a_file(tmp_path, 1)})).prompt(-1)


def test_all_prompts_that_are_too_long_are_reported_at_the_start(tmp_path: Path, a_spec: Build) -> None:
    path = tmp_path / "long.jsonl"
    questions = ["x" * 10, "y" * 30, "z" * 31]
    path.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))
    with pytest.raises(DatasetInvalid) as caught:
        load_prompts(a_spec({"source": {"jsonl": {"path": str(path)}}, "maxTokens": 30}))
    must_be = "the prompt must have 1 to 30 tokens (prompts.maxTokens), got"
    assert f"long.jsonl:2: {must_be} 31" in str(caught.value), "30 bytes and the first token"
    assert f"long.jsonl:3: {must_be} 32" in str(caught.value)
    assert "long.jsonl:1" not in str(caught.value)
    assert "raise prompts.maxTokens to 32" in str(caught.value)
    assert len(load_prompts(a_spec({"source": {"jsonl": {"path": str(path)}}, "maxTokens": 32}))) == 3


def test_validation_takes_the_first_problems_in_order(tmp_path: Path, a_spec: Build) -> None:
    train = a_file(tmp_path, 4)
    held_out = a_file(tmp_path, 9, "test.jsonl")
    spec = a_spec({"source": train}, {"source": held_out, "limit": 3})
    prompts = load_validation(spec, open_sources(spec).validation)
    assert [prompt.answer for prompt in prompts] == ["0", "1", "2"]
    assert [prompt.position for prompt in prompts] == [0, 1, 2]
    stream = load_prompts(spec)
    assert {p.prompt_id for p in prompts}.isdisjoint(stream.prompt(i).prompt_id for i in range(4))
    assert load_validation(a_spec({"source": train}), ()) == []


def test_validation_on_training_problems_is_refused(tmp_path: Path, a_spec: Build) -> None:
    train = a_file(tmp_path, 4)
    copy = tmp_path / "copy.jsonl"
    copy.write_text((tmp_path / "train.jsonl").read_text())
    with pytest.raises(DatasetInvalid, match="must not be training questions"):
        open_sources(a_spec({"source": train}, {"source": {"jsonl": {"path": str(copy)}}}))


def test_a_policy_without_tokenizer_is_refused_before_anything_is_downloaded(tmp_path: Path, a_spec: Build) -> None:
    with pytest.raises(CheckpointInvalid, match=r"must hold the policy's tokenizer\.json"):
        load_prompts(a_spec({"source": a_file(tmp_path, 1)}, model=tmp_path / "no-policy"))


def test_torch_is_never_loaded(tmp_path: Path, a_spec: Build) -> None:
    spec = a_spec({"source": a_file(tmp_path, 3), "format": "Chat"})
    program = (
        "import sys; from specrl.prompts import load_prompts; from specrl.spec import RunSpec; "
        "import specrl.rewards, specrl.batching; "
        "load_prompts(RunSpec.model_validate_json(sys.argv[1])).prompt(5); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, spec.model_dump_json(by_alias=True)], check=True, timeout=120)


def test_a_python_verifier_gets_the_row_and_others_keep_none_in_memory(tmp_path: Path, a_spec: Build) -> None:
    """A function used to get only the reference, so it could not grade by level, source or test cases."""
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "1+1?", "answer": 2, "level": "easy"}\n')
    source = {"jsonl": {"path": str(path)}}
    held_out = tmp_path / "test.jsonl"
    held_out.write_text('{"question": "1+2?", "answer": 3, "level": "hard"}\n')
    validation = {"source": {"jsonl": {"path": str(held_out)}}}
    spec = a_spec({"source": source}, validation, rewards={"python": {"function": "my_rewards:grade"}})
    assert load_prompts(spec).prompt(0).row == {"question": "1+1?", "answer": 2, "level": "easy"}
    assert [prompt.row["level"] for prompt in load_validation(spec, open_sources(spec).validation)] == ["hard"]
    assert load_prompts(a_spec({"source": source})).prompt(0).row == {}
