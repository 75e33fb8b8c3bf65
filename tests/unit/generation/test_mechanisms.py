"""A mechanism that cannot run here, or not with these models, is refused by name, before anything is started."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import Shape, edit_config, make_draft_model, make_mtp_policy, make_policy
from tests.vllm_cases import a_spec

from specrl.errors import CheckpointInvalid, SpecInvalid
from specrl.generation.vllm_backend import checkpoint
from specrl.generation.vllm_backend.mechanisms import Surroundings, check_mechanism, drafting_model

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


def model_of(folder: Path, speculation: dict[str, Any], policy: str = "policy") -> checkpoint.EngineModel | None:
    spec = a_spec(folder / policy, speculation)
    return drafting_model(spec, checkpoint.read_policy(folder / policy, 64))


def test_suffix_decoding_without_its_package_is_refused_with_the_remedy() -> None:
    spec = a_spec(Path("/policy"), {"suffix": {}})
    with pytest.raises(SpecInvalid, match=r"generation\.speculation\.suffix.*arctic-inference.*make suffix"):
        check_mechanism(spec, Surroundings(has_suffix_package=False))
    check_mechanism(spec, Surroundings(has_suffix_package=True))


@pytest.mark.parametrize("kind", ["none", "ngram", "eagle3", "mtp"])
def test_other_mechanisms_need_no_package(kind: str) -> None:
    check_mechanism(a_spec(Path("/policy"), {kind: {}}), Surroundings(has_suffix_package=False))


def test_drafts_longer_than_vllms_sampler_verifies_are_refused() -> None:
    check_mechanism(a_spec(Path("/policy"), {"ngram": {"numDraftTokens": 128}}), Surroundings(False))
    with pytest.raises(SpecInvalid, match=r"draftModel\.numDraftTokens: must be <= 128.*got 129"):
        check_mechanism(a_spec(Path("/p"), {"draftModel": {"path": "/q", "numDraftTokens": 129}}), Surroundings(False))


def test_model_of_the_same_vocabulary_drafts(folder: Path) -> None:
    found = model_of(folder, {"draftModel": {"path": str(folder / "small")}})
    assert found is not None
    assert found.shapes["lm_head.weight"] == (264, 64)
    assert model_of(folder, {"ngram": {}}) is None


def test_draft_model_of_another_vocabulary_is_refused(folder: Path) -> None:
    edit_config(folder / "small", vocab_size=300)
    with pytest.raises(CheckpointInvalid, match=r"policy's vocab_size, got 300 in .* and 264"):
        model_of(folder, {"draftModel": {"path": str(folder / "small")}})


def test_draft_model_with_another_tokenizer_is_refused(folder: Path) -> None:
    file = folder / "small" / "tokenizer.json"
    file.write_text(file.read_text().replace('"A": ', '"AA": '))
    with pytest.raises(CheckpointInvalid, match="the same tokenizer"):
        model_of(folder, {"draftModel": {"path": str(folder / "small")}})


def test_draft_model_without_a_tokenizer_is_refused(folder: Path) -> None:
    (folder / "small" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointInvalid, match="must come with the policy's tokenizer"):
        model_of(folder, {"draftModel": {"path": str(folder / "small")}})


def test_draft_model_that_ends_before_the_run_does_is_refused(folder: Path) -> None:
    edit_config(folder / "small", max_position_embeddings=100)
    with pytest.raises(CheckpointInvalid, match=r"max_position_embeddings of 100, got 512"):
        model_of(folder, {"draftModel": {"path": str(folder / "small")}})


@pytest.mark.parametrize("name", ["eagle-small", "my-Eagle3", "dflash", "dspark-2"])
def test_draft_model_whose_name_would_mislead_vllm_is_refused(folder: Path, name: str) -> None:
    (folder / "small").rename(folder / name)
    with pytest.raises(SpecInvalid, match=r"draftModel\.path.*link the folder"):
        model_of(folder, {"draftModel": {"path": str(folder / name)}})


def test_policy_with_heads_drafts_for_itself(folder: Path) -> None:
    assert model_of(folder, {"mtp": {"numDraftTokens": 3}}, "heads") is None
    with pytest.raises(SpecInvalid, match=r"heads for multi-token prediction, got none"):
        model_of(folder, {"mtp": {}})


def test_heads_are_used_in_turn_and_all_of_them(folder: Path) -> None:
    edit_config(folder / "heads", num_nextn_predict_layers=2)
    model_of(folder, {"mtp": {"numDraftTokens": 4}}, "heads")
    with pytest.raises(SpecInvalid, match="2 heads or a multiple of them, got 3"):
        model_of(folder, {"mtp": {"numDraftTokens": 3}}, "heads")
