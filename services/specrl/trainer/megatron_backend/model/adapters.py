"""Adds low-rank updates to a Megatron model: linear layers then compute with W + s B A, where W is frozen.

The update is a torch parametrization of each layer's weight. It is sharded by `shard_tensors`, exactly as the weight
was. The rest of the model needs no change, and every parallel layout works as without updates. Called by
`sharded_policy.py`.

Shapes: O output and I input features of a whole weight, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch.nn.utils import parametrize

from specrl.models.policy_config import PolicyConfig
from specrl.spec.trainer import Lora
from specrl.trainer import lora as low_rank
from specrl.trainer.megatron_backend.model.hf_weights import (
    ReadWeight,
    compute_full_shapes,
    map_parameters,
    shard_tensors,
)
from specrl.trainer.megatron_backend.parallel.groups import GroupPosition

_LINEAR = {"qkv", "gate_up", "rows"}  # layouts of the weights that get updates
ShardWeight = Callable[[list[torch.Tensor]], torch.Tensor]


class LowRankUpdate(torch.nn.Module):
    """The parametrization W -> W + s B A of a Megatron weight that consists of one or more Hugging Face tensors."""

    def __init__(self, factors: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float, cut: ShardWeight) -> None:
        """factors: A [R, I] and B [O, R] of each tensor, whole. cut: makes this rank's shard of whole tensors."""
        super().__init__()
        self.down = torch.nn.ParameterList([down_RI for down_RI, _ in factors])
        self.up = torch.nn.ParameterList([up_OR for _, up_OR in factors])
        self._scale = scale
        self._cut = cut

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's weight with the update added."""
        # Forward, this is the identity. Backward, it sums the gradients of the factors over tensor parallel ranks, of
        # which each has that of its shard alone.
        whole = copy_to_tensor_model_parallel_region
        updates = [
            low_rank.compute_update(whole(down_RI), whole(up_OR), self._scale)
            for down_RI, up_OR in zip(self.down, self.up, strict=True)
        ]
        return low_rank.merge_update(weight, self._cut(updates))


def add_adapters(model: Any, config: PolicyConfig, tensor: GroupPosition, lora: Lora, seed: int) -> None:
    """Freeze a model and add low-rank updates, initially zero, to its linear layers.

    In a mixture of experts only attention gets updates. The factors do not depend on the parallel layout.
    """
    model.requires_grad_(False)
    for item in list(map_parameters(model)):
        if item.parameter is None or item.layout not in _LINEAR or not item.is_layer_matrix:
            continue
        shapes = compute_full_shapes(config, item, tensor.size)
        factors = [
            low_rank.initialise_factors(name, (outputs, inputs), lora.rank, seed)
            for name, (outputs, inputs) in zip(item.names, shapes, strict=True)
        ]
        update = LowRankUpdate(
            [(a.to(item.parameter), b.to(item.parameter)) for a, b in factors],
            low_rank.compute_scale(lora),
            partial(shard_tensors, config, item, tensor=tensor),
        )
        module = model.get_submodule(item.megatron_name.removesuffix(".weight"))
        parametrize.register_parametrization(module, "weight", update)


def make_weight_reader(chunks: Sequence[Any]) -> ReadWeight:
    """Return a function that maps a parameter of the chunks to its value in the forward pass.

    That is the parameter with its low-rank update added, or the parameter itself if it has none.
    """
    adapted: dict[torch.Tensor, Any] = {
        module.parametrizations.weight.original: module
        for chunk in chunks
        for module in chunk.modules()
        if parametrize.is_parametrized(module, "weight")
    }

    def read_merged_weight(parameter: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = adapted[parameter].weight if parameter in adapted else parameter
        return found

    return read_merged_weight
