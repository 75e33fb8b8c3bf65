"""Folders that vLLM would refuse late, or not at all, are refused early and by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny_models import Shape, edit_config, make_bigram_drafter, make_policy
from tests.weight_sender import folder_tensors, manifest_of

from specrl.errors import CheckpointInvalid, EngineFailed
from specrl.generation.vllm_backend import checkpoint
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


def test_whole_folders_are_read(policy: Path, head: Path) -> None:
    folder = checkpoint.read_policy(policy, 1024)
    assert folder.shapes["lm_head.weight"] == (264, 64)
    assert folder.weight_bytes("bfloat16") * 2 == folder.weight_bytes("float32") > 0
    assert checkpoint.read_head(head, folder).shapes["fc.weight"] == (64, 192)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file_is_named(policy: Path, name: str) -> None:
    (policy / name).unlink()
    with pytest.raises(CheckpointInvalid, match=name.split(".", maxsplit=1)[0].replace("model", "safetensors")):
        checkpoint.read_policy(policy, 64)


def test_missing_folder_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"check model\.path"):
        checkpoint.read_policy(tmp_path / "nothing", 64)


@pytest.mark.parametrize("cut", [4, 100, -1])
def test_copy_that_broke_off_is_refused(policy: Path, cut: int) -> None:
    file = policy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointInvalid, match="whole safetensors"):
        checkpoint.read_policy(policy, 64)


def test_weights_with_bytes_that_no_tensor_has_are_refused(policy: Path) -> None:
    file = policy / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointInvalid, match=f"the policy must have whole safetensors files, got {file} of"):
        checkpoint.read_policy(policy, 64)


@pytest.mark.parametrize("content", [b"", b"no json", b"[]", b"\xff\xff"])
def test_nonsense_is_refused_whatever_it_is(policy: Path, content: bytes) -> None:
    (policy / "config.json").write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=r"config\.json"):
        checkpoint.read_policy(policy, 64)


def test_missing_shard_is_refused(policy: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "a", "model.layers.9.mlp.up_proj.weight": "b"}}
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointInvalid, match=r"layers\.9"):
        checkpoint.read_policy(policy, 64)


def test_policy_shorter_than_the_run_is_refused(policy: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="max_position_embeddings of 1024, got 1025"):
        checkpoint.read_policy(policy, 1025)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size"])
def test_head_of_another_policy_names_both(policy: Path, head: Path, key: str) -> None:
    edit_config(head, **{key: 65})
    with pytest.raises(CheckpointInvalid) as caught:
        checkpoint.read_head(head, checkpoint.read_policy(policy, 64))
    assert key in str(caught.value)
    assert str(policy) in str(caught.value)
    assert str(head) in str(caught.value)


def test_head_with_another_tokenizer_names_both(policy: Path, head: Path) -> None:
    tokenizer = json.loads((policy / "tokenizer.json").read_text(encoding="utf-8"))
    (head / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    folder = checkpoint.read_policy(policy, 64)
    checkpoint.read_head(head, folder)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (head / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(CheckpointInvalid, match=f"{head}.*{policy}"):
        checkpoint.read_head(head, folder)


def test_manifest_must_have_every_tensor_and_no_other(policy: Path, head: Path) -> None:
    mine = checkpoint.read_policy(policy, 64)
    drafter = checkpoint.read_head(head, mine)
    whole = manifest_of([*folder_tensors(policy, WeightOwner.POLICY), *folder_tensors(head, WeightOwner.DRAFTER)])
    checkpoint.check_manifest(whole, mine, drafter)
    for position in (0, len(whole.tensors) - 1):
        lacking = replace(whole, tensors=whole.tensors[:position] + whole.tensors[position + 1 :])
        with pytest.raises(EngineFailed, match=whole.tensors[position].name.rpartition("midlayer.")[2]):
            checkpoint.check_manifest(lacking, mine, drafter)
    other = TensorMeta("model.other.weight", WeightOwner.POLICY, "float32", (1,))
    with pytest.raises(EngineFailed, match=r"model\.other"):
        checkpoint.check_manifest(replace(whole, tensors=(*whole.tensors, other)), mine, drafter)
    with pytest.raises(EngineFailed, match="no drafter"):
        checkpoint.check_manifest(whole, mine, None)


def test_both_spellings_of_a_heads_layer_are_one_name(policy: Path, head: Path) -> None:
    mine = checkpoint.read_policy(policy, 64)
    drafter = checkpoint.read_head(head, mine)
    whole = manifest_of([*folder_tensors(policy, WeightOwner.POLICY), *folder_tensors(head, WeightOwner.DRAFTER)])
    renamed = tuple(
        replace(meta, name=meta.name.replace("midlayer.", "layers.0.")) if meta.owner is WeightOwner.DRAFTER else meta
        for meta in whole.tensors
    )
    checkpoint.check_manifest(replace(whole, tensors=renamed), mine, drafter)


def test_tied_output_layer_may_be_sent_or_not(tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "tied", shape=replace(SMALL, is_tied=True))
    mine = checkpoint.read_policy(folder, 64)
    manifest = manifest_of(folder_tensors(folder, WeightOwner.POLICY))
    assert all(meta.name != "lm_head.weight" for meta in manifest.tensors)
    checkpoint.check_manifest(manifest, mine, None)
    lm_head = TensorMeta("lm_head.weight", WeightOwner.POLICY, "float32", (264, 64))
    checkpoint.check_manifest(replace(manifest, tensors=(*manifest.tensors, lm_head)), mine, None)
