"""Every end token of the policy's folder ends a completion, and so do those of the run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_model_folder, a_run

from specrl.errors import SpecInvalid
from specrl.models import read_model_folder, read_models
from specrl.models.end_tokens import find_end_tokens, find_stop_tokens
from specrl.models.run_models import check
from specrl.spec import RunSpec, parse_spec


def a_spec(folder: Path, *end_tokens: str) -> RunSpec:
    return parse_spec(a_run(folder, generation={"sampling": {"maxTokens": 16, "endTokens": list(end_tokens)}}))


def a_policy(folder: Path, config: Any = None, generation_config: Any = None) -> Path:
    path = a_model_folder(folder / "model", eos_token_id=config)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 260, "content": "<|im_end|>", "special": True})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return path


@pytest.mark.parametrize(
    ("config", "generation_config", "found"),
    [
        (None, None, ()),
        (7, None, (7,)),
        ([7, 9], {"eos_token_id": 8}, (7, 8, 9)),
        (7, {"eos_token_id": [8, 7]}, (7, 8)),
        (None, {"eos_token_id": [8, -1, 100_000, "a", True]}, (8,)),
    ],
)
def test_one_id_or_a_list_of_either_file_ends_a_completion(
    tmp_path: Path, config: Any, generation_config: Any, found: tuple[int, ...]
) -> None:
    policy = read_model_folder(a_policy(tmp_path, config, generation_config), "model.path")
    assert find_end_tokens(a_spec(tmp_path), policy) == found


def test_tokens_of_the_run_file_join_those_of_the_policy(tmp_path: Path) -> None:
    policy = read_model_folder(a_policy(tmp_path, [7]), "model.path")
    assert policy.vocabulary is not None
    assert isinstance(policy.vocabulary.pieces, dict)
    assert find_end_tokens(a_spec(tmp_path, "<|im_end|>", "a"), policy) == tuple(
        sorted((7, policy.vocabulary.pieces["a"], 260))
    )


def test_a_stop_string_that_is_an_added_token_ends_a_completion_at_the_token(tmp_path: Path) -> None:
    policy = read_model_folder(a_policy(tmp_path), "model.path")
    assert find_stop_tokens(("<|im_end|>", "a", "x<|im_end|>"), policy) == {260: "<|im_end|>"}
    assert find_stop_tokens((), policy) == {}


def test_a_text_that_is_no_token_is_refused_before_the_run(tmp_path: Path) -> None:
    policy = a_policy(tmp_path)
    spec = a_spec(tmp_path, "<|im_end|>", "<end>", "ab")
    with pytest.raises(SpecInvalid, match="endTokens: must be tokens of the policy's tokenizer, got '<end>', 'ab'; "):
        find_end_tokens(spec, read_model_folder(policy, "model.path"))
    assert "generation.sampling.endTokens" in {problem.path for problem in check(spec, read_models(spec))}
