"""Process groups of the trainer's ranks: torch.distributed's default group, and Megatron's on top of it.

Ranks come from torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without it there is one rank. The
backend is NCCL if CUDA is available, else Gloo.

Ranks are numbered tensor parallel first, then context, data and pipeline parallel. Rank 0 is the first in every
dimension.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import HashStore  # torch.distributed re-exports it without a type

from specrl.errors import TrainerFailed
from specrl.spec.trainer import Parallelism

# Of one collective. A rank that dies breaks it at once; this bounds the wait for a rank that hangs.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class GroupPosition:
    """This rank's position in a process group."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Broadcast the values of the group's rank `source`, in place. A collective of the group."""
        if self.size > 1:
            dist.broadcast(tensor, dist.get_global_rank(self.group, source), group=self.group)
        return tensor


@dataclass(frozen=True)
class RankGroups:
    """This rank's position in each parallel dimension.

    data: the group of ranks that hold the same shard. A replica consists of the ranks that work on the same rollouts:
    those of one tensor, context and pipeline group. Expert parallel groups are consecutive ranks among the tensor,
    context and data parallel ranks of a stage, in that order.
    """

    rank: int
    world_size: int
    tensor: GroupPosition
    context: GroupPosition
    pipeline: GroupPosition
    expert: GroupPosition
    data: GroupPosition
    device: torch.device

    @property
    def replica_size(self) -> int:
        """Number of ranks of a replica."""
        return self.tensor.size * self.context.size * self.pipeline.size

    @property
    def replica_rank(self) -> int:
        """This rank's number in its replica, from 0."""
        outer = self.pipeline.rank * self.context.size + self.context.rank
        return outer * self.tensor.size + self.tensor.rank

    @property
    def gathers_with_rank_0(self) -> bool:
        """Whether this rank takes part in collectives when rank 0 gathers full tensors.

        These are the ranks of rank 0's tensor and expert groups, and the ranks that share a group with them. The
        pipelines of all these ranks belong to them, too.
        """
        data_and_context = self.data.rank * self.context.size + self.context.rank
        in_stage = data_and_context * self.tensor.size + self.tensor.rank
        return in_stage < math.lcm(self.tensor.size, self.expert.size)

    def broadcast_from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast the last stage's values of `tensor` to all stages, in place. A collective of the pipeline."""
        return self.pipeline.broadcast_tensor(tensor, self.pipeline.size - 1)

    def reduce_over_data(self, values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[float]:
        """Reduce scalars of the last stage over data parallel ranks. Returns the result at every rank."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.broadcast_from_last_stage(tensor)
        dist.all_reduce(tensor, op, group=self.data.group)  # not over tensor and context ranks, whose values are equal
        found: list[float] = tensor.tolist()
        return found


def join_groups(parallelism: Parallelism, seed: int) -> RankGroups:
    """Join the default group, unless already joined, and Megatron's groups. Seeds torch's generators.

    Raises TrainerFailed when the number of ranks does not match, or when ranks cannot reach each other.
    """
    _join_default()
    world_size = dist.get_world_size()
    if world_size != parallelism.world_size:
        raise TrainerFailed(
            f"the number of ranks must be tensor * context * pipeline * data = {parallelism.world_size} ranks of "
            f"trainer.parallelism, got {world_size}; start specrl-trainer with --ranks={parallelism.world_size}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallelism.tensor,
        context_parallel_size=parallelism.context,
        pipeline_model_parallel_size=parallelism.pipeline,
        virtual_pipeline_model_parallel_size=parallelism.virtual_stages if parallelism.virtual_stages > 1 else None,
        expert_model_parallel_size=parallelism.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    is_cuda = torch.cuda.is_available()
    return RankGroups(
        rank=dist.get_rank(),
        world_size=world_size,
        tensor=_find_position(parallel_state.get_tensor_model_parallel_group()),
        context=_find_position(parallel_state.get_context_parallel_group()),
        pipeline=_find_position(parallel_state.get_pipeline_model_parallel_group()),
        expert=_find_position(parallel_state.get_expert_model_parallel_group()),
        data=_find_position(parallel_state.get_data_parallel_group()),
        device=torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu"),
    )


def _find_position(group: dist.ProcessGroup) -> GroupPosition:
    return GroupPosition(dist.get_rank(group), dist.get_world_size(group), group)


def _join_default() -> None:
    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    except (RuntimeError, ValueError, dist.DistError) as error:
        raise TrainerFailed(
            f"trainer ranks could not connect at MASTER_ADDR:MASTER_PORT: {error}; check the addresses and restart all"
        ) from error


def leave_groups() -> None:
    """Leave Megatron's groups. The default group stays, because another backend of this process may use it."""
    if not parallel_state.model_parallel_is_initialized():
        return
    made: list[dist.ProcessGroup | None] = parallel_state._global_process_group_list  # None: the default group
    parallel_state.destroy_model_parallel()
    # Megatron drops its references, but torch keeps the groups. Threads of a Gloo group would go on polling, hundreds
    # of times a second each. NCCL groups end with the process: destroying one would wait for ranks that may be gone.
    for group in made:
        if group is not None and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)
