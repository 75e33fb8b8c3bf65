"""Whether a model can be shared out as `trainer.parallelism` says. Pure; preflight asks first, then the trainer."""

from __future__ import annotations

import math

from specrl.drafting.policy_config import PolicyConfig
from specrl.errors import Problem
from specrl.spec.trainer import Parallelism


def shares(parallelism: Parallelism, weights: int, of_experts: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """Weights that one rank has, and how many ranks share their optimizer's state: of all but experts, and of experts.

    weights: of the whole model, with `of_experts`. Tensor parallel ranks cut the former; an expert is at a rank whole.
    """
    others = (weights - of_experts) / (parallelism.tensor * parallelism.pipeline)
    experts = of_experts / (parallelism.expert * parallelism.pipeline)
    return (others, parallelism.data * parallelism.context), (experts, parallelism.stage_size // parallelism.expert)


def layout_problems(parallelism: Parallelism, config: PolicyConfig, whose: str = "the model's") -> list[Problem]:
    """Every number of the model that does not divide, by its name in config.json."""
    shared = {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_groups}
    if config.experts is None:  # which are not cut
        shared["intermediate_size"] = config.intermediate_size
    problems = [
        Problem(
            "trainer.parallelism.tensor",
            f"must divide {whose} {name}={size}, got {parallelism.tensor}",
            f"use a divisor of {math.gcd(*shared.values())}",
        )
        for name, size in shared.items()
        if size % parallelism.tensor
    ]
    layers, stages = config.num_layers, parallelism.pipeline * parallelism.virtual_stages
    if layers % stages:
        problems.append(
            Problem(
                "trainer.parallelism.pipeline",
                f"times virtualStages must divide {whose} num_hidden_layers={layers}, "
                f"got {parallelism.pipeline} x {parallelism.virtual_stages} stages",
                f"use a divisor of {layers}, so that all stages have as many layers",
            )
        )
    field = "trainer.parallelism.expert"
    if config.experts is None and parallelism.expert > 1:
        problems.append(
            Problem(field, f"must be 1, since {whose} layers have no experts, got {parallelism.expert}", "leave it out")
        )
    elif config.experts is not None and config.experts.count % parallelism.expert:
        count = config.experts.count
        problems.append(
            Problem(
                field,
                f"must divide {whose} num_experts={count}, got {parallelism.expert}",
                f"use a divisor of {math.gcd(count, parallelism.stage_size)}, which divides the ranks of a stage, too",
            )
        )
    return problems
