"""Whether a model can be shared out as `trainer.parallelism` says. Pure; preflight asks first, then the trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from specrl.errors import Problem
from specrl.spec.trainer import Parallelism

SHARED_BY_TENSOR = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def layout_problems(parallelism: Parallelism, sizes: Mapping[str, int | None]) -> list[Problem]:
    """Every number that does not divide. sizes: of the model, by the fields of its config.json; None where unknown."""
    known = [size for name in SHARED_BY_TENSOR if (size := sizes[name])]
    problems = [
        Problem(
            "trainer.parallelism.tensor",
            f"must divide the model's {name}={size}, got {parallelism.tensor}",
            f"use a divisor of {math.gcd(*known)}",
        )
        for name in SHARED_BY_TENSOR
        if (size := sizes[name]) and size % parallelism.tensor
    ]
    layers, stages = sizes["num_hidden_layers"], parallelism.pipeline * parallelism.virtual_stages
    if layers and layers % stages:
        problems.append(
            Problem(
                "trainer.parallelism.pipeline",
                f"times virtualStages must divide the model's num_hidden_layers={layers}, "
                f"got {parallelism.pipeline} x {parallelism.virtual_stages} stages",
                f"use a divisor of {layers}, so that all stages have as many layers",
            )
        )
    return problems
