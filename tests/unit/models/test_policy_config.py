"""Models that the trainer supports are read, and all others are refused with every reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_model_folder
from transformers import AutoConfig

from specrl.errors import CheckpointInvalid
from specrl.models.policy_config import read_policy_config

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}

MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def a_config(folder: Path, **fields: Any) -> Any:
    return read_policy_config(a_model_folder(folder / "model", **fields))


def test_the_family_decides_whether_heads_are_normalised(tmp_path: Path) -> None:
    assert a_config(tmp_path / "a").family.has_qk_norm
    llama = a_config(tmp_path / "b", model_type="llama", architectures=["LlamaForCausalLM"])
    assert not llama.family.has_qk_norm


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MIMO = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


def test_biases_and_heads_of_a_family_are_counted(tmp_path: Path) -> None:
    """MiMo's published config names the biases that Qwen2's leaves to the architecture."""
    llama = a_config(tmp_path / "a", model_type="llama", architectures=["LlamaForCausalLM"])
    qwen2 = a_config(tmp_path / "b", **QWEN2)
    mimo = a_config(tmp_path / "c", **MIMO, attention_bias=True)
    biases = 2 * qwen2.head_dim * (6 + 2 * 2)  # layers; heads, and groups with keys and values
    assert qwen2.num_parameters - llama.num_parameters == biases == mimo.num_parameters - llama.num_parameters
    assert (llama.num_mtp_heads, qwen2.num_mtp_heads, mimo.num_mtp_heads) == (0, 0, 1)


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts"])
def test_mixtures_of_transformers_4_and_5_are_read(count: str, tmp_path: Path) -> None:
    found = a_config(tmp_path, **MIXTURE, **{count: 8})
    assert (found.experts.count, found.experts.per_token, found.active_intermediate_size) == (8, 2, 64)


@pytest.mark.parametrize("rope", [{"rope_parameters": YARN}, {"rope_scaling": YARN | {"type": "yarn"}}])
def test_rotary_settings_of_transformers_4_and_5_are_read(rope: dict[str, Any], tmp_path: Path) -> None:
    scaling = a_config(tmp_path, **rope).rope_scaling
    assert (scaling.kind, scaling.numbers["factor"], scaling.numbers["beta_fast"]) == ("yarn", 4, 32)


def test_of_both_rotary_settings_those_count_that_the_engine_takes(tmp_path: Path) -> None:
    """The trainer took the others, so both computed other positions."""
    found = a_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_scaling=YARN)
    engine = AutoConfig.from_pretrained(tmp_path / "model").rope_parameters
    assert found.rope_scaling.kind == engine["rope_type"] == "yarn"
    assert found.rope_theta == engine["rope_theta"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mixtral"}, "model_type must be one of qwen3, qwen2, mimo, llama, qwen3_moe"),
        (MIXTURE, "num_experts must be a number above 0"),
        (MIXTURE | {"mlp_only_layers": [0], "num_experts": 8}, r"mlp_only_layers must be empty, got \[0\]"),
        (MIXTURE | {"decoder_sparse_step": 2, "num_experts": 8}, "decoder_sparse_step must be 1, got 2"),
        ({"model_type": "llama"}, r"architectures must be \[LlamaForCausalLM\], got \['Qwen3ForCausalLM'\]"),
        ({"attention_bias": True}, "attention_bias must be false"),
        (QWEN2 | {"attention_bias": False}, "attention_bias must be true, got False"),
        (QWEN2 | {"head_dim": 32}, "head_dim must be hidden_size / num_attention_heads = 10, got 32"),
        (MIMO | {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be a whole number of heads, got -1"),
        (MIMO | {"num_nextn_predict_layers": True}, "num_nextn_predict_layers must be a whole number of heads"),
        ({"mlp_bias": True}, "mlp_bias must be false"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window must be false"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must be full_attention in every layer"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type must be one of default, llama3, yarn"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type must be one of .* got \\['yarn'\\]"),
        ({"rope_parameters": 5}, "a field of another type: 'int' object"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type must be one of .* got 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "original_max_position_embeddings must be a number"),
        ({"rope_parameters": YARN | {"factor": 3.0}}, "must be > 128 and at most 3.0 times that with YaRN, got 512"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        # Of a published Qwen3 of 8B. Trainer and vLLM ignored it alike, so the canary could not tell.
        (
            {"rope_parameters": YARN | {"attn_factor": 0.9}},
            "attn_factor must be absent: yarn has no such field, got 0.9",
        ),
        ({"rope_parameters": {"rope_theta": 1e6, "factor": 2.0}}, "factor must be absent: default has no such field"),
        ({"rope_theta": None}, "rope_theta must be given"),
        ({"quantization_config": {}}, "quantization_config must be absent"),
        ({"num_key_value_heads": None}, "num_key_value_heads must be a number above 0, got None"),
    ],
)
def test_unsupported_fields_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=message):
        a_config(tmp_path, **fields)


def test_all_unsupported_fields_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"hidden_act must be silu.*; attention_bias must be false"):
        a_config(tmp_path, hidden_act="relu", attention_bias=True)
