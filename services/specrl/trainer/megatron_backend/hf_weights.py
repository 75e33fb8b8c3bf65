"""A policy between Hugging Face folders and Megatron shards: one total name map, used in both directions.

Megatron interleaves q, k and v by key/value group, fuses gate with up, pads the vocabulary, and shards by columns
(output features), rows (input features) or vocabulary. Experts are dealt out whole. `load` and `export` are inverse to
each other, bit for bit.
A parameter that is not in the map is an error, never skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from specrl.drafting.policy_config import PolicyConfig
from specrl.errors import CheckpointInvalid
from specrl.files import read_object
from specrl.trainer import lora

# Megatron name -> (Hugging Face names, layout). The layer_norm_weight rows are Transformer Engine's fused modules.
_LAYER: dict[str, tuple[tuple[str, ...], str]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.weight": (
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), "whole"),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), "whole"),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "rows"),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "rows"),
    "mlp.router.weight": (("mlp.gate.weight",), "whole"),
}
_EXPERT: dict[str, tuple[tuple[str, ...], str]] = {
    "linear_fc1.weight": (("gate_proj.weight", "up_proj.weight"), "stacked"),
    "linear_fc2.weight": (("down_proj.weight",), "whole"),
}
_ENDS: dict[str, tuple[tuple[str, ...], str]] = {
    "embedding.word_embeddings.weight": (("model.embed_tokens.weight",), "vocabulary"),
    "decoder.final_layernorm.weight": (("model.norm.weight",), "whole"),
    "output_layer.weight": (("lm_head.weight",), "vocabulary"),
}
Of = Callable[[torch.Tensor], torch.Tensor]
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_IN_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")

_IN_ADAPTER = re.compile(r"(.+)\.parametrizations\.weight\.0\.(down|up)\.(\d+)")


@dataclass(frozen=True)
class Mapped:
    """One Megatron parameter and what it is made of."""

    parameter: torch.Tensor
    names: tuple[str, ...]
    layout: str
    megatron_name: str


@dataclass(frozen=True)
class TensorParallel:
    """Place of this rank among those that share a tensor."""

    rank: int
    size: int
    group: dist.ProcessGroup | None


def weight_map(model: torch.nn.Module, *, is_adapters: bool = False) -> list[Mapped]:
    """Every parameter of a GPTModel (unwrapped) with its Hugging Face names, in order; or those of its adapters.

    Raises CheckpointInvalid for a parameter without a name.
    """
    found = []
    for name, parameter in model.named_parameters():
        adapter = _IN_ADAPTER.fullmatch(name)
        if (adapter is not None) == is_adapters:
            names, layout = _named(name) if adapter is None else _of_adapter(adapter)
            found.append(Mapped(parameter, names, layout, name))
    return found


def _of_adapter(found: re.Match[str]) -> tuple[tuple[str, ...], str]:
    """Of one factor of a weight's low-rank update, which every tensor parallel rank has whole."""
    weight = _named(f"{found[1]}.weight")[0][int(found[3])]
    return (lora.names(weight)[("down", "up").index(found[2])],), "whole"


def _named(name: str) -> tuple[tuple[str, ...], str]:
    """Hugging Face names and layout of a Megatron parameter. Raises CheckpointInvalid for one that has none."""
    in_layer = _IN_LAYER.fullmatch(name.replace(".parametrizations.weight.original", ".weight"))
    in_expert = _IN_EXPERT.fullmatch(in_layer[2]) if in_layer else None
    prefix, table, rest = "", _ENDS, name
    if in_layer:
        prefix, table, rest = f"model.layers.{in_layer[1]}.", _LAYER, in_layer[2]
    if in_expert:
        prefix, table, rest = f"{prefix}mlp.experts.{in_expert[1]}.", _EXPERT, in_expert[2]
    if rest not in table:
        raise CheckpointInvalid(f"every Megatron parameter must have a Hugging Face name, got {name}; extend the map")
    parts, layout = table[rest]
    return tuple(prefix + part for part in parts), layout


