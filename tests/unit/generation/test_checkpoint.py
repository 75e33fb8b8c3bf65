"""An incomplete update, which vLLM would accept, is rejected by name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny_models import Shape, make_bigram_drafter, make_policy
from tests.weight_sender import folder_tensors, manifest_of

from specrl.errors import EngineFailed
from specrl.generation.vllm_backend import checkpoint
from specrl.models import read_model_folder
from specrl.records import TensorMeta, WeightOwner

SMALL = Shape(layers=2, intermediate=64)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("originals")
    policy = make_policy(folder / "policy", shape=SMALL)
    return policy, make_bigram_drafter(folder / "head", policy)


@pytest.fixture
def policy(originals: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals[0], tmp_path / "policy"))


@pytest.fixture
def head(originals: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals[1], tmp_path / "head"))


def test_a_manifest_must_have_exactly_the_models_tensors(policy: Path, head: Path) -> None:
    mine = read_model_folder(policy, "model.path")
    drafter = read_model_folder(head, "generation.speculation.eagle3.path")
    whole = manifest_of([*folder_tensors(policy, WeightOwner.POLICY), *folder_tensors(head, WeightOwner.DRAFTER)])
    checkpoint.check_manifest(whole, mine, drafter)
    for position in (0, len(whole.tensors) - 1):
        lacking = replace(whole, tensors=whole.tensors[:position] + whole.tensors[position + 1 :])
        with pytest.raises(EngineFailed, match=whole.tensors[position].name.rpartition("midlayer.")[2]):
            checkpoint.check_manifest(lacking, mine, drafter)
    other = TensorMeta("model.other.weight", WeightOwner.POLICY, "float32", (1,))
    with pytest.raises(EngineFailed, match=r"model\.other"):
        checkpoint.check_manifest(replace(whole, tensors=(*whole.tensors, other)), mine, drafter)
    with pytest.raises(EngineFailed, match="without one that is trained"):
        checkpoint.check_manifest(whole, mine, None)


def test_both_names_of_a_heads_layer_are_accepted(policy: Path, head: Path) -> None:
    mine = read_model_folder(policy, "model.path")
    drafter = read_model_folder(head, "generation.speculation.eagle3.path")
    whole = manifest_of([*folder_tensors(policy, WeightOwner.POLICY), *folder_tensors(head, WeightOwner.DRAFTER)])
    renamed = tuple(
        replace(meta, name=meta.name.replace("midlayer.", "layers.0.")) if meta.owner is WeightOwner.DRAFTER else meta
        for meta in whole.tensors
    )
    checkpoint.check_manifest(replace(whole, tensors=renamed), mine, drafter)


def test_a_tied_output_layer_is_optional_in_an_update(tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "tied", shape=replace(SMALL, is_tied=True))
    mine = read_model_folder(folder, "model.path")
    manifest = manifest_of(folder_tensors(folder, WeightOwner.POLICY))
    assert all(meta.name != "lm_head.weight" for meta in manifest.tensors)
    checkpoint.check_manifest(manifest, mine, None)
    lm_head = TensorMeta("lm_head.weight", WeightOwner.POLICY, "float32", (264, 64))
    checkpoint.check_manifest(replace(manifest, tensors=(*manifest.tensors, lm_head)), mine, None)
