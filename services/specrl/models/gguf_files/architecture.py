"""Makes config.json of a GGUF file's metadata, and finds the tensors of a Hugging Face folder in it.

Names and metadata are those that llama.cpp's convert_hf_to_gguf.py writes. Whatever would change what the model
computes and is not known here is refused: a metadata key, a tensor, a shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from specrl.models.gguf_files.header import DOWNLOAD_AGAIN, GgufHeader, GgufInvalid, GgufTensor
from specrl.models.policy_config import FAMILIES

USE_ORIGINAL = "use the original model in the format of Hugging Face"

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""`model_type` of config.json by `general.architecture`. llama.cpp has no MiMo."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's scaling of positions: a divisor of each rotary frequency, in place of metadata."""

# Metadata below `ARCHITECTURE.` that is read here, or that changes nothing.
_KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",
}
# Metadata that must have one of these values, if given: others would change what is computed.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_gating_func": (1,),  # softmax
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "use_parallel_residual": (False,),
}
_LLAMA3_LENGTHS = (8192, 4096, 16384, 2048, 1024, 512, 256, 128, 64, 32)


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the GGUF file, and the tensors of the folder that it becomes: several for a layer's experts.

    heads: number of heads whose rows llama.cpp has reordered; 0 for none.
    """

    source: GgufTensor
    names: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int = 0


class _Metadata:
    """The metadata of one architecture, by keys without its name. Raises GgufInvalid for values of another type."""

    def __init__(self, header: GgufHeader) -> None:
        self._all = header.metadata
        self.architecture = str(header.metadata.get("general.architecture"))

    def get(self, key: str) -> Any:
        return self._all.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.get(key)
        if found is None and default is not None:
            return default
        if type(found) is not int or not 0 < found < 1 << 31:
            raise GgufInvalid(
                f"{self.architecture}.{key} must be one whole number above 0, got {_shorten(found)}", USE_ORIGINAL
            )
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.get(key)
        if found is None and default is not None:
            return default
        if type(found) not in {int, float} or not 0 < found < float("inf"):
            raise GgufInvalid(
                f"{self.architecture}.{key} must be a number above 0, got {_shorten(found)}", USE_ORIGINAL
            )
        return float(found)

    def check_keys(self) -> None:
        """Refuse every key of the architecture that is not known, since it may change what the model computes."""
        prefix = f"{self.architecture}."
        for name, value in self._all.items():
            key = name.removeprefix(prefix)
            if key == name or key in _KNOWN_KEYS or value in _NEUTRAL_VALUES.get(key, ()):
                continue
            raise GgufInvalid(f"{name} is {_shorten(value)}, which specrl does not compute", USE_ORIGINAL)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def build_config(header: GgufHeader, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """Build config.json, without the numbers of special tokens.

    rope_factors: content of `rope_freqs.weight`; None if the file has none. Raises GgufInvalid for what specrl does not
    train. Shapes are checked by `plan_tensors`.
    """
    metadata = _Metadata(header)
    kind = header.metadata.get("general.type", "model")
    # In tuples: a value from a file may be a list, which cannot be looked up in a set.
    if kind != "model" or header.metadata.get("split.count", 1) not in (0, 1):
        raise GgufInvalid(
            "it is a part of a model" if kind == "model" else f"general.type is {_shorten(kind)}",
            "use the whole model in one file (llama-gguf-split --merge joins parts)",
        )
    if metadata.architecture not in MODEL_TYPES:
        raise GgufInvalid(
            f"general.architecture must be one of {', '.join(MODEL_TYPES)}, got {_shorten(metadata.architecture)}",
            "use a model of a family that specrl trains (docs/models.md)",
        )
    metadata.check_keys()
    model_type = MODEL_TYPES[metadata.architecture]
    family = FAMILIES[model_type]
    heads = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", hidden_size // heads)
    if head_dim % 2:
        raise GgufInvalid(f"heads must have an even width, got {head_dim}", USE_ORIGINAL)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(key, head_dim) != head_dim:
            raise GgufInvalid(
                f"{metadata.architecture}.{key} must be {head_dim}, got {metadata.get(key)}", USE_ORIGINAL
            )
    embedding = header.tensors.get("token_embd.weight")
    config = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0] if embedding is not None else metadata.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),  # llama.cpp's default
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": family.has_qkv_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "use_cache": True,
    }
    if metadata.get("vocab_size") not in (None, config["vocab_size"]):
        raise GgufInvalid(
            f"{metadata.architecture}.vocab_size must be {config['vocab_size']}, the rows of token_embd.weight, "
            f"got {_shorten(metadata.get('vocab_size'))}",
            DOWNLOAD_AGAIN,
        )
    if model_type == "llama":
        config["mlp_bias"] = False
    else:
        config["use_sliding_window"] = False
    if family.is_mixture:
        config |= {
            "num_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": metadata.integer("expert_used_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp has no model of this family without
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    elif metadata.get("expert_count") not in (None, 0):
        raise GgufInvalid(f"it is a mixture of {_shorten(metadata.get('expert_count'))} experts", USE_ORIGINAL)
    scaling = _build_rope_scaling(metadata, config, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _build_rope_scaling(
    metadata: _Metadata, config: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    """Build `rope_scaling` of config.json; None for positions that are not scaled."""
    kind = metadata.get("rope.scaling.type")
    if factors is not None and kind in (None, "none"):
        if 2 * len(factors) != config["head_dim"]:
            raise GgufInvalid(f"{ROPE_FACTORS} must have {config['head_dim'] // 2} numbers", DOWNLOAD_AGAIN)
        return None if np.all(factors == 1) else _fit_llama3_scaling(config, factors)
    if factors is not None or kind not in (None, "none", "yarn"):
        raise GgufInvalid(
            f"{metadata.architecture}.rope.scaling.type must be none or yarn, got {_shorten(kind)}"
            + (f" beside {ROPE_FACTORS}" if factors is not None else ""),
            USE_ORIGINAL,
        )
    if kind != "yarn":
        return None
    scaling = {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if metadata.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = metadata.number(f"rope.scaling.yarn_{name}")
    return scaling


def _fit_llama3_scaling(config: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Find the parameters of Llama 3's scaling of which `rope_freqs.weight` was computed.

    They are not in the file. Several sets may give the same divisors, and so the same positions; one of them is
    returned. Raises GgufInvalid if no set gives these divisors.
    """
    lowest, highest = 1.0, 4.0  # of every Llama 3
    factor = float(factors.max())
    candidates = [(lowest, highest, length) for length in _LLAMA3_LENGTHS]
    # Between the two wavelengths, 1 / divisor is linear in the frequency. So two such divisors give both lengths.
    frequencies = _rope_frequencies(config)
    between = (factors > 1) & (factors < factor)
    if np.count_nonzero(between) >= 2:
        smooth = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(frequencies[between] / (2 * math.pi), smooth, 1)
        # smooth = (length * frequency / 2 pi - lowest) / (highest - lowest), and lowest = 1
        if offset < 0:
            width = -lowest / offset
            candidates.insert(0, (lowest, round(lowest + width, 4), round(slope * width)))
    for low, high, length in candidates:
        if low < high and length > 0:
            made = compute_llama3_divisors(config, factor, low, high, length)
            if np.allclose(made, factors, rtol=1e-5, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": length,
                }
    raise GgufInvalid(f"{ROPE_FACTORS} is none of Llama 3's scalings of positions", USE_ORIGINAL)


