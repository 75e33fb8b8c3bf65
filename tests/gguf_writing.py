"""Writes GGUF files of tiny models, as llama.cpp's convert_hf_to_gguf.py does.

make_model       random weights and config of a family, as a Hugging Face folder has them
write_gguf       one file of them, in any type that is asked for
quantise_q4_k    the quantiser that the package gguf lacks
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quantize
from tokenizers import pre_tokenizers

LAYERS = 2
HIDDEN = 256  # a row of Q4_K is a multiple of 256
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())

_NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True)
class TinyModel:
    """A model of a Hugging Face folder. metadata: more keys of the GGUF file, or others in place of its own."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rope_factors: np.ndarray | None = None

    def with_metadata(self, **metadata: Any) -> TinyModel:
        """Return the model with other metadata; None leaves a key out. `__` in a key stands for a dot."""
        return replace(self, metadata={**self.metadata, **{k.replace("__", "."): v for k, v in metadata.items()}})


def make_model(model_type: str, *, is_tied: bool = False, seed: int = 0, **config: Any) -> TinyModel:
    """Make a random model."""
    whole: dict[str, Any] = {
        "architectures": [CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": 272,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": is_tied,
        **config,
    }
    if model_type == "qwen3_moe":
        whole |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    chance = np.random.default_rng(seed)
    weights = {
        name: chance.normal(1 if "norm" in name else 0, 0.1, shape).astype(np.float32)
        for name, shape in _list_shapes(whole).items()
    }
    return TinyModel(whole, weights)


def _list_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        part: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
        }
        if config["model_type"] == "qwen2":
            part |= {f"self_attn.{name}_proj.bias": (queries if name == "q" else keys,) for name in "qkv"}
        if config["model_type"].startswith("qwen3"):
            part |= {f"self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
        mlps = [("mlp", config["intermediate_size"])]
        if config["model_type"] == "qwen3_moe":
            part["mlp.gate.weight"] = (config["num_experts"], hidden)
            mlps = [(f"mlp.experts.{it}", config["moe_intermediate_size"]) for it in range(config["num_experts"])]
        for name, width in mlps:
            part |= {
                f"{name}.gate_proj.weight": (width, hidden),
                f"{name}.up_proj.weight": (width, hidden),
                f"{name}.down_proj.weight": (hidden, width),
            }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in part.items()}
    return shapes


def byte_tokenizer(vocab: int = 272) -> dict[str, Any]:
    """Metadata of a tokenizer with one token per byte, and one merge: a GGUF file has no empty lists."""
    tokens = [*SPECIAL, *BYTES, "ab"]
    padding = [f"[PAD{number}]" for number in range(len(tokens), vocab)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *padding],
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(BYTES) + 1) + [5] * len(padding),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def _list_metadata(model: TinyModel) -> dict[str, Any]:
    config = model.config
    name = ARCHITECTURES[config["model_type"]]
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if name == "llama":
        found |= {"rope.dimension_count": config["head_dim"], "vocab_size": config["vocab_size"]}
    if name == "qwen3moe":
        found |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    whole = {"general.architecture": name} | {f"{name}.{key}": value for key, value in found.items()}
    whole |= byte_tokenizer(config["vocab_size"])
    whole |= {key.replace("ARCH.", f"{name}."): value for key, value in model.metadata.items()}
    return {key: value for key, value in whole.items() if value is not None}


