"""Native heads compute what vLLM's MiMo heads compute, pass by pass, and other heads are refused before a run.

The reference is the formula of vLLM 0.32 (models/mimo_mtp.py) around transformers' Qwen2 layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run_files import CONFIG, a_model_folder, a_run, write_safetensors
from tests.unit.drafting.builders import HIDDEN, a_policy, some_ends, some_last, some_states
from torch.nn import functional
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from specrl.drafting import preflight
from specrl.drafting.mtp.head import MtpHeads
from specrl.drafting.mtp.kind import HEADS_PREFIX, list_head_shapes
from specrl.drafting.online import DrafterTrainer
from specrl.drafting.packing import LessonBatch, pack_rows
from specrl.drafting.vocabulary import WHOLE, PolicyOutput
from specrl.errors import CheckpointInvalid
from specrl.models import read_models
from specrl.models.policy_config import FAMILIES, PolicyConfig, parse_policy_config
from specrl.spec import parse_spec

PASSES = 3
POLICY = a_policy(family=FAMILIES["mimo"], num_mtp_heads=2, head_dim=HIDDEN // 4)
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
MIMO = {
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "num_attention_heads": 4,
    "num_nextn_predict_layers": 1,
}


def some_heads(seed: int = 0, policy: PolicyConfig = POLICY) -> MtpHeads:
    """Two heads whose parameters all differ from their initial values, so that a forgotten one is noticed."""
    heads = MtpHeads(policy)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.2 * noise)
    heads.connect_output(lambda: PolicyOutput(WHOLE, some_ends().lm_head_VH))
    return heads


def some_lessons(prompts: list[int], lengths: list[int]) -> LessonBatch:
    """Lessons of a policy whose last state is the only one that the drafter reads."""
    return some_states(prompts, lengths)._replace(aux_BSA=some_last(lengths))


def reference(
    heads: MtpHeads, rope: Mapping[str, Any]
) -> Callable[[torch.Tensor, torch.Tensor, int], list[torch.Tensor]]:
    """Return a function of one sequence's states, next embeddings and a start: the logits [V] of each pass."""
    tensors = {name.removeprefix(f"{HEADS_PREFIX}0."): x for name, x in heads.collect_tensors(torch.float32).items()}
    config = Qwen2Config(
        hidden_size=HIDDEN,
        intermediate_size=POLICY.intermediate_size,
        num_attention_heads=POLICY.num_heads,
        num_key_value_heads=POLICY.num_groups,
        max_position_embeddings=16,
        rms_norm_eps=POLICY.norm_epsilon,
        rope_parameters={"rope_theta": POLICY.rope_theta, **rope},
        attn_implementation="eager",
    )
    layer = Qwen2DecoderLayer(config, 0)
    layer.load_state_dict({name: x for name, x in tensors.items() if name in layer.state_dict()})
    rotary = Qwen2RotaryEmbedding(config=config)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (HIDDEN,), tensors[f"{name}.weight"], POLICY.norm_epsilon)

    @torch.no_grad()
    def draft(hidden_SH: torch.Tensor, next_SH: torch.Tensor, start: int) -> list[torch.Tensor]:
        hidden_SH = hidden_SH[: start + 1]
        found = []
        for step in range(PASSES):
            count = start + 1 + step
            position_1S = torch.arange(count)[None]
            masked_SH = torch.where(position_1S[0, :, None] == 0, 0, next_SH[:count])
            both = torch.cat([norm(hidden_SH, "hidden_layernorm"), norm(masked_SH, "token_layernorm")], -1)
            causal = torch.full((count, count), float("-inf")).triu(1)[None, None]
            out = layer(
                functional.linear(both, tensors["input_proj.weight"])[None],
                attention_mask=causal,
                position_embeddings=rotary(both[None], position_1S),
            )
            out_H = norm(out[0, -1], "final_layernorm")
            found.append(heads.compute_logits(out_H))
            hidden_SH = torch.cat([hidden_SH, out_H[None]])
        return found

    return draft


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, STRETCHED], ids=["plain", "YaRN"])
def test_every_pass_equals_vllms_formula_with_transformers_layer(rope: dict[str, Any]) -> None:
    """The first start is position 0, whose embedding vLLM zeroes, and which every later position attends to."""
    fields = (
        CONFIG
        | MIMO
        | {"head_dim": None, "max_position_embeddings": 16, "rope_parameters": {"rope_theta": 1e4, **rope}}
    )
    heads = some_heads(policy=replace(POLICY, rope_scaling=parse_policy_config(fields, Path("nowhere")).rope_scaling))
    prompts, lengths = [1, 3], [9, 6]
    batch = some_lessons(prompts, lengths)
    rows = pack_rows(batch)
    draft = reference(heads, rope)
    with torch.no_grad():
        passes = list(heads.draft_logits(rows, PASSES))
    for j, found_EV in enumerate(passes):
        expected = []
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            next_SH = functional.pad(batch.embedding_BSH[i, 1:], (0, 0, 0, PASSES))
            starts = range(prompt - 1, length - 2 - j)
            expected.append([draft(batch.aux_BSA[i], next_SH, start)[j] for start in starts])
        flat = [logits for some in expected for logits in some]
        # Rows are packed from the longest sequence down, which is the order here.
        torch.testing.assert_close(found_EV, torch.stack(flat), rtol=1e-4, atol=1e-4)


