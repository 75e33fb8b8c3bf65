"""Checks whether a scenario fits into memory: weights, drafter, KV cache and sampler of a replica; states of a trainer.

vLLM's profile run does not see the rejection sampler's peak (vllm-project/vllm#37521), so it is counted here.
Called by `simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.errors import SpecProblem
from specrl.simulator.scenarios.hardware import Gpu
from specrl.simulator.scenarios.models import ModelShape
from specrl.simulator.scenarios.scenario import Mechanism, Precision, Scenario

USABLE_SHARE = 0.90  # share of a GPU's memory: vLLM's default of gpu_memory_utilization
SAMPLER_COPIES = 3  # copies of the logits at once: raw, processed, probabilities

# Bytes per parameter: bfloat16 weight and gradient, float32 gradient sum, master weight and two moments; rounded up.
TRAINER_BYTES = 18

GIB = 1 << 30


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one generation GPU and of one training GPU. max_live: rollouts whose KV cache fits on a replica."""

    weights: float
    drafter: float
    sampler: float
    kv_cache: float
    kv_rollout: float
    trainer: float
    gpu: float
    max_live: int


def estimate_gpu_memory(scenario: Scenario, shape: ModelShape, gpu: Gpu, mean_tokens: float) -> GpuMemory:
    """Compute the memory that is needed, and the rest for the KV cache. mean_tokens: mean length of a completion."""
    layout = scenario.layout
    has_drafter = scenario.speculation.mechanism is Mechanism.EAGLE3
    per_value = 1 if scenario.model.precision is Precision.FP8 else 2
    expert = shape.layers * shape.experts * shape.expert_parameters if shape.experts else 0
    dense = shape.total_parameters - expert
    weights = per_value * (dense / layout.tensor_parallel + expert / layout.gpus_per_replica)
    k = scenario.speculation.draft_tokens
    drafter = 2 * shape.drafter_parameters / layout.tensor_parallel if has_drafter else 0
    context = scenario.workload.prompt_tokens + mean_tokens
    kv_heads = max(1 / layout.tensor_parallel, 1 / shape.kv_heads)
    kv_token = shape.kv_bytes_per_token(per_value) * kv_heads / layout.attention_groups
    if k and has_drafter:
        kv_token *= 1 + 1 / shape.layers  # the drafter has one layer with its own KV cache
    wanted = min(scenario.engine.max_live_rollouts, scenario.max_replica_rollouts)
    sampler = SAMPLER_COPIES * wanted / layout.attention_groups * (k + 1) * shape.vocabulary * 4
    kv_cache = gpu.memory_bytes * USABLE_SHARE - weights - drafter - sampler
    trainer = TRAINER_BYTES * shape.total_parameters / layout.training_gpus
    max_live = max(0, int(kv_cache // (context * kv_token)))
    return GpuMemory(weights, drafter, sampler, kv_cache, context * kv_token, trainer, gpu.memory_bytes, max_live)


def find_memory_problems(scenario: Scenario, memory: GpuMemory) -> list[SpecProblem]:
    """Return what does not fit, and what to change."""
    found = []
    if memory.max_live < 1:
        parts = {"weights": memory.weights, "drafter": memory.drafter, "sampler": memory.sampler}
        told = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items())
        rule = (
            f"must leave room for one rollout's KV cache ({memory.kv_rollout / GIB:.1f} GiB) in "
            f"{USABLE_SHARE:.0%} of {memory.gpu / GIB:.0f} GiB, got {told} GiB"
        )
        remedy = "raise layout.tensorParallel or expertParallel, or lower engine.maxLiveRollouts or speculation.k"
        found.append(SpecProblem("memory.generation", rule, remedy))
    if memory.trainer > memory.gpu * USABLE_SHARE:
        rule = (
            f"must hold {TRAINER_BYTES} bytes per parameter in {USABLE_SHARE:.0%} of {memory.gpu / GIB:.0f} GiB, "
            f"got {memory.trainer / GIB:.0f} GiB on each of {scenario.layout.training_gpus} GPUs"
        )
        found.append(SpecProblem("memory.training", rule, "raise layout.trainingGpus"))
    return found
