"""Estimates how much memory a run on this machine's CPU needs, before it starts. Pure arithmetic.

The estimate is a coarse upper bound on what can be foreseen. docs/architecture.md records what real runs took.
P: parameters of the policy, D: those of the drafter, b: bytes of the policy's dtype, V: vocabulary size.

    coordinator  0.4 GiB, plus 0.3 GiB for each reward worker
    replica      1.4 GiB of libraries and buffers per process (measured: 1.7 GB with a tiny model and 256 MiB of KV),
                 2 b (P + D) for the weights and the next version while it arrives; b D for a draft model that is not
                 trained, which gets no other version;
                 the KV cache, and 3 float32 rows of V for each live rollout and drafted token
    trainer      1.0 GiB of libraries per rank, and what `trainer/memory/estimate.py` counts;
                 12 (P + D) once, while the snapshot of a checkpoint is written
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.drafting.registry import find_kind
from specrl.errors import MemoryTooSmall
from specrl.models import RunModels
from specrl.spec import RunSpec
from specrl.spec.run import Dtype
from specrl.trainer.memory.estimate import estimate_rank_memory

GIB = 1 << 30
MIB = 1 << 20
_DEFAULT_KV_MIB = 256  # what generation.kvCacheMib: null means on CPUs


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by process. replica_bytes is the need of one replica; trainer_bytes is the need of all ranks together."""

    coordinator_bytes: int
    replica_bytes: int
    trainer_bytes: int
    replicas: int

    @property
    def total_bytes(self) -> int:
        return self.coordinator_bytes + self.replicas * self.replica_bytes + self.trainer_bytes


def estimate_memory(spec: RunSpec, models: RunModels) -> MemoryNeed:
    """Estimate what the run needs on a CPU, by the module's formula. models: with a policy that could be read."""
    policy = models.policy
    assert policy is not None
    item_bytes = 4 if spec.model.dtype is Dtype.FLOAT32 else 2
    vocabulary = policy.config_number("vocab_size") or 0
    parameters = policy.num_parameters
    drafter = find_kind(spec)
    trained = frozen = 0
    if drafter is not None:
        trained = drafter.count_parameters(spec, models)
    elif models.draft_model is not None:
        frozen = models.draft_model.num_parameters
    generation = spec.generation
    trainer = spec.trainer

    replica = (
        1.4 * GIB * generation.tensor_parallel
        + item_bytes * (2 * (parameters + trained) + frozen)
        + (generation.kv_cache_mib or _DEFAULT_KV_MIB) * MIB
        + 3 * 4 * vocabulary * generation.full_step_tokens
    )
    ranks = trainer.parallelism.world_size
    of_rank = estimate_rank_memory(spec, models)
    snapshot = estimate_snapshot_bytes(spec, parameters, trained)
    return MemoryNeed(
        coordinator_bytes=int(0.4 * GIB + 0.3 * GIB * spec.reward_pool.workers),
        replica_bytes=int(replica),
        trainer_bytes=int(ranks * (1.0 * GIB + of_rank.most - of_rank.lessons) + of_rank.lessons + snapshot),
        replicas=generation.replicas,
    )


def estimate_snapshot_bytes(spec: RunSpec, parameters: int, trained: int) -> int:
    """Estimate a checkpoint: float32 weights and Adam's two moments. Low-rank updates are small, and not counted.

    parameters: of the policy. trained: parameters of a drafter that the run trains.
    """
    return 12 * (trained + (parameters if spec.trainer.lora is None else 0))


def check_memory(need: MemoryNeed, available_bytes: int) -> None:
    """Raise MemoryTooSmall when the run needs more memory than the machine has available."""
    if available_bytes < need.total_bytes:
        replicas = f"{need.replicas} x {format_gib(need.replica_bytes)}"
        raise MemoryTooSmall(
            f"available memory must be >= {format_gib(need.total_bytes)} "
            f"(coordinator {format_gib(need.coordinator_bytes)}, "
            f"replicas {replicas}, trainer {format_gib(need.trainer_bytes)}), got {format_gib(available_bytes)}; "
            "free some memory, or lower generation.replicas, generation.kvCacheMib, generation.maxLiveRollouts or "
            "trainer.microBatchTokens"
        )


def format_gib(size_bytes: int) -> str:
    """Format a size as in `1.5 GiB`."""
    return f"{size_bytes / GIB:.1f} GiB"
