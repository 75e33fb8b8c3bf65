"""Master weights and moments by the policy's parameters, wherever Megatron's optimizer keeps them.

With the distributed optimizer (ZeRO-1, arXiv:1910.02054) each data parallel rank has a range of every parameter's, or
nothing of it; otherwise a rank has all of what its parameters need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MASTER = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")  # as AdamW calls them, torch's and Transformer Engine's


class OptimizerState:
    """Of one optimizer, or of several that Megatron has chained."""

    def __init__(self, optimizer: Any) -> None:
        self._parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
        self._part_of = {parameter: part for part in self._parts for parameter in _parameters(part)}

    @property
    def has_moments(self) -> bool:
        """Whether a step has been made, or loaded; the same at all ranks."""
        return any(part.optimizer.state for part in self._parts)

    @torch.no_grad()
    def read(self, kind: str, parameter: torch.Tensor) -> torch.Tensor:
        """`MASTER` or one of `MOMENTS` of a parameter, whole, in float32. A collective of the ranks that share it."""
        part = self._part_of[_master(parameter)]
        if not isinstance(part, DistributedOptimizer):
            return self._tensors(part, parameter)[kind]
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        mine = self._range(part, parameter)
        if mine is not None:
            whole[mine] = self._tensors(part, parameter)[kind].float()
        dist.all_reduce(whole, group=part.data_parallel_group)  # the others' zeros make the sum exact
        return whole.view_as(parameter)

    @torch.no_grad()
    def write(self, kind: str, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse of `read`, with the same whole values at all ranks."""
        part = self._part_of[_master(parameter)]
        if not isinstance(part, DistributedOptimizer):
            self._tensors(part, parameter)[kind].copy_(values)
            return
        mine = self._range(part, parameter)
        if mine is not None:
            self._tensors(part, parameter)[kind].copy_(values.flatten()[mine])

    @torch.no_grad()
    def start_moments(self, updates: int) -> None:
        """Make room for moments, zero until they are written, of an optimizer that has made so many updates."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                for master in group["params"]:
                    part.optimizer.state[master] = {
                        "step": torch.tensor(float(updates)),
                        **{kind: torch.zeros_like(master, dtype=torch.float32) for kind in MOMENTS},
                    }
                if "step" in group:  # Transformer Engine's AdamW counts here
                    group["step"] = updates

    @staticmethod
    def _range(part: DistributedOptimizer, parameter: torch.Tensor) -> slice | None:
        """Where this rank's part of the flattened parameter is; None for nothing of it."""
        if parameter not in part.model_param_gbuf_map:
            return None
        found = part._get_model_param_range_map(parameter)["param"]
        return slice(found.start, found.end)

    @staticmethod
    def _tensors(part: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if isinstance(part, DistributedOptimizer):
            found = part._get_main_param_and_optimizer_states(parameter)
            return {MASTER: found["param"], **found}
        master = _master(parameter)
        return {MASTER: master, **part.optimizer.state.get(master, {})}


def _master(parameter: torch.Tensor) -> torch.Tensor:
    """What a rank's own optimizer steps: the float32 copy of a bf16 parameter, or the parameter itself."""
    if getattr(parameter, "main_param_sharded", False):
        return parameter
    found: torch.Tensor = getattr(parameter, "main_param", parameter)
    return found


def _parameters(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, DistributedOptimizer):
        for buffer in part.buffers:
            yield from buffer.params
        return
    for group in part.optimizer.param_groups:
        yield from group["params"]
