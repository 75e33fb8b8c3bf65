"""Puts low-rank updates into a Megatron model: linear layers then compute with W + s B A, and W is frozen.

The update is a parametrization of each layer's weight, cut by the name map's own `shard` as the weight was cut. So
nothing else of the model knows of it, and every layout works as it does without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch.nn.utils import parametrize

from specrl.drafting.policy_config import PolicyConfig
from specrl.spec.trainer import Lora
from specrl.trainer import lora as low_rank
from specrl.trainer.megatron_backend.groups import Place
from specrl.trainer.megatron_backend.hf_weights import Of, full_shapes, of_chunk, shard

_LINEAR = {"qkv", "gate_up", "rows"}  # layouts of what is adapted
Cut = Callable[[list[torch.Tensor]], torch.Tensor]


class LowRank(torch.nn.Module):
    """W -> W + s B A, for a Megatron weight that is made of one or several Hugging Face tensors."""

    def __init__(self, factors: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float, cut: Cut) -> None:
        """factors: A [R, I] and B [O, R] of each of them, whole. cut: this rank's weight out of whole tensors."""
        super().__init__()
        self.down = torch.nn.ParameterList([down_RI for down_RI, _ in factors])
        self.up = torch.nn.ParameterList([up_OR for _, up_OR in factors])
        self._scale, self._cut = scale, cut

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Each rank sees the gradient of its own shard; the copies' backward passes add them up."""
        whole = copy_to_tensor_model_parallel_region
        updates = [
            low_rank.update(whole(down_RI), whole(up_OR), self._scale)
            for down_RI, up_OR in zip(self.down, self.up, strict=True)
        ]
        return low_rank.merged(weight, self._cut(updates))


def adapt(model: Any, config: PolicyConfig, tensor: Place, lora: Lora, seed: int) -> None:
    """Freeze a model, and give its linear layers low-rank updates, zero at first; of a mixture those of attention.

    The factors are the same at every rank, whatever the layout.
    """
    model.requires_grad_(False)
    for item in list(of_chunk(model)):
        if item.parameter is None or item.layout not in _LINEAR:
            continue
        shapes = [(outputs, inputs) for outputs, inputs in full_shapes(config, item)]
        factors = [
            low_rank.initial(name, shape, lora.rank, seed) for name, shape in zip(item.names, shapes, strict=True)
        ]
        update = LowRank(
            [(a.to(item.parameter), b.to(item.parameter)) for a, b in factors],
            low_rank.scale(lora),
            partial(shard, config, item, tensor=tensor),
        )
        module = model.get_submodule(item.megatron_name.removesuffix(".weight"))
        parametrize.register_parametrization(module, "weight", update)


def merged(chunks: Sequence[Any]) -> Of:
    """What each parameter of a model's chunks stands for in the forward pass: with its update, where it has one."""
    adapted: dict[torch.Tensor, Any] = {
        module.parametrizations.weight.original: module
        for chunk in chunks
        for module in chunk.modules()
        if parametrize.is_parametrized(module, "weight")
    }

    def of(parameter: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = adapted[parameter].weight if parameter in adapted else parameter
        return found

    return of
