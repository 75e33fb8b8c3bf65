"""The head's folder and tensor names, and heads that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import Shape, edit_config, make_policy
from tests.unit.drafting.builders import VOCAB, a_head, a_policy

from specrl.drafting.eagle3.head import (
    Eagle3Head,
    HeadConfig,
    choose_auxiliary_layers,
    fresh_head_config,
    load_head,
    write_untrained_head,
)
from specrl.drafting.layers import LayerShape
from specrl.errors import CheckpointInvalid
from specrl.models import read_model_folder
from specrl.models.policy_config import FAMILIES, read_policy_config
from specrl.spec.generation import Eagle3

NAMES = {
    "fc.weight",
    "lm_head.weight",
    "norm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight",
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


def test_tensor_names_are_those_that_the_engine_expects() -> None:
    assert a_head().collect_tensors(torch.float32).keys() == NAMES
    assert a_head(draft_vocab=8).collect_tensors(torch.float32).keys() == NAMES | {"d2t"}


def test_a_saved_head_is_loaded_unchanged(tmp_path: Path) -> None:
    head = a_head(draft_vocab=8)
    head.set_draft_vocabulary(torch.tensor([40, 3, 5, 7, 11, 13, 17, 47]))
    head.write_folder(tmp_path, torch.float32)
    found = load_head(tmp_path, a_policy())
    assert found.draft_ids_K.tolist() == [3, 5, 7, 11, 13, 17, 40, 47]
    for name, tensor in head.collect_tensors(torch.float32).items():
        assert torch.equal(tensor, found.collect_tensors(torch.float32)[name]), name


def split_weights(folder: Path) -> None:
    """Put a head's tensors into two files, without an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, names in enumerate((sorted(tensors)[:3], sorted(tensors)[3:]), 1):
        shard = {name: tensors[name] for name in names}
        save_file(shard, folder / f"head-{number:05d}-of-00002.safetensors")


