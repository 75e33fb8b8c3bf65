"""Converts a policy between Hugging Face tensors and Megatron shards, with one name map for both directions.

Megatron interleaves q, k and v by key/value group, fuses gate with up, and pads the vocabulary. It shards by columns
(output features), rows (input features) or vocabulary. An expert is whole at one expert parallel rank.

Invariants: `WeightMap.load_parameters` and `WeightMap.export_tensors` are exact inverses of each other, bit for bit.
Every parameter is in the map; one that is not raises an error. Called by `sharded_policy.py` and `adapters.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specrl.errors import CheckpointInvalid
from specrl.models.policy_config import PolicyConfig
from specrl.tensor_files import FolderReader
from specrl.trainer import lora
from specrl.trainer.megatron_backend.parallel.exchange import exchange_objects
from specrl.trainer.megatron_backend.parallel.groups import GroupPosition, RankGroups

NameTable = dict[str, tuple[tuple[str, ...], str]]

# Megatron module -> (Hugging Face modules, layout of weight and bias). Layouts: "whole" is the same at all ranks,
# "stacked" is whole but two tensors in one. The others are sharded, see `shard_tensors`.
_LAYER: NameTable = {
    "input_layernorm": (("input_layernorm",), "whole"),
    "self_attention.linear_qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "qkv"),
    "self_attention.q_layernorm": (("self_attn.q_norm",), "whole"),
    "self_attention.k_layernorm": (("self_attn.k_norm",), "whole"),
    "self_attention.linear_proj": (("self_attn.o_proj",), "rows"),
    "pre_mlp_layernorm": (("post_attention_layernorm",), "whole"),
    "mlp.linear_fc1": (("mlp.gate_proj", "mlp.up_proj"), "gate_up"),
    "mlp.linear_fc2": (("mlp.down_proj",), "rows"),
    "mlp.router": (("mlp.gate",), "whole"),
}
_EXPERT: NameTable = {
    "linear_fc1": (("gate_proj", "up_proj"), "stacked"),
    "linear_fc2": (("down_proj",), "whole"),
}
_EMBEDDING = "embedding.word_embeddings"
_ENDS: NameTable = {
    _EMBEDDING: (("model.embed_tokens",), "vocabulary"),
    "decoder.final_layernorm": (("model.norm",), "whole"),
    "output_layer": (("lm_head",), "vocabulary"),
}
# Sort keys of parameters outside of layers, which are numbered from 0: the embedding comes first, norm and output last.
_FIRST = -1
_LAST = 1 << 30
ReadWeight = Callable[[torch.Tensor], torch.Tensor]
WriteWeight = Callable[[torch.Tensor, torch.Tensor], None]
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_IN_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_IN_ADAPTER = re.compile(r"(.+)\.parametrizations\.weight\.0\.(down|up)\.(\d+)")


@dataclass(frozen=True)
class MappedParameter:
    """One Megatron parameter and the Hugging Face tensors that it consists of.

    order: sort key: layer, expert (-1: not of an expert), and position in the chunk.
    megatron_name: in its chunk. names: of the Hugging Face tensors. layout: see `_LAYER`.
    shape: of one rank's shard.
    stage: the pipeline rank that has the parameter.
    expert_rank: the expert parallel rank that has it; None: all of them do.
    parameter: None if this rank does not have it.
    """

    order: tuple[int, int, int]
    megatron_name: str
    names: tuple[str, ...]
    layout: str
    shape: tuple[int, ...]
    stage: int
    expert_rank: int | None = None
    parameter: torch.Tensor | None = field(default=None, compare=False)

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it is a matrix of attention, MLP, expert or router: what Muon updates. Not embedding and output."""
        return len(self.shape) == 2 and self.layout != "vocabulary"

    @property
    def is_replicated(self) -> bool:
        """Whether every rank that has it has all of it: it is not sharded over tensor parallel ranks."""
        return self.layout in {"whole", "stacked"}

    @property
    def num_elements(self) -> int:
        """Elements of one rank's shard."""
        return math.prod(self.shape)


