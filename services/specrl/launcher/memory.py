"""Estimates how much memory a run on this machine's CPU needs, before it starts. Pure arithmetic.

The estimate is a coarse upper bound on what can be foreseen. docs/architecture.md records what real runs took.
P: parameters of the policy, D: those of the drafter, b: bytes of the policy's dtype, V: vocabulary size, H: hidden
size, L: layers, T: tokens of one forward pass.

    coordinator  0.4 GiB, plus 0.3 GiB for each reward worker
    replica      1.4 GiB of libraries and buffers per process (measured: 1.7 GB with a tiny model and 256 MiB of KV),
                 2 b (P + D) for the weights and the next version while it arrives; b D for a draft model that is not
                 trained, which gets no other version;
                 the KV cache, and 3 float32 rows of V for each live rollout and drafted token
    trainer      1.0 GiB of libraries per rank;
                 (b + 4) P for weights and float32 gradients;
                 8 P for AdamW's two moments, plus 4 P for float32 master weights unless b = 4. The data and context
                 ranks share these. With Muon they do not, and a weight of a layer has one moment, 4 bytes. Tensor and
                 pipeline ranks divide all of it; expert and pipeline ranks divide the experts. With low-rank updates
                 it is 2 b P: the base weights, and the weights that a pass uses;
                 16 D for the drafter, whole at every rank: float32 weights, gradients and two moments; and the
                 activations of its passes, where its kind estimates them;
                 12 (P + D) once, while the snapshot of a checkpoint is written;
                 T (12 V + 34 b' H L) bytes of logits and activations, divided by the tensor ranks; with topP or topK
                 14 V, for masks of the logits. b' = b / 2: Korthikanti et al., arXiv:2205.05198, count 34 s b h at two
                 bytes per number. A pipeline rank holds the activations of as many passes as there are pipeline stages;
                 with a drafter, b K bytes of targets for each token that it learns from in a step, at most 2 GiB over
                 all ranks. K: draft vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.drafting.kind import TARGET_BYTES
from specrl.drafting.registry import find_kind
from specrl.errors import MemoryTooSmall
from specrl.models import RunModels
from specrl.spec import RunSpec
from specrl.spec.run import Dtype
from specrl.trainer.layout import compute_moment_bytes, compute_shares

GIB = 1 << 30
MIB = 1 << 20
DRAFTER_BYTES = 16  # of each of the drafter's parameters at a rank
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
    trained = frozen = targets = 0
    if drafter is not None:
        trained = drafter.count_parameters(spec, models)
        targets = _count_target_bytes(spec, drafter.count_draft_ids(spec, policy) * item_bytes)
    elif models.draft_model is not None:
        frozen = models.draft_model.num_parameters
    generation = spec.generation
    trainer = spec.trainer

    rows = generation.max_live_rollouts * (1 + generation.speculation.num_draft_tokens)
    replica = (
        1.4 * GIB * generation.tensor_parallel
        + item_bytes * (2 * (parameters + trained) + frozen)
        + (generation.kv_cache_mib or _DEFAULT_KV_MIB) * MIB
        + 3 * 4 * vocabulary * rows
    )
    ranks = trainer.parallelism
    # Weights, gradients and optimizer state, rank group by rank group.
    state = 0.0
    config = policy.policy_config
    kind = trainer.optimizer.kind
    masters_and_moments = (0 if item_bytes == 4 else 4) + compute_moment_bytes(kind, config)
    for mine, shared_by in compute_shares(ranks, kind, parameters, config.num_expert_parameters):
        optimizer = masters_and_moments / shared_by
        reference = item_bytes if trainer.loss.reference_kl is not None else 0
        state += mine * (item_bytes + reference + (4 + optimizer if trainer.lora is None else item_bytes))
    if drafter is not None:
        state += DRAFTER_BYTES * trained + drafter.estimate_pass_bytes(spec, models)
    # 12 V bytes are three float32 rows of the vocabulary; 17 b equals the 34 b' of the formula.
    column = 14 if generation.sampling.is_truncated else 12
    width_times_depth = (policy.config_number("hidden_size") or 0) * (policy.config_number("num_hidden_layers") or 0)
    activations = _max_pass_tokens(spec) * (column * vocabulary + 17 * item_bytes * width_times_depth) / ranks.tensor
    snapshot = 12 * (trained + (parameters if trainer.lora is None else 0))  # low-rank updates are small
    return MemoryNeed(
        coordinator_bytes=int(0.4 * GIB + 0.3 * GIB * spec.reward_pool.workers),
        replica_bytes=int(replica),
        trainer_bytes=int(ranks.world_size * (1.0 * GIB + state + activations) + snapshot + targets),
        replicas=generation.replicas,
    )


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


def _count_target_bytes(spec: RunSpec, row_bytes: int) -> int:
    """Count the bytes of the targets that the drafter learns from in a step, row_bytes for each token."""
    schedule = spec.schedule
    tokens = schedule.prompts_per_step * schedule.group_size * spec.generation.sampling.max_tokens
    budget = spec.trainer.drafter.token_budget
    return min(TARGET_BYTES, row_bytes * (tokens if budget is None else min(tokens, budget)))


def _max_pass_tokens(spec: RunSpec) -> int:
    """Return the most tokens in one forward pass: a micro-batch, but at most one data rank's share of a step."""
    schedule = spec.schedule
    rollouts = -(-schedule.prompts_per_step * schedule.group_size // spec.trainer.parallelism.data)
    longest = spec.prompts.max_tokens + spec.generation.sampling.max_tokens
    return min(spec.trainer.micro_batch_tokens, rollouts * longest)


def format_gib(size_bytes: int) -> str:
    """Format a size as in `1.5 GiB`."""
    return f"{size_bytes / GIB:.1f} GiB"
