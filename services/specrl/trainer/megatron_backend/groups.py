"""Process groups of the trainer's ranks: torch.distributed's default group, and Megatron's on top of it.

Ranks come from torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without it there is one rank.
NCCL where CUDA is available, Gloo otherwise. Tensor parallel ranks are neighbours, then context, data and pipeline
parallel ones; rank 0 is first in every direction.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import HashStore  # torch.distributed re-exports it without a type

from specrl.errors import TrainerFailed
from specrl.spec.trainer import Parallelism

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # of one collective; a rank that died breaks it at once, a hanging one so


@dataclass(frozen=True)
class Place:
    """This rank's place among the ranks of a process group."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Groups:
    """This rank's place in each direction. `data` is the group of ranks that hold the same shard.

    A replica is the ranks that work on the same rollouts: those of one tensor, context and pipeline group. Expert
    parallel ranks are neighbours among the tensor, context and data parallel ones of a stage, in that order.
    """

    rank: int
    world_size: int
    tensor: Place
    context: Place
    pipeline: Place
    expert: Place
    data_rank: int
    data_size: int
    data: dist.ProcessGroup
    device: torch.device

    @property
    def replica_size(self) -> int:
        """Ranks of a replica."""
        return self.tensor.size * self.context.size * self.pipeline.size

    @property
    def replica_rank(self) -> int:
        """This rank's number among them."""
        outer = self.pipeline.rank * self.context.size + self.context.rank
        return outer * self.tensor.size + self.tensor.rank

    @property
    def gathers_with_rank_0(self) -> bool:
        """Whether this rank is in a tensor or expert group with rank 0, directly or through others, or in their
        pipelines."""
        data_and_context = self.data_rank * self.context.size + self.context.rank
        in_stage = data_and_context * self.tensor.size + self.tensor.rank
        return in_stage < math.lcm(self.tensor.size, self.expert.size)

    def from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the ranks of the last stage hold in `tensor`, in place. A collective of the pipeline."""
        if self.pipeline.size > 1:
            last = dist.get_global_rank(self.pipeline.group, self.pipeline.size - 1)
            dist.broadcast(tensor, last, group=self.pipeline.group)
        return tensor


def join(parallelism: Parallelism, seed: int) -> Groups:
    """Join the default group, if not yet in it, and Megatron's. Raises TrainerFailed for a wrong world size."""
    _join_default()
    world_size = dist.get_world_size()
    if world_size != parallelism.world_size:
        raise TrainerFailed(
            f"the trainer must run as tensor * context * pipeline * data = {parallelism.world_size} ranks, "
            f"got {world_size}; start it with torchrun --nproc-per-node={parallelism.world_size}"
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
    return Groups(
        rank=dist.get_rank(),
        world_size=world_size,
        tensor=_place(parallel_state.get_tensor_model_parallel_group()),
        context=_place(parallel_state.get_context_parallel_group()),
        pipeline=_place(parallel_state.get_pipeline_model_parallel_group()),
        expert=_place(parallel_state.get_expert_model_parallel_group()),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallelism.data,
        data=parallel_state.get_data_parallel_group(),
        device=torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu"),
    )


def _place(group: dist.ProcessGroup) -> Place:
    return Place(dist.get_rank(group), dist.get_world_size(group), group)


def _join_default() -> None:
    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    except (RuntimeError, ValueError, dist.DistError) as error:
        raise TrainerFailed(
            f"the trainer's ranks must find each other at MASTER_ADDR:MASTER_PORT, got {error}; check the addresses"
        ) from error


def leave() -> None:
    """Leave Megatron's groups. The default group stays: it is the process's, and another backend may use it.

    Megatron forgets its groups, torch keeps them: a Gloo group's threads would go on looking for work, hundreds of
    times a second each. An NCCL group ends with its process: to leave it is to wait for ranks that may be gone.
    """
    if not parallel_state.model_parallel_is_initialized():
        return
    made: list[dist.ProcessGroup | None] = parallel_state._global_process_group_list  # None: the default group
    parallel_state.destroy_model_parallel()
    for group in made:
        if group is not None and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)
