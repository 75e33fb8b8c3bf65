"""Checks whether a model can be sharded as `trainer.parallelism` asks, how large each rank's shard is, and which ranks
work on the same rollouts.

Pure and without torch. Preflight checks first, before anything starts; the trainer checks again when it builds models.
"""

from __future__ import annotations

import math

from specrl.errors import SpecProblem
from specrl.models.policy_config import PolicyConfig
from specrl.spec.trainer import OptimizerKind, Parallelism


def compute_shares(
    parallelism: Parallelism, kind: OptimizerKind, weights: int, of_experts: int
) -> tuple[tuple[float, int], tuple[float, int]]:
    """Compute how many weights one rank holds, and how many ranks share the optimizer state of these weights.

    Returns a pair (weights, ranks) for all weights but experts, and one for experts. weights: parameters of the whole
    model, `of_experts` of them in experts.
    """
    others = (weights - of_experts) / (parallelism.tensor * parallelism.pipeline)
    # Tensor parallelism does not split an expert: each is whole at one rank of its expert parallel group.
    experts = of_experts / (parallelism.expert * parallelism.pipeline)
    if kind is OptimizerKind.MUON:  # every rank has the whole state of its weights
        return (others, 1), (experts, 1)
    sharing = max(1, parallelism.stage_size // parallelism.expert)  # 0 for an invalid layout, which is estimated, too
    return (others, parallelism.data * parallelism.context), (experts, sharing)


def list_replicas(parallelism: Parallelism) -> list[list[int]]:
    """List the ranks of every data parallel replica, ascending. Each rank is in one.

    Ranks are numbered tensor parallel first, then context, data and pipeline parallel.
    """
    inner = parallelism.tensor * parallelism.context
    replicas: list[list[int]] = [[] for _ in range(parallelism.data)]
    for rank in range(parallelism.world_size):
        replicas[rank // inner % parallelism.data].append(rank)
    return replicas


def compute_moment_bytes(kind: OptimizerKind, config: PolicyConfig) -> float:
    """Compute the mean bytes of a weight's moments: 8 with AdamW; with Muon 4 in layers, 8 in embedding and output."""
    if kind is OptimizerKind.ADAMW:
        return 8
    ends = config.vocab_size * config.hidden_size * (1 if config.is_tied else 2)
    return 4 + 4 * ends / config.num_parameters


def find_layout_problems(
    parallelism: Parallelism, config: PolicyConfig, whose: str = "the model's"
) -> list[SpecProblem]:
    """Find every dimension of the model that `parallelism` does not divide, by its name in config.json.

    whose: the model in messages, such as "the model's".
    """
    shared = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_groups}
    if config.experts is None:  # the MLPs of experts are not split by tensor parallelism
        shared["intermediate_size"] = config.intermediate_size
    problems = [
        SpecProblem(
            "trainer.parallelism.tensor",
            f"must divide {whose} {name}={size}, got {parallelism.tensor}",
            f"use a divisor of {math.gcd(*shared.values())}",
        )
        for name, size in shared.items()
        if size % parallelism.tensor
    ]
    layers = config.num_layers
    stages = parallelism.pipeline * parallelism.virtual_stages
    if layers % stages:
        problems.append(
            SpecProblem(
                "trainer.parallelism.pipeline",
                f"times virtualStages must divide {whose} num_hidden_layers={layers}, "
                f"got {parallelism.pipeline} x {parallelism.virtual_stages} stages",
                f"use a divisor of {layers}, so that all stages have equally many layers",
            )
        )
    field = "trainer.parallelism.expert"
    if config.experts is None and parallelism.expert > 1:
        problems.append(
            SpecProblem(field, f"must be 1, since {whose} layers have no experts, got {parallelism.expert}", "omit it")
        )
    elif config.experts is not None and config.experts.count % parallelism.expert:
        count = config.experts.count
        problems.append(
            SpecProblem(
                field,
                f"must divide {whose} num_experts={count}, got {parallelism.expert}",
                # It must also divide the ranks of a stage, another rule of the run file.
                f"use a divisor of {math.gcd(count, parallelism.stage_size)}",
            )
        )
    return problems