def _rope_frequencies(config: Mapping[str, Any]) -> np.ndarray:
    head_dim = config["head_dim"]
    frequencies: np.ndarray = config["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return frequencies


def compute_llama3_divisors(
    config: Mapping[str, Any], factor: float, lowest: float, highest: float, length: int
) -> np.ndarray:
    """Compute the divisor of each rotary frequency as convert_hf_to_gguf.py does (`LlamaModel`). Shape: [head_dim / 2].

    lowest, highest: low_freq_factor and high_freq_factor. length: original_max_position_embeddings.
    """
    turns = length * _rope_frequencies(config) / (2 * math.pi)  # of each frequency in the original context
    smooth = np.clip((turns - lowest) / (highest - lowest), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def plan_tensors(header: GgufHeader, config: Mapping[str, Any]) -> list[PlannedTensor]:
    """Find every tensor of the folder. Raises GgufInvalid for one that is missing, unknown or of another shape."""
    if config["num_hidden_layers"] > len(header.tensors) or config.get("num_experts", 0) > _count_experts(header):
        raise GgufInvalid("it has fewer tensors than its metadata says", DOWNLOAD_AGAIN)
    planned = list[PlannedTensor]()
    for name, shape in _list_shapes(config):
        tensor = header.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = f"of the shape {list(tensor.shape)}" if tensor is not None else "none"
            raise GgufInvalid(f"{name} must have the shape {list(shape)}, got {found}", DOWNLOAD_AGAIN)
        planned.append(_plan_tensor(tensor, config))
    known = {it.source.name for it in planned} | {ROPE_FACTORS}
    unknown = [name for name in header.tensors if name not in known]
    if unknown:
        raise GgufInvalid(
            f"it has {len(unknown)} tensors that models of this family do not have, {_shorten(unknown[0])} among them",
            USE_ORIGINAL,
        )
    return planned


def _count_experts(header: GgufHeader) -> int:
    tensor = header.tensors.get("blk.0.ffn_gate_exps.weight")
    return tensor.shape[0] if tensor is not None else 0


def _list_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor that a GGUF file of this config has."""
    family = FAMILIES[config["model_type"]]
    hidden = config["hidden_size"]
    width = config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    yield "token_embd.weight", (config["vocab_size"], hidden)
    yield "output_norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (config["vocab_size"], hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, queries),
    }
    if family.has_qkv_bias:
        layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if family.has_qk_norm:
        layer |= {"attn_q_norm.weight": (config["head_dim"],), "attn_k_norm.weight": (config["head_dim"],)}
    if family.is_mixture:
        experts = config["num_experts"]
        width = config["moe_intermediate_size"]
        layer |= {
            "ffn_gate_inp.weight": (experts, hidden),
            "ffn_gate_exps.weight": (experts, width, hidden),
            "ffn_up_exps.weight": (experts, width, hidden),
            "ffn_down_exps.weight": (experts, hidden, width),
        }
    else:
        layer |= {
            "ffn_gate.weight": (width, hidden),
            "ffn_up.weight": (width, hidden),
            "ffn_down.weight": (hidden, width),
        }
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"blk.{number}.{name}", shape


def _plan_tensor(tensor: GgufTensor, config: Mapping[str, Any]) -> PlannedTensor:
    stem, _, suffix = tensor.name.rpartition(".")
    if stem in _TOP:
        return PlannedTensor(tensor, (f"{_TOP[stem]}.{suffix}",), tensor.shape)
    _, layer, part = stem.split(".")
    name = f"model.layers.{layer}.{_IN_LAYER[part]}.{suffix}"
    if "*" in name:
        names = tuple(name.replace("*", str(expert)) for expert in range(tensor.shape[0]))
        return PlannedTensor(tensor, names, tensor.shape[1:])
    heads = 0
    if config["model_type"] == "llama" and part in {"attn_q", "attn_k"}:
        heads = config["num_attention_heads"] if part == "attn_q" else config["num_key_value_heads"]
    return PlannedTensor(tensor, (name,), tensor.shape, heads)


def restore_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the rows of a llama's query or key projection back into Hugging Face's order.

    llama.cpp rotates neighbouring rows of a head, and transformers the two halves of a head (`LlamaModel.permute` of
    convert_hf_to_gguf.py). weight: [heads * head_dim, hidden_size].
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def describe_kinds(header: GgufHeader) -> str:
    """Describe the types of the matrices, as in `Q4_1, Q8_0`: the one with most values first."""
    sizes = dict[GGMLQuantizationType, int]()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + math.prod(tensor.shape)
    return ", ".join(kind.name for kind in sorted(sizes, key=lambda kind: -sizes[kind]))
