"""Weights and moments of a policy, as its checkpoint has them, at every rank of a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from specrl.trainer.megatron_backend import MegatronBackend

Tensors = dict[str, torch.Tensor]


def gather_saved_state(backend: MegatronBackend) -> dict[str, Tensors]:
    """Gather what every rank writes, by kind. A collective. Fails if two ranks write one tensor."""
    mine = {
        kind: {name: tensor.clone().contiguous() for name, tensor in tensors}
        for kind, tensors in backend.models.policy.gather_state().items()
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    found: dict[str, Tensors] = {}
    for kind in mine:
        found[kind] = {name: tensor for part in of_ranks for name, tensor in part[kind].items()}
        assert len(found[kind]) == sum(len(part[kind]) for part in of_ranks), kind
    return found