def list_gguf_tensors(model: TinyModel) -> dict[str, np.ndarray]:
    """Return the tensors under the names and in the order of rows that llama.cpp has."""
    found = dict[str, np.ndarray]()
    for name, weight in model.weights.items():
        value = weight
        if model.config["model_type"] == "llama" and "q_proj" in name:
            value = permute(weight, model.config["num_attention_heads"])
        if model.config["model_type"] == "llama" and "k_proj" in name:
            value = permute(weight, model.config["num_key_value_heads"])
        stem, _, suffix = name.rpartition(".")
        if ".experts." in stem:
            continue
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            found[f"blk.{layer}.{_NAMES[part]}.{suffix}"] = value
        else:
            found[f"{_NAMES[stem.removeprefix('model.') if 'embed' in stem else stem]}.{suffix}"] = value
    if model.config["model_type"] == "qwen3_moe":
        for layer in range(LAYERS):
            for part in ("gate", "up", "down"):
                prefix = f"model.layers.{layer}.mlp.experts"
                experts = [model.weights[f"{prefix}.{it}.{part}_proj.weight"] for it in range(4)]
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack(experts)
    if model.rope_factors is not None:
        found["rope_freqs.weight"] = model.rope_factors.astype(np.float32)
    return found


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of convert_hf_to_gguf.py."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: TinyModel, path: Path, kind: Kind = Kind.F32) -> Path:
    """Write a model. kind: of matrices; all else is float32, as in llama.cpp."""
    writer = GGUFWriter(path, None)
    for key, value in (
        {"general.architecture": ARCHITECTURES[model.config["model_type"]]} | _list_metadata(model)
    ).items():
        _add(writer, key, value)
    for name, values in list_gguf_tensors(model).items():
        # llama.cpp keeps vectors and routers in float32.
        if values.ndim == 1 or "ffn_gate_inp" in name or kind is Kind.F32:
            writer.add_tensor(name, np.ascontiguousarray(values))
        elif kind is Kind.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            rows = quantise_q4_k(values) if kind is Kind.Q4_K else quantize(values, kind)
            writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)


def write_folder(model: TinyModel, folder: Path) -> Path:
    """Write the model as a Hugging Face folder, without a tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    save_file(model.weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantise_q4_k(values: np.ndarray) -> np.ndarray:
    """Quantise as ggml's Q4_K: blocks of 256, each of eight parts with a scale and a minimum of 6 bits.

    Scales and minima are rounded up, so that an error is at most half a step of its part: `bound_q4_k`.
    """
    parts = values.reshape(-1, 8, 32).astype(np.float32)
    low = np.minimum(parts.min(-1), 0)
    steps = (parts.max(-1) - low) / 15
    scale, minimum = _round_up(steps.max(-1) / 63), _round_up((-low).max(-1) / 63)
    scales = np.clip(np.ceil(steps / np.maximum(scale, 1e-30)[:, None]), 0, 63)
    minima = np.clip(np.ceil(-low / np.maximum(minimum, 1e-30)[:, None]), 0, 63)
    width = (scale[:, None] * scales)[..., None]
    levels = np.clip(np.rint((parts + (minimum[:, None] * minima)[..., None]) / np.maximum(width, 1e-30)), 0, 15)
    packed = np.empty((len(parts), 144), np.uint8)
    packed[:, 0:2] = scale.astype(np.float16)[:, None].view(np.uint8)
    packed[:, 2:4] = minimum.astype(np.float16)[:, None].view(np.uint8)
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    packed[:, 4:8] = s[:, :4] | (s[:, 4:] >> 4 << 6)
    packed[:, 8:12] = m[:, :4] | (m[:, 4:] >> 4 << 6)
    packed[:, 12:16] = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    q = levels.astype(np.uint8).reshape(-1, 4, 2, 32)
    packed[:, 16:] = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    return packed.reshape(*values.shape[:-1], -1)


def bound_q4_k(values: np.ndarray) -> np.ndarray:
    """The largest error of `quantise_q4_k` at each value: half a step, which is a scale of 6 bits above the best."""
    parts = values.reshape(-1, 8, 32)
    low = np.minimum(parts.min(-1), 0)
    steps = (parts.max(-1) - low) / 15
    widest = steps.max(-1, keepdims=True) / 63 + (-low).max(-1, keepdims=True) / 63 / 15
    half = 0.5 * (steps + widest) * 1.01
    return np.broadcast_to(half[..., None], parts.shape).reshape(values.shape)


def _round_up(values: np.ndarray) -> np.ndarray:
    """Round up to float16."""
    rounded = values.astype(np.float16)
    return np.where(rounded < values, np.nextafter(rounded, np.float16(np.inf)), rounded).astype(np.float32)
