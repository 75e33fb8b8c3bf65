"""How much memory a run on this machine's CPU needs, estimated before it starts. Pure arithmetic.

A coarse upper estimate of what can be foreseen; docs/architecture.md records what runs were measured to take.
P: parameters of the policy, b: bytes of its dtype, V: vocabulary, H: width, L: layers, T: tokens of one forward pass.

    coordinator  0.4 GiB, and 0.3 GiB for each reward worker
    replica      1.4 GiB of libraries and buffers a process (1.7 GB were measured with a tiny model and 256 MiB of KV),
                 2 b P: the weights, and those of the next version on their way in (the drafter counts as a part of P),
                 the KV cache, and 3 float32 rows of V for each live rollout and drafted token
    trainer      1.0 GiB of libraries a rank, (b + 4) P: weights and gradients in float32, and 8 P: AdamW's two moments,
                 plus 4 P for float32 master weights unless they are float32 already, shared by the data and context
                 ranks; all of it divided by the tensor and pipeline ranks, of experts by the expert and pipeline ones
                 (with low-rank updates 2 b P: the weights, and what they are computed with); 12 P once, while a
                 checkpoint's snapshot is written; and T (12 V + 34 b' H L) bytes of logits and activations divided by
                 the tensor ranks (34: Korthikanti et al., arXiv:2205.05198, which counts 34 s b h at two bytes a
                 number; b' = b / 2; a pipeline rank holds those of as many passes as there are stages)
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.drafting.policy_config import read_policy_config
from specrl.errors import MemoryTooSmall
from specrl.launcher.model_folder import ModelSummary
from specrl.spec import RunSpec
from specrl.spec.run import Dtype
from specrl.trainer.layout import shares

GIB = 1 << 30
MIB = 1 << 20
_DEFAULT_KV_MIB = 256  # generation.kvCacheMib: null on CPUs


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by process; `replica_bytes` is one replica's."""

    coordinator_bytes: int
    replica_bytes: int
    trainer_bytes: int
    replicas: int

    @property
    def total_bytes(self) -> int:
        return self.coordinator_bytes + self.replicas * self.replica_bytes + self.trainer_bytes


def estimate_memory(spec: RunSpec, policy: ModelSummary, draft_model_parameters: int = 0) -> MemoryNeed:
    """What the run needs on a CPU, by the formula above. A draft model is in the replicas alone, and never updated."""
    item_bytes = 4 if spec.model.dtype is Dtype.FLOAT32 else 2
    vocabulary = policy.number("vocab_size") or 0
    parameters = policy.parameters + _drafter_parameters(spec, policy)
    generation, trainer = spec.generation, spec.trainer

    rows = generation.max_live_rollouts * (1 + generation.speculation.num_draft_tokens)
    replica = (
        1.4 * GIB * generation.tensor_parallel
        + 2 * item_bytes * parameters
        + item_bytes * draft_model_parameters
        + (generation.kv_cache_mib or _DEFAULT_KV_MIB) * MIB
        + 3 * 4 * vocabulary * rows
    )
    ranks = trainer.parallelism
    state = 0.0
    for mine, shared_by in shares(ranks, parameters, read_policy_config(policy.path).num_expert_parameters):
        optimizer = (8 + (0 if item_bytes == 4 else 4)) / shared_by
        reference = item_bytes if trainer.loss.reference_kl is not None else 0
        state += mine * (item_bytes + reference + (4 + optimizer if trainer.lora is None else item_bytes))
    width_times_depth = (policy.number("hidden_size") or 0) * (policy.number("num_hidden_layers") or 0)
    activations = _tokens_of_a_pass(spec) * (12 * vocabulary + 17 * item_bytes * width_times_depth) / ranks.tensor
    snapshot = 12 * parameters if trainer.lora is None else 0  # low-rank updates are small
    return MemoryNeed(
        coordinator_bytes=int(0.4 * GIB + 0.3 * GIB * spec.reward_pool.workers),
        replica_bytes=int(replica),
        trainer_bytes=int(ranks.world_size * (1.0 * GIB + state + activations) + snapshot),
        replicas=generation.replicas,
    )


def check_memory(need: MemoryNeed, available_bytes: int) -> None:
    """Raise MemoryTooSmall when the machine has less available than the run needs."""
    if available_bytes < need.total_bytes:
        replicas = f"{need.replicas} x {_gib(need.replica_bytes)}"
        raise MemoryTooSmall(
            f"available memory must be >= {_gib(need.total_bytes)} (coordinator {_gib(need.coordinator_bytes)}, "
            f"replicas {replicas}, trainer {_gib(need.trainer_bytes)}), got {_gib(available_bytes)}; "
            "free memory, or lower generation.replicas, generation.kvCacheMib, generation.maxLiveRollouts or "
            "trainer.microBatchTokens"
        )


def _drafter_parameters(spec: RunSpec, policy: ModelSummary) -> int:
    """An EAGLE-3 head: one decoder layer over two streams, the fusion of three, and its own output matrix."""
    eagle3 = spec.generation.speculation.eagle3
    if eagle3 is None:
        return 0
    width, inner = policy.number("hidden_size") or 0, policy.number("intermediate_size") or 0
    vocabulary = eagle3.draft_vocab_size or policy.number("vocab_size") or 0
    return 3 * width**2 + 6 * width**2 + 3 * width * inner + vocabulary * width


def _tokens_of_a_pass(spec: RunSpec) -> int:
    """No more than one rank's share of a step, however large the micro-batch may be."""
    schedule = spec.schedule
    rollouts = -(-schedule.prompts_per_step * schedule.group_size // spec.trainer.parallelism.data)
    longest = spec.prompts.max_tokens + spec.generation.sampling.max_tokens
    return min(spec.trainer.micro_batch_tokens, rollouts * longest)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
