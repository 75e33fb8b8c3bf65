"""The head's folder, its names, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_models import Shape, edit_config, make_policy
from tests.unit.drafting.builders import VOCAB, a_head, a_policy

from specrl.drafting.head import (
    Eagle3Head,
    HeadConfig,
    auxiliary_layers,
    head_config,
    load_head,
    save_head,
    write_untrained,
)
from specrl.drafting.policy_config import FAMILIES, read_policy_config
from specrl.errors import CheckpointInvalid
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


def test_names_are_those_of_the_engine() -> None:
    assert a_head().tensors(torch.float32).keys() == NAMES
    assert a_head(draft_vocab=8).tensors(torch.float32).keys() == NAMES | {"d2t"}


def test_folder_brings_the_head_back(tmp_path: Path) -> None:
    head = a_head(draft_vocab=8)
    head.set_draft_vocabulary(torch.tensor([40, 3, 5, 7, 11, 13, 17, 47]))
    save_head(tmp_path, head, torch.float32)
    found = load_head(tmp_path, a_policy())
    assert found.draft_ids_K.tolist() == [3, 5, 7, 11, 13, 17, 40, 47]
    for name, tensor in head.tensors(torch.float32).items():
        assert torch.equal(tensor, found.tensors(torch.float32)[name]), name


def test_untrained_head_is_the_same_on_every_machine(tmp_path: Path, policy: Path) -> None:
    write_untrained(tmp_path / "a", policy, Eagle3(), seed=4)
    write_untrained(tmp_path / "b", policy, Eagle3(), seed=4)
    write_untrained(tmp_path / "c", policy, Eagle3(), seed=5)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


def test_untrained_output_layer_is_never_the_policys(tmp_path: Path, policy: Path) -> None:
    write_untrained(tmp_path, policy, Eagle3(), seed=4)
    mine, theirs = (load_file(path / "model.safetensors")["lm_head.weight"] for path in (tmp_path, policy))
    assert not torch.equal(mine, theirs)


@pytest.mark.parametrize("layers", range(1, 80))
def test_auxiliary_layers_are_distinct_and_exist(layers: int) -> None:
    found = auxiliary_layers(layers)
    assert list(found) == sorted(set(found))
    assert found[-1] <= layers
    assert len(found) == min(3, layers + 1)


def test_auxiliary_layers_of_large_policies_are_the_engines_default() -> None:
    assert auxiliary_layers(36) == (2, 18, 33)


def test_head_of_another_policy_is_refused(tmp_path: Path) -> None:
    save_head(tmp_path, a_head(), torch.float32)
    with pytest.raises(CheckpointInvalid, match=r"fc\.weight"):
        load_head(tmp_path, a_policy(hidden_size=64))


def test_folder_that_is_no_head_is_refused(tmp_path: Path, policy: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="LlamaForCausalLMEagle3"):
        load_head(policy, a_policy())
    with pytest.raises(CheckpointInvalid, match=r"config\.json"):
        load_head(tmp_path / "missing", a_policy())


def test_draft_vocabulary_larger_than_the_policys_is_refused() -> None:
    with pytest.raises(CheckpointInvalid, match="draftVocabSize"):
        head_config(a_policy(), Eagle3(draft_vocab_size=VOCAB + 1))


def test_head_in_half_precision_is_written_in_it(tmp_path: Path) -> None:
    save_head(tmp_path, a_head(), torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_policy_is_read_with_the_rotary_base_of_either_spelling(tmp_path: Path, policy: Path) -> None:
    config = json.loads((policy / "config.json").read_text())
    new = read_policy_config(policy)
    assert new.rope_theta == 10000.0
    config["rope_theta"] = 5e5
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_policy_config(tmp_path).rope_theta == 5e5


@pytest.mark.parametrize("family", FAMILIES)
def test_number_of_parameters_is_that_of_the_folder(family: str, tmp_path: Path) -> None:
    policy = make_policy(tmp_path, shape=Shape(family=family))
    expected = sum(tensor.numel() for tensor in load_file(policy / "model.safetensors").values())
    config = read_policy_config(policy)
    # Norms of single heads are counted once a layer.
    assert config.num_parameters == expected


def test_head_without_aux_layers_takes_the_default(tmp_path: Path) -> None:
    save_head(tmp_path, Eagle3Head(HeadConfig(a_policy(), VOCAB, (2, 3, 4))), torch.float32)
    edit_config(tmp_path, eagle_config=None)
    assert load_head(tmp_path, a_policy()).config.aux_layers == (2, 3, 4)