def full_shapes(config: PolicyConfig, item: Mapped) -> list[tuple[int, ...]]:
    """Shapes, without sharding and padding, of a parameter's Hugging Face tensors, in the order of its names."""
    hidden, dim = config.hidden_size, config.head_dim
    if item.layout == "qkv":
        return [(n * dim, hidden) for n in (config.num_heads, config.num_groups, config.num_groups)]
    if item.layout == "gate_up":
        return [(config.intermediate_size, hidden)] * 2
    if item.layout == "stacked":
        return [(item.parameter.shape[0] // 2, hidden)] * 2
    if item.layout == "vocabulary":
        return [(config.vocab_size, hidden)]
    if item.layout == "rows":
        wide = config.intermediate_size if "down_proj" in item.names[0] else config.num_heads * dim
        return [(hidden, wide)]
    return [tuple(item.parameter.shape)]


def shard(config: PolicyConfig, item: Mapped, parts: list[torch.Tensor], parallel: TensorParallel) -> torch.Tensor:
    """This rank's parameter out of full Hugging Face tensors."""
    if item.layout == "whole":
        return parts[0]
    if item.layout == "rows":
        return parts[0].chunk(parallel.size, 1)[parallel.rank]
    if item.layout == "gate_up":
        return torch.cat([part.chunk(parallel.size)[parallel.rank] for part in parts])
    if item.layout == "stacked":
        return torch.cat(parts)
    if item.layout == "vocabulary":
        padded = item.parameter.shape[0] * parallel.size - config.vocab_size
        whole = torch.cat([parts[0], parts[0].new_zeros(padded, config.hidden_size)])
        return whole.chunk(parallel.size)[parallel.rank]
    groups, dim, hidden = config.num_groups, config.head_dim, config.hidden_size
    by_group = [part.view(groups, -1, dim, hidden) for part in parts]
    return torch.cat(by_group, 1).reshape(-1, hidden).chunk(parallel.size)[parallel.rank]


def unshard(config: PolicyConfig, item: Mapped, shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Full Hugging Face tensors out of the shards of all ranks. The inverse of `shard`."""
    if item.layout == "whole":
        return [shards[0]]
    if item.layout == "rows":
        return [torch.cat(shards, 1)]
    if item.layout == "gate_up":
        halves = [part.chunk(2) for part in shards]
        return [torch.cat([half[0] for half in halves]), torch.cat([half[1] for half in halves])]
    if item.layout == "stacked":
        return list(shards[0].chunk(2))
    if item.layout == "vocabulary":
        return [torch.cat(shards)[: config.vocab_size]]
    repeats, dim, hidden = config.num_heads // config.num_groups, config.head_dim, config.hidden_size
    by_group = torch.cat(shards).view(config.num_groups, repeats + 2, dim, hidden)
    return [part.reshape(-1, hidden) for part in torch.split(by_group, [repeats, 1, 1], 1)]


def itself(parameter: torch.Tensor) -> torch.Tensor:
    """What `load` fills and `export` yields unless told otherwise."""
    return parameter


@torch.no_grad()
def load(
    items: Sequence[Mapped], config: PolicyConfig, parallel: TensorParallel, folder: Path, of: Of = itself
) -> None:
    """Fill parameters from a folder; with `of`, what belongs to each (a master copy, a moment).

    Raises CheckpointInvalid when a tensor is missing or unfit.
    """
    reader = FolderReader(folder)
    for item in items:
        parts = [reader.read(name) for name in item.names]
        for name, part, shape in zip(item.names, parts, full_shapes(config, item), strict=True):
            if tuple(part.shape) != shape:
                raise CheckpointInvalid(
                    f"{name} must be {shape}, got {tuple(part.shape)} in {folder}; it is of another model"
                )
        of(item.parameter).copy_(shard(config, item, parts, parallel))


@torch.no_grad()
def export(
    items: Sequence[Mapped],
    config: PolicyConfig,
    parallel: TensorParallel,
    wanted: AbstractSet[str] | None = None,
    of: Of = itself,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, full tensor) in map order, gathering one parameter at a time; `wanted` names alone.

    A collective over the tensor parallel group: every rank must exhaust it.
    """
    for item in items:
        if wanted is not None and wanted.isdisjoint(item.names):
            continue
        mine = of(item.parameter).detach().contiguous()
        shards = [mine]
        if parallel.size > 1 and item.layout not in {"whole", "stacked"}:
            shards = [torch.empty_like(mine) for _ in range(parallel.size)]
            dist.all_gather(shards, mine, group=parallel.group)
        yield from zip(item.names, unshard(config, item, shards), strict=True)


class FolderReader:
    """Tensors of a Hugging Face folder by name, from one file or from an index of several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, Any] = {}
        index = path / "model.safetensors.index.json"
        self._files: dict[str, str] = {}
        if index.exists():
            self._files = read_object(index)["weight_map"]

    def read(self, name: str) -> torch.Tensor:
        """One tensor. Raises CheckpointInvalid."""
        file = self._files.get(name, "model.safetensors")
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, framework="pt")
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointInvalid(
                f"model.path must hold {name} in safetensors, got {self.path / file}: {error}; complete the checkpoint"
            ) from error
        return tensor
