"""Preflight rejects mechanisms that vLLM cannot run here or with these models."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import Shape, edit_config, make_draft_model, make_mtp_policy, make_policy
from tests.vllm_cases import a_spec

from specrl.generation.vllm_backend import preflight
from specrl.generation.vllm_backend.preflight import (
    find_drafting_model_problems,
    find_mechanism_problems,
)
from specrl.models import read_served_models

SMALL = Shape(layers=1, intermediate=64)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    make_policy(folder / "policy", shape=SMALL)
    make_draft_model(folder / "small", folder / "policy")
    make_mtp_policy(folder / "heads", shape=SMALL)
    return folder


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals, tmp_path / "models"))


def found(folder: Path, speculation: dict[str, Any], policy: str = "policy") -> str:
    """Return the problems of the drafting model as text; empty if there is none."""
    spec = a_spec(folder / policy, speculation)
    return "\n".join(map(str, find_drafting_model_problems(spec, read_served_models(spec))))


def refusal(speculation: dict[str, Any], has_suffix_package: bool = False) -> str:
    """Return the problems of the mechanism itself as text."""
    spec = a_spec(Path("/policy"), speculation)
    return "\n".join(map(str, find_mechanism_problems(spec, has_suffix_package)))


def test_suffix_decoding_without_its_package_is_refused_with_a_remedy() -> None:
    assert re.search(r"^generation\.speculation\.suffix.*arctic-inference.*make suffix", refusal({"suffix": {}}))
    assert refusal({"suffix": {}}, has_suffix_package=True) == ""


@pytest.mark.parametrize("kind", ["none", "ngram", "eagle3", "mtp"])
def test_other_mechanisms_need_no_package(kind: str) -> None:
    assert refusal({kind: {}}) == ""


def test_drafts_above_the_limit_of_vllms_sampler_are_refused() -> None:
    assert refusal({"ngram": {"numDraftTokens": 128}}) == ""
    said = refusal({"draftModel": {"path": "/q", "numDraftTokens": 129}})
    assert re.search(r"draftModel\.numDraftTokens: must be <= 128.*got 129", said)


def test_a_draft_model_with_the_policys_vocabulary_is_accepted(folder: Path) -> None:
    speculation = {"draftModel": {"path": str(folder / "small")}}
    assert found(folder, speculation) == ""
    draft_model = read_served_models(a_spec(folder / "policy", speculation)).draft_model
    assert draft_model is not None
    assert draft_model.shapes["lm_head.weight"] == (264, 64)
    assert read_served_models(a_spec(folder / "policy", {"ngram": {}})).draft_model is None


def test_draft_model_of_another_vocabulary_is_refused(folder: Path) -> None:
    edit_config(folder / "small", vocab_size=300)
    said = found(folder, {"draftModel": {"path": str(folder / "small")}})
    assert re.search(r"draftModel\.path: must have the policy's vocab_size, got 300 in .* and 264", said)


def test_draft_model_with_another_tokenizer_is_refused(folder: Path) -> None:
    file = folder / "small" / "tokenizer.json"
    file.write_text(file.read_text().replace('"A": ', '"AA": '))
    assert "the same tokenizer" in found(folder, {"draftModel": {"path": str(folder / "small")}})


def test_draft_model_without_a_tokenizer_is_refused(folder: Path) -> None:
    (folder / "small" / "tokenizer.json").unlink()
    said = found(folder, {"draftModel": {"path": str(folder / "small")}})
    assert "must come with the policy's tokenizer" in said


def test_a_draft_model_with_a_shorter_context_than_the_run_is_refused(folder: Path) -> None:
    edit_config(folder / "small", max_position_embeddings=100)
    said = found(folder, {"draftModel": {"path": str(folder / "small")}})
    assert "max_position_embeddings of 100, got 512" in said


def test_heads_of_a_draft_model_must_fit_the_ranks_of_a_replica(folder: Path) -> None:
    edit_config(folder / "small", num_attention_heads=3)
    spec = a_spec(folder / "policy", {"draftModel": {"path": str(folder / "small")}}, generation={"tensorParallel": 2})
    (problem,) = preflight.check(spec, read_served_models(spec))
    assert problem.path == "generation.tensorParallel"
    assert problem.rule == "must divide the draft model's num_attention_heads=3, got 2"


@pytest.mark.parametrize("name", ["eagle-small", "my-Eagle3", "dflash", "dspark-2"])
def test_a_draft_model_whose_path_would_mislead_vllm_is_refused(folder: Path, name: str) -> None:
    (folder / "small").rename(folder / name)
    said = found(folder, {"draftModel": {"path": str(folder / name)}})
    assert re.search(r"draftModel\.path.*link the folder", said)


def test_mtp_needs_a_policy_with_heads(folder: Path) -> None:
    assert found(folder, {"mtp": {"numDraftTokens": 3}}, "heads") == ""
    assert "heads for multi-token prediction, got none" in found(folder, {"mtp": {}})


def test_draft_tokens_must_be_a_multiple_of_the_heads(folder: Path) -> None:
    edit_config(folder / "heads", num_nextn_predict_layers=2)
    assert found(folder, {"mtp": {"numDraftTokens": 4}}, "heads") == ""
    said = found(folder, {"mtp": {"numDraftTokens": 3}}, "heads")
    assert "2 heads or a multiple of them, got 3" in said


def test_expert_parallel_needs_a_policy_with_experts(folder: Path) -> None:
    make_policy(folder / "mixture", shape=Shape(family="qwen3_moe"))
    generation = {"tensorParallel": 2, "expertParallel": True}

    def said(policy: str) -> list[str]:
        spec = a_spec(folder / policy, generation=generation)
        problems = preflight.check(spec, read_served_models(spec))
        return [str(problem) for problem in problems if problem.path == "generation.expertParallel"]

    assert said("mixture") == []
    (found,) = said("policy")
    assert "must be false for a policy without experts, got true for Qwen3ForCausalLM" in found
