"""Published head layouts: conversion both ways, comparison with the speculators library, and rejected heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import edit_config, make_policy

from specrl.drafting.eagle3 import convert
from specrl.drafting.eagle3.head import Eagle3Head, HeadConfig, LayerShape, load_head
from specrl.drafting.eagle3.head_formats import read_published_head
from specrl.drafting.packing import LessonBatch, pack_rows
from specrl.errors import CheckpointInvalid
from specrl.models.policy_config import PolicyConfig, read_policy_config

AUX = (1, 2, 4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


def a_drafter(folder: Path, policy: PolicyConfig, **changes: Any) -> Eagle3Head:
    """A head with auxiliary layers other than the default, whose parameters all differ from their initial values."""
    head = Eagle3Head(HeadConfig(policy, changes.pop("draft_vocab_size", policy.vocab_size), AUX, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.1 * noise)
    if head.config.is_reduced:
        head.set_draft_vocabulary(torch.arange(0, policy.vocab_size, 2)[: head.config.draft_vocab_size])
    head.write_folder(folder, torch.float32)
    return head


def run(*arguments: str | Path) -> int:
    return convert.main([str(argument) for argument in arguments])


SHAPES: list[dict[str, Any]] = [
    {},
    {"draft_vocab_size": 100},
    {"draft_vocab_size": 100, "norm_before_residual": True, "layer": LayerShape(96, 4, 2, 16, 1e-5, 5e5)},
]


@pytest.mark.parametrize("layout", ["speculators", "eagle3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_exported_head_is_imported_unchanged(
    layout: str, shape: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    head = a_drafter(tmp_path / "ours", read_policy_config(policy), **shape)
    assert run("export", tmp_path / "ours", "--format", layout, "--out", tmp_path / "theirs", "--policy", policy) == 0
    assert run("import", tmp_path / "theirs", "--policy", policy, "--out", tmp_path / "again") == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    assert load_head(tmp_path / "again", read_policy_config(policy)).config.decoder_shape == head.config.decoder_shape


@pytest.mark.filterwarnings("ignore")  # speculators and what it imports warn about themselves
@pytest.mark.parametrize("shape", SHAPES)
def test_speculators_loads_an_exported_head_and_computes_the_same(
    shape: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    from speculators import SpeculatorModel
    from speculators.models.attention import create_float_mask

    config = read_policy_config(policy)
    head = a_drafter(tmp_path / "ours", config, **shape)
    run("export", tmp_path / "ours", "--format", "speculators", "--out", tmp_path / "theirs", "--policy", policy)
    edit_index(policy)
    model = SpeculatorModel.from_pretrained(tmp_path / "theirs")
    # Its default attention needs a compiler.
    model.config.transformer_layer_config._attn_implementation = model._attn_impl = "eager"
    model._create_mask_fn = create_float_mask
    assert list(model.config.eagle_aux_hidden_state_layer_ids) == list(AUX)
    if head.config.is_reduced:
        assert torch.equal(model.d2t + torch.arange(100), head.draft_ids_K)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output.detach()))
    states = the_states(config)
    with torch.no_grad():
        model(
            hidden_states=states.aux_BSA[:, :-1],
            input_ids=states.token_ids_BS[:, 1:],
            document_ids=torch.zeros(1, 11, dtype=torch.int64),
            position_ids=torch.arange(11)[None],
            ttt_steps=1,
        )
        ours = our_logits(head, states)
    torch.testing.assert_close(logits[0][0, 1:10], ours, rtol=1e-4, atol=1e-4)


def edit_index(policy: Path) -> None:
    """Write an index, by which speculators finds the verifier's tensors."""
    names = load_file(policy / "model.safetensors").keys()
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))


def the_states(config: PolicyConfig) -> LessonBatch:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 12, 4 * config.hidden_size, generator=generator)
    tokens = torch.randint(0, config.vocab_size, (1, 12), generator=generator)
    width = 3 * config.hidden_size
    embedding_VH = load_file(config.path / "model.safetensors")["model.embed_tokens.weight"]
    return LessonBatch(
        tokens,
        hidden[..., :width],
        embedding_VH[tokens],
        hidden[..., :0],
        torch.zeros(9, config.vocab_size),
        torch.zeros(9, 1),
        torch.tensor([2]),
        torch.tensor([12]),
    )


def our_logits(head: Eagle3Head, states: LessonBatch) -> torch.Tensor:
    """The logits of pass 0 at every start."""
    return next(head.draft_logits(pack_rows(states), 1)).detach()