def map_parameters(
    chunk: Any, stage: int = 0, expert_rank: int = 0, *, is_adapters: bool = False
) -> Iterator[MappedParameter]:
    """Yield every parameter of an unwrapped GPTModel with its Hugging Face names.

    stage, expert_rank: of this rank. is_adapters: yield the factors of low-rank updates instead.

    Raises CheckpointInvalid for a parameter that is not in the map.
    """
    copy = find_output_copy([chunk])
    for place, (name, parameter) in enumerate(chunk.named_parameters()):
        adapter = _IN_ADAPTER.fullmatch(name)
        if parameter is copy or (adapter is not None) != is_adapters:
            continue
        # The weight that an update belongs to, or the parameter itself: its module, and "weight" or "bias".
        plain = f"{adapter[1]}.weight" if adapter else name.replace(".parametrizations.weight.original", ".weight")
        rest, _, kind = plain.rpartition(".")
        layer = _FIRST if rest == _EMBEDDING else _LAST
        expert = -1
        table = _ENDS
        prefix = ""
        if in_layer := _IN_LAYER.fullmatch(rest):
            module = chunk.decoder.layers[int(in_layer[1])]
            layer = module.layer_number - 1  # counted over all stages
            rest = in_layer[2]
            table = _LAYER
            prefix = f"model.layers.{layer}."
            if in_expert := _IN_EXPERT.fullmatch(rest):
                expert = module.mlp.local_expert_indices[int(in_expert[1])]  # counted over all expert parallel ranks
                rest = in_expert[2]
                table = _EXPERT
                prefix += f"mlp.experts.{expert}."
        if rest not in table:
            raise CheckpointInvalid(
                f"Megatron parameter must have a Hugging Face name, got {name}; add it to the map in hf_weights.py"
            )
        parts, layout = table[rest]
        names = tuple(f"{prefix}{part}.{kind}" for part in parts)
        if adapter:  # peft's name of one factor of the update; every tensor parallel rank has it whole
            names = (lora.factor_names(names[int(adapter[3])])[("down", "up").index(adapter[2])],)
            layout = "whole"
        yield MappedParameter(
            order=(layer, expert, place),
            megatron_name=name,
            names=names,
            layout=layout,
            shape=tuple(parameter.shape),
            stage=stage,
            expert_rank=None if expert < 0 else expert_rank,
            parameter=parameter,
        )


def compute_full_shapes(config: PolicyConfig, item: MappedParameter, ranks: int) -> list[torch.Size]:
    """Compute the shapes of a parameter's Hugging Face tensors, in the order of its names: unsharded, unpadded.

    ranks: tensor parallel ranks.
    """
    shard = torch.empty(item.shape, device="meta")
    return [tensor.shape for tensor in unshard_tensors(config, item, [shard] * ranks)]


def shard_tensors(
    config: PolicyConfig, item: MappedParameter, parts: list[torch.Tensor], tensor: GroupPosition
) -> torch.Tensor:
    """Make this rank's shard of a parameter from full Hugging Face tensors, in the order of its names."""
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
    # qkv: for each key/value group its query heads, its key head, its value head. A bias has no columns.
    columns = parts[0].shape[1:]
    by_group = [part.view(config.num_groups, -1, config.head_dim, *columns) for part in parts]
    return torch.cat(by_group, 1).reshape(-1, *columns).chunk(tensor.size)[tensor.rank]


