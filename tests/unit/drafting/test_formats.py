"""Published layouts of a head: in and out again, judged by the speculators library, and what does not fit a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import edit_config, make_policy

from specrl.drafting import convert
from specrl.drafting.formats import read_published
from specrl.drafting.head import Eagle3Head, HeadConfig, LayerShape, load_head, save_head
from specrl.drafting.online import PolicyEnds, starts_per_pass, training_time_test
from specrl.drafting.packing import HeadBatch, pack
from specrl.drafting.policy_config import PolicyConfig, read_policy_config
from specrl.errors import CheckpointInvalid

AUX = (1, 2, 4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


def a_drafter(folder: Path, policy: PolicyConfig, **changes: Any) -> Eagle3Head:
    """With other auxiliary layers than the default, and every parameter off its initial value."""
    head = Eagle3Head(HeadConfig(policy, changes.pop("draft_vocab_size", policy.vocab_size), AUX, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.1 * noise)
    if head.config.is_reduced:
        head.set_draft_vocabulary(torch.arange(0, policy.vocab_size, 2)[: head.config.draft_vocab_size])
    save_head(folder, head, torch.float32)
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
def test_head_that_is_taken_out_comes_back_the_same(
    layout: str, shape: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    head = a_drafter(tmp_path / "ours", read_policy_config(policy), **shape)
    assert run("export", tmp_path / "ours", "--format", layout, "--out", tmp_path / "theirs", "--policy", policy) == 0
    assert run("import", tmp_path / "theirs", "--policy", policy, "--out", tmp_path / "again") == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    assert load_head(tmp_path / "again", read_policy_config(policy)).config.shape == head.config.shape


@pytest.mark.filterwarnings("ignore")  # speculators and what it imports warn about themselves
@pytest.mark.parametrize("shape", SHAPES)
def test_speculators_loads_what_is_exported_and_computes_the_same(
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
        ours = our_logits(head, states, policy)
    torch.testing.assert_close(logits[0][0, 1:10], ours, rtol=1e-4, atol=1e-4)


def edit_index(policy: Path) -> None:
    """speculators finds a verifier's tensors by the index that large models come with."""
    names = load_file(policy / "model.safetensors").keys()
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))


def the_states(config: PolicyConfig) -> HeadBatch:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 12, 4 * config.hidden_size, generator=generator)
    tokens = torch.randint(0, config.vocab_size, (1, 12), generator=generator)
    width = 3 * config.hidden_size
    return HeadBatch(tokens, hidden[..., :width], hidden[..., width:], torch.tensor([2]), torch.tensor([12]))


def our_logits(head: Eagle3Head, states: HeadBatch, policy: Path) -> torch.Tensor:
    """Of pass 0 at every start: what `training_time_test` sees, caught at the output layer."""
    weights = load_file(policy / "model.safetensors")
    ends = PolicyEnds(weights["model.embed_tokens.weight"], weights["model.norm.weight"], weights["lm_head.weight"])
    caught: list[torch.Tensor] = []
    handle = head.lm_head.register_forward_hook(lambda _module, _inputs, output: caught.append(output.detach()))
    training_time_test(head, ends, pack(states), starts_per_pass([10], 1))
    handle.remove()
    return caught[0]


def test_layouts_of_others_are_read_by_any_of_their_names(policy: Path, tmp_path: Path) -> None:
    config = read_policy_config(policy)
    head = a_drafter(tmp_path, config, draft_vocab_size=100)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    theirs = {f"model.{name.replace('midlayer.', 'layers.0.')}": tensor for name, tensor in tensors.items()}
    theirs["embed_tokens.weight"] = load_file(policy / "model.safetensors")["model.embed_tokens.weight"]
    torch.save(theirs, tmp_path / "pytorch_model.bin")
    edit_config(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": list(AUX)}, head_dim=None, rope_theta=1e4)
    found, dtype = read_published(tmp_path, config)
    assert dtype == torch.float32
    for name, tensor in head.tensors(torch.float32).items():
        assert torch.equal(found.tensors(torch.float32)[name], tensor), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "hidden_size must be the policy's 64, got 128"),
        ({"vocab_size": 32000}, "vocab_size must be the policy's 264, got 32000"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}}, "at most the policy's 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "fc must take 2 x 64 columns, got 192"),
        ({"draft_vocab_size": 90}, "d2t must lead to 90 ascending tokens"),
        ({"norm_before_fc": True}, "norm_before_fc must be false"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope type must be default, got llama3"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures must be LlamaForCausalLMEagle3"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type must be eagle3, got dflash"),
        ({"target_hidden_size": 128}, "target_hidden_size must be the policy's 64"),
        ({"intermediate_size": 100}, "midlayer.mlp"),
    ],
)
def test_head_that_does_not_fit_is_refused_by_what_is_wrong(
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


def test_everything_that_is_wrong_is_said_at_once(policy: Path, tmp_path: Path) -> None:
    config = read_policy_config(policy)
    a_drafter(tmp_path, config)
    edit_config(tmp_path, hidden_size=128, norm_before_fc=True)
    with pytest.raises(CheckpointInvalid, match=r"norm_before_fc.*hidden_size must be the policy's 64"):
        read_published(tmp_path, config)


@pytest.mark.parametrize(
    ("name", "message"),
    [("embed_tokens.weight", "embed_tokens must be the policy's"), ("lm_head.weight", "its own|own")],
)
def test_head_with_a_wrong_end_is_refused(name: str, message: str, policy: Path, tmp_path: Path) -> None:
    config = read_policy_config(policy)
    a_drafter(tmp_path, config)
    tensors, theirs = load_file(tmp_path / "model.safetensors"), load_file(policy / "model.safetensors")
    tensors[name] = theirs["lm_head.weight"]  # as the head's output layer it is the policy's; as the embedding, another
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=message):
        read_published(tmp_path, config)


def test_folder_without_a_head_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="nothing is downloaded"):
        read_published(tmp_path / "none", read_policy_config(policy))
    assert run("export", policy, "--format", "eagle3", "--out", tmp_path / "out") == CheckpointInvalid.exit_code


def test_speculators_folder_must_name_its_policy(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_drafter(tmp_path / "ours", read_policy_config(policy))
    assert run("export", tmp_path / "ours", "--format", "speculators", "--out", tmp_path / "out") == 2
    assert "--policy must be given" in capsys.readouterr().err