def test_all_names_of_published_layouts_are_accepted(policy: Path, tmp_path: Path) -> None:
    config = read_policy_config(policy)
    head = a_drafter(tmp_path, config, draft_vocab_size=100)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    theirs = {f"model.{name.replace('midlayer.', 'layers.0.')}": tensor for name, tensor in tensors.items()}
    theirs["embed_tokens.weight"] = load_file(policy / "model.safetensors")["model.embed_tokens.weight"]
    torch.save(theirs, tmp_path / "pytorch_model.bin")
    edit_config(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": list(AUX)}, head_dim=None, rope_theta=1e4)
    found, dtype = read_published_head(tmp_path, config)
    assert dtype == torch.float32
    for name, tensor in head.collect_tensors(torch.float32).items():
        assert torch.equal(found.collect_tensors(torch.float32)[name], tensor), name


def test_a_published_head_whose_file_has_another_name_is_imported(policy: Path, tmp_path: Path) -> None:
    """It was refused for want of a pytorch_model.bin."""
    config = read_policy_config(policy)
    head = a_drafter(tmp_path, config)
    (tmp_path / "model.safetensors").rename(tmp_path / "eagle3.safetensors")
    found, _ = read_published_head(tmp_path, config)
    assert torch.equal(found.fc.weight, head.fc.weight)
    (tmp_path / "eagle3.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointInvalid, match=r"^the drafter must have whole safetensors files, got .*; fetch"):
        read_published_head(tmp_path, config)


def test_safetensors_beside_a_published_pytorch_model_are_not_read(policy: Path, tmp_path: Path) -> None:
    config = read_policy_config(policy)
    head = a_drafter(tmp_path, config)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    save_file({"lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    found, _ = read_published_head(tmp_path, config)
    assert torch.equal(found.fc.weight, head.fc.weight)


@pytest.mark.parametrize("change", [{}, {"num_hidden_layers": 40}])
def test_a_head_that_names_the_family_of_its_layer_is_imported(
    change: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    """So the EAGLE authors publish their heads, one of them with its policy's depth. It was refused by its name."""
    config = read_policy_config(policy)
    head = a_drafter(tmp_path, config, draft_vocab_size=100)
    edit_config(tmp_path, architectures=["LlamaForCausalLM"], **change)
    found, _ = read_published_head(tmp_path, config)
    assert torch.equal(found.fc.weight, head.fc.weight)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)  # then it is another kind of model
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match="architectures must be LlamaForCausalLMEagle3"):
        read_published_head(tmp_path, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "hidden_size must be the policy's 64, got 128"),
        ({"vocab_size": 32000}, "vocab_size must be the policy's 264, got 32000"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}}, "at most the policy's 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "fc must take 2 x 64 columns, got 192"),
        ({"draft_vocab_size": 90}, "d2t must map to 90 ascending token ids"),
        ({"norm_before_fc": True}, "norm_before_fc must be false"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5}}, "rope_type must be one of default, llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rope_parameters.factor must be a number"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures must be LlamaForCausalLMEagle3"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type must be eagle3, got dflash"),
        ({"target_hidden_size": 128}, "target_hidden_size must be the policy's 64"),
        ({"intermediate_size": 100}, "midlayer.mlp"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(
    change: dict[str, Any], message: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_drafter(tmp_path / "head", read_policy_config(policy), draft_vocab_size=100)
    edit_config(tmp_path / "head", **change)
    assert (
        run("import", tmp_path / "head", "--policy", policy, "--out", tmp_path / "out") == CheckpointInvalid.exit_code
    )
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_all_mismatches_are_named_at_once(policy: Path, tmp_path: Path) -> None:
    config = read_policy_config(policy)
    a_drafter(tmp_path, config)
    edit_config(tmp_path, hidden_size=128, norm_before_fc=True)
    with pytest.raises(CheckpointInvalid, match=r"norm_before_fc.*hidden_size must be the policy's 64"):
        read_published_head(tmp_path, config)


@pytest.mark.parametrize(
    ("name", "message"),
    [("embed_tokens.weight", "embed_tokens must be the policy's"), ("lm_head.weight", "its own|own")],
)
def test_a_head_with_a_wrong_embedding_or_output_layer_is_refused(
    name: str, message: str, policy: Path, tmp_path: Path
) -> None:
    config = read_policy_config(policy)
    a_drafter(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    theirs = load_file(policy / "model.safetensors")
    # Wrong in both places: the output layer must not be the policy's, and the embedding must be the policy's embedding.
    tensors[name] = theirs["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=message):
        read_published_head(tmp_path, config)


def test_the_policy_s_tensors_are_those_of_its_index(tmp_path: Path) -> None:
    """The first file with such a tensor was read, as from a second copy of the weights."""
    folder = make_policy(tmp_path / "policy")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "weights.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, folder / "model.safetensors")
    a_drafter(tmp_path / "head", read_policy_config(folder))
    export = ("export", tmp_path / "head", "--format", "speculators", "--out", tmp_path / "out", "--policy", folder)
    assert run(*export) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(written, weights["model.embed_tokens.weight"])


def test_a_folder_without_a_head_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="specrl downloads nothing"):
        read_published_head(tmp_path / "none", read_policy_config(policy))
    assert run("export", policy, "--format", "eagle3", "--out", tmp_path / "out") == CheckpointInvalid.exit_code


def test_exporting_to_speculators_needs_the_policy(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_drafter(tmp_path / "ours", read_policy_config(policy))
    assert run("export", tmp_path / "ours", "--format", "speculators", "--out", tmp_path / "out") == 2
    assert "--policy must be given" in capsys.readouterr().err