def unshard_tensors(config: PolicyConfig, item: MappedParameter, shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Make full Hugging Face tensors from the shards of all tensor parallel ranks. The inverse of `shard_tensors`."""
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
    repeats = config.num_heads // config.num_groups
    columns = item.shape[1:]
    by_group = torch.cat(shards).view(config.num_groups, repeats + 2, config.head_dim, *columns)
    return [part.reshape(-1, *columns) for part in torch.split(by_group, [repeats, 1, 1], 1)]


@torch.no_grad()
def fill_parameter(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a parameter: what `load_parameters` does by default."""
    parameter.copy_(values)


class WeightMap:
    """Every parameter of the whole model with its Hugging Face names, in the model's order. Equal at all ranks."""

    def __init__(
        self, chunks: Sequence[Any], config: PolicyConfig, groups: RankGroups, *, is_adapters: bool = False
    ) -> None:
        """Build the map. A collective of pipeline and expert ranks.

        chunks: this rank's GPTModels, unwrapped. is_adapters: map the factors of low-rank updates instead.

        Raises CheckpointInvalid for a parameter without a name.
        """
        self._config = config
        self._groups = groups
        self._copy = None if is_adapters else find_output_copy(chunks)
        self._dtype = chunks[0].config.params_dtype
        places = groups.pipeline, groups.expert
        items = [
            item
            for chunk in chunks
            for item in map_parameters(chunk, *(place.rank for place in places), is_adapters=is_adapters)
        ]
        # Add the parameters of other stages, then those of other expert parallel ranks, each once.
        for place in places:
            known = {item.names for item in items}
            items += [item for item in _gather_items(items, place.group, groups.device) if item.names not in known]
        self.items = sorted(items, key=lambda item: item.order)

    @cached_property
    def full_shapes(self) -> dict[str, torch.Size]:
        """The shape of each Hugging Face tensor, by its name, in the map's order."""
        ranks = self._groups.tensor.size
        return {
            name: shape
            for item in self.items
            for name, shape in zip(item.names, compute_full_shapes(self._config, item, ranks), strict=True)
        }

    @torch.no_grad()
    def load_parameters(
        self,
        folder: Path,
        write_weight: WriteWeight = fill_parameter,
        wanted: AbstractSet[str] | None = None,
    ) -> None:
        """Read this rank's parameters from a Hugging Face folder, and set each with `write_weight`.

        wanted: names to read; None: all.

        Raises CheckpointInvalid when a tensor is missing or has another shape.
        """
        reader = FolderReader(folder)
        for item in self.items:
            # A tied embedding is at the first stage and, as the output layer, at the last.
            copy = self._copy if item.layout == "vocabulary" and item.order[0] == _FIRST else None
            parameters = [found for found in (item.parameter, copy) if found is not None]
            if not parameters or (wanted is not None and wanted.isdisjoint(item.names)):
                continue
            parts = [reader.read_tensor(name) for name in item.names]
            for name, part in zip(item.names, parts, strict=True):
                if part.shape != self.full_shapes[name]:
                    raise CheckpointInvalid(
                        f"{name} must have shape {tuple(self.full_shapes[name])}, got {tuple(part.shape)} in {folder}; "
                        "use the folder of this model, not of another model"
                    )
            for parameter in parameters:
                write_weight(parameter, shard_tensors(self._config, item, parts, self._groups.tensor))

    @torch.no_grad()
    def export_tensors(
        self, wanted: AbstractSet[str] | None, read_weight: ReadWeight
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) in map order, gathering one parameter at a time.

        wanted: names to yield; None: all. read_weight: returns the value to yield for a parameter.

        A collective of tensor, pipeline and expert ranks: every rank must exhaust the iterator.
        """
        tensor = self._groups.tensor
        for item in self.items:
            if wanted is not None and wanted.isdisjoint(item.names):
                continue
            if item.parameter is not None:
                mine = read_weight(item.parameter).detach().contiguous()
            else:
                mine = torch.empty(item.shape, dtype=self._dtype, device=self._groups.device)
            # First along the pipeline of the expert parallel rank that has it, which is the same in all stages.
            # Then, in each stage, to the other expert parallel ranks.
            if item.expert_rank in (None, self._groups.expert.rank):
                self._groups.pipeline.broadcast_tensor(mine, item.stage)
            if item.expert_rank is not None:
                self._groups.expert.broadcast_tensor(mine, item.expert_rank)
            shards = [mine]
            if tensor.size > 1 and not item.is_replicated:
                shards = [torch.empty_like(mine) for _ in range(tensor.size)]
                dist.all_gather(shards, mine, group=tensor.group)
            yield from zip(item.names, unshard_tensors(self._config, item, shards), strict=True)


def _gather_items(
    items: Sequence[MappedParameter], group: dist.ProcessGroup, device: torch.device
) -> list[MappedParameter]:
    """Exchange items. Returns those of all ranks of the group, without `parameter`. A collective of the group."""
    rows = [{**vars(item), "parameter": None} for item in items]
    return [
        MappedParameter(**row | {name: tuple(row[name]) for name in ("order", "names", "shape")})  # JSON has lists
        for told in exchange_objects({"items": rows}, group, device)
        for row in told["items"]
    ]


def find_output_copy(chunks: Sequence[Any]) -> torch.Tensor | None:
    """Find the last stage's copy of a tied embedding, if this rank has it. It has no Hugging Face name."""
    for chunk in chunks:
        if chunk.post_process and not chunk.pre_process and chunk.share_embeddings_and_output_weights:
            found: torch.Tensor = chunk.output_layer.weight
            return found
    return None
