"""A policy between Hugging Face folders and Megatron shards: one total name map, used in both directions.

Megatron interleaves q, k and v by key/value group, fuses gate with up, pads the vocabulary, and shards by columns
(output features), rows (input features) or vocabulary. Experts are dealt out whole. `load` and `export` are inverse to
each other, bit for bit. A parameter that is not in the map is an error, never skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from specrl.drafting.policy_config import PolicyConfig
from specrl.errors import CheckpointInvalid
from specrl.files import read_object
from specrl.trainer import lora
from specrl.trainer.megatron_backend.exchange import exchange
from specrl.trainer.megatron_backend.groups import Groups, Place

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
_EMBEDDING = "embedding.word_embeddings.weight"
_ENDS: dict[str, tuple[tuple[str, ...], str]] = {
    _EMBEDDING: (("model.embed_tokens.weight",), "vocabulary"),
    "decoder.final_layernorm.weight": (("model.norm.weight",), "whole"),
    "output_layer.weight": (("lm_head.weight",), "vocabulary"),
}
_FIRST, _LAST = -1, 1 << 30
_EXPERTS = "mlp.experts.local_experts."
Of = Callable[[torch.Tensor], torch.Tensor]
Put = Callable[[torch.Tensor, torch.Tensor], None]
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_IN_EXPERT = re.compile(re.escape(_EXPERTS) + r"(\d+)\.(.+)")
_IN_ADAPTER = re.compile(r"(.+)\.parametrizations\.weight\.0\.(down|up)\.(\d+)")


@dataclass(frozen=True)
class Mapped:
    """One Megatron parameter and what it is made of.

    order: layer (embedding -1, ends last), expert (-1: of none), and place in it. stage: the pipeline rank that has the
    parameter. expert_rank: of an expert's, the expert parallel rank that has it; None: all of them have.
    """

    order: tuple[int, int, int]
    megatron_name: str
    names: tuple[str, ...]
    layout: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    expert_rank: int | None = None
    parameter: torch.Tensor | None = field(default=None, compare=False)


def of_chunk(chunk: Any, stage: int = 0, expert_rank: int = 0, *, is_adapters: bool = False) -> Iterator[Mapped]:
    """Every parameter of a GPTModel (unwrapped) with its Hugging Face names; or those of its adapters.

    stage, expert_rank: of this rank. Raises CheckpointInvalid for a parameter without a name.
    """
    copy = output_copy([chunk])
    for place, (name, parameter) in enumerate(chunk.named_parameters()):
        adapter = _IN_ADAPTER.fullmatch(name)
        if parameter is copy or (adapter is not None) != is_adapters:
            continue
        in_layer = _IN_LAYER.fullmatch(name)
        layer, expert, whole = _FIRST if name == _EMBEDDING else _LAST, None, name
        if in_layer:
            module = chunk.decoder.layers[int(in_layer[1])]
            layer, rest = module.layer_number - 1, in_layer[2]  # counted over all stages
            in_expert = _IN_EXPERT.fullmatch(rest)
            if in_expert:
                expert = module.mlp.local_expert_indices[int(in_expert[1])]  # counted over all expert parallel ranks
                rest = f"{_EXPERTS}{expert}.{in_expert[2]}"
            whole = f"decoder.layers.{layer}.{rest}"
        adapter = _IN_ADAPTER.fullmatch(whole)
        names, layout = _named(whole) if adapter is None else _of_adapter(adapter)
        yield Mapped(
            order=(layer, -1 if expert is None else expert, place),
            megatron_name=name,
            names=names,
            layout=layout,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            stage=stage,
            expert_rank=None if expert is None else expert_rank,
            parameter=parameter,
        )


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
        return [(item.shape[0] // 2, hidden)] * 2
    if item.layout == "vocabulary":
        return [(config.vocab_size, hidden)]
    if item.layout == "rows":
        wide = config.intermediate_size if "down_proj" in item.names[0] else config.num_heads * dim
        return [(hidden, wide)]
    return [item.shape]


def shard(config: PolicyConfig, item: Mapped, parts: list[torch.Tensor], tensor: Place) -> torch.Tensor:
    """This rank's parameter out of full Hugging Face tensors."""
    if item.layout == "whole":
        return parts[0]
    if item.layout == "rows":
        return parts[0].chunk(tensor.size, 1)[tensor.rank]
    if item.layout == "gate_up":
        return torch.cat([part.chunk(tensor.size)[tensor.rank] for part in parts])
    if item.layout == "stacked":
        return torch.cat(parts)
    if item.layout == "vocabulary":
        padded = item.shape[0] * tensor.size - config.vocab_size
        whole = torch.cat([parts[0], parts[0].new_zeros(padded, config.hidden_size)])
        return whole.chunk(tensor.size)[tensor.rank]
    groups, dim, hidden = config.num_groups, config.head_dim, config.hidden_size
    by_group = [part.view(groups, -1, dim, hidden) for part in parts]
    return torch.cat(by_group, 1).reshape(-1, hidden).chunk(tensor.size)[tensor.rank]


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
    """What `WeightMap.export` yields unless told otherwise."""
    return parameter


