"""Does it fit: a replica's weights, drafter, KV cache and rejection sampler's buffers; a trainer's states.

The sampler's peak is not in an engine's own profile (vllm-project/vllm#37521), so it is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.errors import Problem
from specrl.simulator.hardware import Gpu
from specrl.simulator.models import ModelShape
from specrl.simulator.scenario import Mechanism, Precision, Scenario

USABLE = 0.90  # of a GPU's memory: vLLM's default of gpu_memory_utilization
SAMPLER_COPIES = 3  # of the logits at once: raw, processed, probabilities
TRAINER_BYTES = (
    18  # of a parameter: bfloat16 weight and gradient, float32 gradient sum, master, two moments; rounded up
)
GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    """Bytes of one generation GPU and of one training GPU. max_live: rollouts whose KV cache fits at a replica."""

    weights: float
    drafter: float
    sampler: float
    kv_cache: float
    kv_rollout: float
    trainer: float
    gpu: float
    max_live: int


def memory_of(scenario: Scenario, shape: ModelShape, gpu: Gpu, mean_tokens: float) -> Memory:
    """What is needed, and what is left for the KV cache. mean_tokens: of a completion."""
    layout, engine, speculation = scenario.layout, scenario.engine, scenario.speculation
    per_value = 1 if scenario.model.precision is Precision.FP8 else 2
    groups = layout.gpus_per_replica / layout.tensor_parallel
    expert = shape.layers * shape.experts * shape.expert_parameters if shape.experts else 0
    dense = shape.parameters - expert
    weights = per_value * (dense / layout.tensor_parallel + expert / layout.gpus_per_replica)
    k = 0 if speculation.mechanism is Mechanism.NONE else speculation.k
    drafter = 2 * shape.drafter_parameters / layout.tensor_parallel if speculation.mechanism is Mechanism.EAGLE3 else 0
    context = scenario.workload.prompt_tokens + mean_tokens
    kv_heads = max(1 / layout.tensor_parallel, 1 / shape.kv_heads)
    kv_token = shape.kv_bytes_per_token(per_value) * kv_heads / groups
    if k and speculation.mechanism is Mechanism.EAGLE3:
        kv_token *= 1 + 1 / shape.layers  # the drafter's own layer
    wanted = min(engine.max_live_rollouts, _rollouts_per_replica(scenario))
    sampler = SAMPLER_COPIES * wanted / groups * (k + 1) * shape.vocabulary * 4
    kv_cache = gpu.memory_bytes * USABLE - weights - drafter - sampler
    trainer = TRAINER_BYTES * shape.parameters / layout.training_gpus
    max_live = max(0, int(kv_cache // (context * kv_token)))
    return Memory(weights, drafter, sampler, kv_cache, context * kv_token, trainer, gpu.memory_bytes, max_live)


def _rollouts_per_replica(scenario: Scenario) -> int:
    rollouts = scenario.schedule.prompts_per_step * scenario.schedule.group_size
    return -(-rollouts * (scenario.schedule.max_policy_lag + 1) // max(1, scenario.layout.replicas))


def memory_problems(scenario: Scenario, memory: Memory) -> list[Problem]:
    """Where it does not fit, and what to change."""
    found = []
    if memory.max_live < 1:
        parts = {"weights": memory.weights, "drafter": memory.drafter, "sampler": memory.sampler}
        told = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items())
        rule = (
            f"must leave room for one rollout's KV cache ({memory.kv_rollout / GIB:.1f} GiB) in "
            f"{USABLE:.0%} of {memory.gpu / GIB:.0f} GiB, got {told} GiB"
        )
        remedy = "raise layout.tensorParallel or expertParallel, or lower engine.maxLiveRollouts or speculation.k"
        found.append(Problem("memory.generation", rule, remedy))
    if memory.trainer > memory.gpu * USABLE:
        rule = (
            f"must hold {TRAINER_BYTES} bytes of a parameter in {USABLE:.0%} of {memory.gpu / GIB:.0f} GiB, "
            f"got {memory.trainer / GIB:.0f} GiB on each of {scenario.layout.training_gpus} GPUs"
        )
        found.append(Problem("memory.training", rule, "raise layout.trainingGpus"))
    return found
