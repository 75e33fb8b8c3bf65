"""Reads and writes the optimizer's float32 master weights and moments, by the policy's parameters.

With the distributed optimizer (ZeRO-1, arXiv:1910.02054) each data parallel rank has a range of every parameter's
state, possibly empty. Otherwise a rank has the whole state of its parameters. `sharded_policy.py` calls this to save
and load checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from specrl.spec.trainer import OptimizerKind
from specrl.trainer.megatron_backend.model.hf_weights import MappedParameter

MASTER = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")  # as AdamW calls them, torch's and Transformer Engine's
MUON_MOMENTS = ("momentum_buffer",)  # as emerging-optimizers calls it


def find_moment_kinds(kind: OptimizerKind, item: MappedParameter) -> tuple[str, ...]:
    """Return the kinds of moments that a parameter has under an optimizer."""
    return MUON_MOMENTS if kind is OptimizerKind.MUON and item.is_layer_matrix else MOMENTS


class OptimizerState:
    """The state of Megatron's optimizer, which may be a chain of several."""

    def __init__(self, optimizer: Any) -> None:
        self._parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
        self._part_of = {parameter: part for part in self._parts for parameter in _list_parameters(part)}

    @property
    def has_moments(self) -> bool:
        """Whether an update has been made or loaded. Equal at all ranks."""
        # A parameter whose master was read has an empty state: torch makes it when Megatron looks it up.
        return any(found for part in self._parts for found in part.optimizer.state.values())

    def find_range(self, parameter: torch.Tensor) -> slice:
        """Return the elements of the flattened parameter whose state this rank has; possibly none."""
        part = self._part_of[_find_master(parameter)]
        if not isinstance(part, DistributedOptimizer):
            return slice(0, parameter.numel())
        return self._find_range(part, parameter) or slice(0, 0)

    @torch.no_grad()
    def read_range(self, kind: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return `MASTER` or a kind of moment of the elements of `find_range`, flat and in float32."""
        part = self._part_of[_find_master(parameter)]
        return self._find_tensors(part, parameter)[kind].flatten().float()

    @torch.no_grad()
    def write_state_tensor(self, kind: str, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Set `MASTER` or a kind of moment of a parameter. values: whole, the same at all ranks."""
        part = self._part_of[_find_master(parameter)]
        if not isinstance(part, DistributedOptimizer):
            self._find_tensors(part, parameter)[kind].copy_(values)
            return
        mine = self._find_range(part, parameter)
        if mine is not None:
            self._find_tensors(part, parameter)[kind].copy_(values.flatten()[mine])

    @torch.no_grad()
    def start_moments(self, updates: int) -> None:
        """Allocate moments, zero until they are written. updates: how many the optimizer has made."""
        for part in self._parts:
            is_muon = isinstance(part.optimizer, TensorParallelMuon)
            kinds = MUON_MOMENTS if is_muon else MOMENTS
            for group in part.optimizer.param_groups:
                for master in group["params"]:
                    part.optimizer.state[master] = {
                        **({} if is_muon else {"step": torch.tensor(float(updates))}),
                        **{kind: torch.zeros_like(master, dtype=torch.float32) for kind in kinds},
                    }
                if "step" in group:  # where Transformer Engine's AdamW counts updates
                    group["step"] = updates

    @staticmethod
    def _find_range(part: DistributedOptimizer, parameter: torch.Tensor) -> slice | None:
        """Return this rank's range of the flattened parameter; None if it has no part of it."""
        if parameter not in part.model_param_gbuf_map:
            return None
        found = part._get_model_param_range_map(parameter)["param"]
        return slice(found.start, found.end)

    @staticmethod
    def _find_tensors(part: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if isinstance(part, DistributedOptimizer):
            found = part._get_main_param_and_optimizer_states(parameter)
            return {MASTER: found["param"], **found}
        master = _find_master(parameter)
        return {MASTER: master, **part.optimizer.state.get(master, {})}


def _find_master(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that the optimizer updates: the float32 copy of a bf16 parameter, or the parameter itself."""
    # With the distributed optimizer the copy is a shard, and states are found by the parameter.
    if getattr(parameter, "main_param_sharded", False):
        return parameter
    found: torch.Tensor = getattr(parameter, "main_param", parameter)
    return found


def _list_parameters(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, DistributedOptimizer):
        for buffer in part.buffers:
            yield from buffer.params
        return
    for group in part.optimizer.param_groups:
        yield from group["params"]