def test_a_head_is_read_from_the_files_that_preflight_and_the_engine_accept(tmp_path: Path) -> None:
    """Only model.safetensors was read: the trainer ended after preflight had accepted the head."""
    head = a_head(draft_vocab=8)
    head.write_folder(tmp_path, torch.float32)
    split_weights(tmp_path)
    read_model_folder(tmp_path, "generation.speculation.eagle3.path")
    found = load_head(tmp_path, a_policy())
    assert found.draft_ids_K.tolist() == head.draft_ids_K.tolist()
    for name, tensor in head.collect_tensors(torch.float32).items():
        assert torch.equal(tensor, found.collect_tensors(torch.float32)[name]), name
    (tmp_path / "head-00002-of-00002.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointInvalid, match=r"the drafter must have whole safetensors files, got .*head-00002"):
        load_head(tmp_path, a_policy())


def test_the_untrained_head_depends_only_on_the_seed(tmp_path: Path, policy: Path) -> None:
    write_untrained_head(tmp_path / "a", policy, Eagle3(), seed=4)
    write_untrained_head(tmp_path / "b", policy, Eagle3(), seed=4)
    write_untrained_head(tmp_path / "c", policy, Eagle3(), seed=5)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


def test_the_untrained_output_layer_differs_from_the_policys(tmp_path: Path, policy: Path) -> None:
    write_untrained_head(tmp_path, policy, Eagle3(), seed=4)
    mine, theirs = (load_file(path / "model.safetensors")["lm_head.weight"] for path in (tmp_path, policy))
    assert not torch.equal(mine, theirs)


@pytest.mark.parametrize("layers", range(1, 80))
def test_auxiliary_layers_are_distinct_and_exist(layers: int) -> None:
    found = choose_auxiliary_layers(layers)
    assert list(found) == sorted(set(found))
    assert found[-1] <= layers
    assert len(found) == min(3, layers + 1)


def test_auxiliary_layers_of_large_policies_are_vllms_default() -> None:
    assert choose_auxiliary_layers(36) == (2, 18, 33)


def test_a_head_of_another_policy_is_refused(tmp_path: Path) -> None:
    a_head().write_folder(tmp_path, torch.float32)
    with pytest.raises(CheckpointInvalid, match=r"fc\.weight"):
        load_head(tmp_path, a_policy(hidden_size=64))


def test_a_folder_without_a_head_is_refused(tmp_path: Path, policy: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="LlamaForCausalLMEagle3"):
        load_head(policy, a_policy())
    with pytest.raises(CheckpointInvalid, match=r"config\.json"):
        load_head(tmp_path / "missing", a_policy())


def test_a_draft_vocabulary_larger_than_the_policys_is_refused() -> None:
    with pytest.raises(CheckpointInvalid, match="draftVocabSize"):
        fresh_head_config(a_policy(), Eagle3(draft_vocab_size=VOCAB + 1))


def test_a_head_keeps_its_precision_in_the_folder(tmp_path: Path) -> None:
    a_head().write_folder(tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_the_rotary_base_is_read_under_both_names(tmp_path: Path, policy: Path) -> None:
    config = json.loads((policy / "config.json").read_text())
    new = read_policy_config(policy)
    assert new.rope_theta == 10000.0
    config["rope_theta"] = 5e5
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_policy_config(tmp_path).rope_theta == 5e5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_parameters_matches_the_folder(family: str, tmp_path: Path) -> None:
    policy = make_policy(tmp_path, shape=Shape(family=family))
    expected = sum(tensor.numel() for tensor in load_file(policy / "model.safetensors").values())
    config = read_policy_config(policy)
    # Norms of single heads are counted once a layer.
    assert config.num_parameters == expected


def test_a_head_without_aux_layers_gets_the_default(tmp_path: Path) -> None:
    Eagle3Head(HeadConfig(a_policy(), VOCAB, (2, 3, 4))).write_folder(tmp_path, torch.float32)
    edit_config(tmp_path, eagle_config=None)
    assert load_head(tmp_path, a_policy()).config.aux_layers == (2, 3, 4)


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SCALED = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
    "llama3": {"rope_type": "llama3", **LLAMA3},
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_fresh_head_has_the_policys_rotary_scaling(kind: str, tmp_path: Path) -> None:
    """Its folder said `default`, so that vLLM and the trainer rotated its keys without the policy's scaling."""
    policy = read_policy_config(make_policy(tmp_path / "policy", shape=Shape(max_length=128, rope=SCALED[kind])))
    assert policy.rope_scaling is not None
    Eagle3Head(fresh_head_config(policy, Eagle3())).write_folder(tmp_path / "head", torch.float32)
    written = json.loads((tmp_path / "head" / "config.json").read_text())["rope_parameters"]
    assert written == {"rope_theta": 10000.0, **SCALED[kind]}
    assert load_head(tmp_path / "head", policy).config.decoder_shape.rope_scaling == policy.rope_scaling


def test_a_head_with_rotary_settings_keeps_its_own(tmp_path: Path) -> None:
    policy = read_policy_config(make_policy(tmp_path / "policy", shape=Shape(max_length=128, rope=SCALED["yarn"])))
    Eagle3Head(fresh_head_config(policy, Eagle3())).write_folder(tmp_path / "head", torch.float32)

    def reload(**changes: Any) -> LayerShape:
        edit_config(tmp_path / "head", **changes)
        return load_head(tmp_path / "head", policy).config.decoder_shape

    assert reload(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope_scaling is None
    own = reload(rope_parameters={**SCALED["yarn"], "factor": 2.0, "rope_theta": 5e5})
    assert own.rope_scaling is not None
    assert (own.rope_scaling.numbers["factor"], own.rope_theta) == (2.0, 5e5)
    assert reload(rope_parameters=None, rope_theta=5e5).rope_scaling is None  # as transformers 4 writes it
    assert reload(rope_theta=None).rope_scaling == policy.rope_scaling  # it names nothing
    with pytest.raises(CheckpointInvalid, match="rope_type must be one of default, llama3, yarn, got 'linear'"):
        reload(rope_parameters={"rope_type": "linear", "factor": 2.0})