@torch.no_grad()
def fill(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """What `WeightMap.load` does with a parameter unless told otherwise."""
    parameter.copy_(values)


class WeightMap:
    """Every parameter of the whole model with its Hugging Face names, in the model's order, the same at all ranks."""

    def __init__(
        self, chunks: Sequence[Any], config: PolicyConfig, groups: Groups, *, is_adapters: bool = False
    ) -> None:
        """chunks: this rank's GPTModels, unwrapped. is_adapters: parameters of low-rank updates instead.

        A collective of pipeline and expert ranks. Raises CheckpointInvalid for a parameter without a name.
        """
        self._config, self._groups = config, groups
        self._copy = None if is_adapters else output_copy(chunks)
        places = groups.pipeline, groups.expert
        items = [
            item
            for chunk in chunks
            for item in of_chunk(chunk, *(place.rank for place in places), is_adapters=is_adapters)
        ]
        for place in places:
            known = {item.names for item in items}
            items += [item for item in _told(items, place.group, groups.device) if item.names not in known]
        self.items = sorted(items, key=lambda item: item.order)

    @torch.no_grad()
    def load(self, folder: Path, put: Put = fill) -> None:
        """Read this rank's parameters from a folder, and `put` each.

        Raises CheckpointInvalid when a tensor is missing or unfit.
        """
        reader = FolderReader(folder)
        for item in self.items:
            copy = self._copy if item.layout == "vocabulary" and item.order[0] == _FIRST else None
            parameters = [found for found in (item.parameter, copy) if found is not None]
            if not parameters:
                continue
            parts = [reader.read(name) for name in item.names]
            for name, part, shape in zip(item.names, parts, full_shapes(self._config, item), strict=True):
                if tuple(part.shape) != shape:
                    raise CheckpointInvalid(
                        f"{name} must be {shape}, got {tuple(part.shape)} in {folder}; it is of another model"
                    )
            for parameter in parameters:
                put(parameter, shard(self._config, item, parts, self._groups.tensor))

    @torch.no_grad()
    def export(
        self, wanted: AbstractSet[str] | None = None, of: Of = itself, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) in map order, gathering one parameter at a time; `wanted` names alone.

        of: what is yielded of a parameter, in `dtype` if that is not the parameter's. A collective of tensor, pipeline
        and expert ranks: every rank must exhaust it.
        """
        tensor = self._groups.tensor
        for item in self.items:
            if wanted is not None and wanted.isdisjoint(item.names):
                continue
            if item.parameter is not None:
                mine = of(item.parameter).detach().contiguous()
            else:
                mine = torch.empty(item.shape, dtype=dtype or item.dtype, device=self._groups.device)
            self._bring(mine, item)
            shards = [mine]
            if tensor.size > 1 and item.layout not in {"whole", "stacked"}:
                shards = [torch.empty_like(mine) for _ in range(tensor.size)]
                dist.all_gather(shards, mine, group=tensor.group)
            yield from zip(item.names, unshard(self._config, item, shards), strict=True)

    def _bring(self, mine: torch.Tensor, item: Mapped) -> None:
        """Fill `mine` with what the item's stage has, and of an expert its expert parallel rank."""
        pipeline, expert = self._groups.pipeline, self._groups.expert
        if pipeline.size > 1 and item.expert_rank in (None, expert.rank):  # the same one in all stages
            dist.broadcast(mine, dist.get_global_rank(pipeline.group, item.stage), group=pipeline.group)
        if expert.size > 1 and item.expert_rank is not None:
            dist.broadcast(mine, dist.get_global_rank(expert.group, item.expert_rank), group=expert.group)


def _told(items: Sequence[Mapped], group: dist.ProcessGroup, device: torch.device) -> list[Mapped]:
    """Items of all ranks of a group, without their parameters. A collective of the group."""
    rows = [{**vars(item), "dtype": str(item.dtype).removeprefix("torch."), "parameter": None} for item in items]
    tuples = ("order", "names", "shape")
    return [
        Mapped(**row | {name: tuple(row[name]) for name in tuples} | {"dtype": getattr(torch, row["dtype"])})
        for told in exchange({"items": rows}, group, device)
        for row in told["items"]
    ]


def output_copy(chunks: Sequence[Any]) -> torch.Tensor | None:
    """The last stage's copy of a tied embedding that the first stage has, too; it has no name of its own."""
    for chunk in chunks:
        if chunk.post_process and not chunk.pre_process and chunk.share_embeddings_and_output_weights:
            found: torch.Tensor = chunk.output_layer.weight
            return found
    return None


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