def test_the_policys_layers_get_no_gradient_and_only_the_first_head_is_trained() -> None:
    heads = some_heads()
    before = {name: x.clone() for name, x in heads.collect_tensors(torch.float32).items()}
    assert set(before) == set(list_head_shapes(POLICY))
    assert all(before[name].shape == shape for name, shape in list_head_shapes(POLICY).items())
    trainer = DrafterTrainer(heads, 1e-2, 1.0, PASSES)
    batch = some_lessons([1, 3], [9, 6])
    for _ in range(2):
        trainer.begin_update([8, 3])
        trainer.accumulate_gradients(batch)
        trainer.finish_update()
    changed = {name for name, x in heads.collect_tensors(torch.float32).items() if not torch.equal(x, before[name])}
    assert changed == {name for name in before if name.startswith(f"{HEADS_PREFIX}0.")}
    other = DrafterTrainer(some_heads(1), 1e-2, 1.0, PASSES)
    other.load_state(trainer.collect_state())
    assert all(torch.equal(x, other.collect_state()[name]) for name, x in trainer.collect_state().items())
    with pytest.raises(CheckpointInvalid, match=r"the policy's heads must have the sizes of its layers, got other"):
        heads.load_tensors({"model.mtp_layers.0.input_proj.weight": torch.zeros(1)})


def problems_of(folder: Path, shapes: dict[str, tuple[int, ...]], **config: object) -> str:
    """Check a run with mtp whose policy folder has these tensors of heads. Returns what is refused."""
    policy = a_model_folder(folder / "model", **MIMO | config)
    write_safetensors(policy / "model.safetensors", {"model.embed_tokens.weight": (264, 64), **shapes})
    speculation = {"mtp": {"numDraftTokens": 3}}
    spec = parse_spec(a_run(folder, generation={"sampling": {"maxTokens": 16}, "speculation": speculation}))
    return "\n".join(map(str, preflight.check(spec, read_models(spec))))


def shapes_of(heads: int = 1) -> dict[str, tuple[int, ...]]:
    """The tensors of a MiMo like that of `problems_of`."""
    fields = MIMO | {"num_nextn_predict_layers": heads}
    config = CONFIG | fields
    return list_head_shapes(parse_policy_config(config, Path("nowhere")))


def test_heads_that_the_engine_would_not_run_as_trained_are_refused(tmp_path: Path) -> None:
    whole = shapes_of()
    assert problems_of(tmp_path / "whole", whole) == ""
    narrow = whole | {f"{HEADS_PREFIX}0.input_proj.weight": (64, 64)}
    assert "heads of the sizes in its config.json, got 1 other tensors" in problems_of(tmp_path / "narrow", narrow)
    lacking = {name: shape for name, shape in whole.items() if not name.endswith("q_proj.bias")}
    assert f"{HEADS_PREFIX}0.self_attn.q_proj.bias missing" in problems_of(tmp_path / "lacking", lacking)
    own = whole | {f"{HEADS_PREFIX}0.shared_head.weight": (264, 64)}
    assert "shared_head.weight, which no such head has" in problems_of(tmp_path / "own", own)
    fewer = problems_of(tmp_path / "fewer", whole, num_nextn_predict_layers=2)
    assert "num_nextn_predict_layers=2 heads that its config.json says, got 1" in fewer
    assert "says, got 2 (model.mtp_layers.N for N = 0, 1)" in problems_of(tmp_path / "more", shapes_of(2))
    assert "says, got 0 (model.mtp_layers.N for N = none)" in problems_of(tmp_path / "none", {})
    assert "an output layer of its own" in problems_of(tmp_path / "tied", whole, tie_word_embeddings=True)


def test_heads_of_a_family_that_is_only_served_are_refused(tmp_path: Path) -> None:
    served = problems_of(tmp_path, {}, model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"])
    assert "a policy whose heads the trainer can train, mimo, got model_type=glm4_moe" in served
