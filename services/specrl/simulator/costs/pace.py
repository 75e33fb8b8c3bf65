"""Seconds per token of each live rollout, by live batch and context: the one table that events look up.

pace(B, s) = min over k of step(B, k, s) / tau(k), with k fixed unless it is chosen by batch. A verification emits
tau(k) = 1 + sum_j prod_{i<=j} a_i tokens. A scenario gives either the measured acceptance chances a_i by position, or
the acceptance length at its own k. In the second case all positions get the same chance. Public EAGLE traces look like
that: they show no downward trend by position. Called by `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from specrl.simulator.costs.interface import CostModel, Floats
from specrl.simulator.scenarios.scenario import Mechanism, Scenario, Speculation

CONTEXT_BINS = 24  # bins of context; within a bin a step's cost is nearly linear


@dataclass(frozen=True)
class PaceTable:
    """The table of paces. rows[B][c]: seconds per token at B live rollouts (from 0) in context bin c.

    bin_tokens: width of a bin. lengths_B: draft length at each B, at the middle bin.
    """

    rows: list[list[float]]
    bin_tokens: float
    lengths_B: list[int]


def emitted_tokens(chances: Sequence[float], k: int) -> float:
    """Return tau(k), the tokens that a verification emits, bonus token included.

    Positions beyond those given have the chance of the last one.
    """
    longer = [*chances[:k], *[chances[-1] if chances else 0.0] * (k - len(chances))]
    return 1.0 + float(sum(accumulate(longer, mul)))


def solve_constant_chance(acceptance_length: float, k: int) -> float:
    """Return the p for which 1 + p + ... + p^k equals this length; by bisection, to 1e-12.

    The length must be from 1 to k + 1.
    """
    low = 0.0
    high = 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if emitted_tokens([middle], k) < acceptance_length else (low, middle)
    return (low + high) / 2


def tokens_per_step(speculation: Speculation, k: int) -> float:
    """Return tau(k), also for a k other than the one at which acceptance was measured."""
    if k == 0 or speculation.mechanism is Mechanism.NONE:
        return 1.0
    if speculation.chances is not None:
        return emitted_tokens(speculation.chances, k)
    assert speculation.acceptance_length is not None  # rules.py
    return emitted_tokens([solve_constant_chance(speculation.acceptance_length, speculation.k)], k)


def build_pace_table(scenario: Scenario, costs: CostModel, max_live: int) -> PaceTable:
    """Build the table of a scenario for up to `max_live` rollouts per replica."""
    speculation = scenario.speculation
    work = scenario.workload
    bin_tokens = (work.prompt_tokens + work.max_tokens) / CONTEXT_BINS
    batch_B = np.arange(0, max_live + 1, dtype=np.float64)
    batch_B[0] = 1.0  # row 0 must not be zero: the pipeline divides an empty replica's 0 rollouts by it
    longest = speculation.draft_tokens
    choices = range(longest + 1) if speculation.is_adaptive else (longest,)
    table: list[Floats] = []
    lengths: list[int] = []
    for place in range(CONTEXT_BINS + 1):
        context = (place + 0.5) * bin_tokens
        seconds_kB = np.array([costs.step_s(batch_B, k, context) / tokens_per_step(speculation, k) for k in choices])
        table.append(seconds_kB.min(axis=0))
        if place == CONTEXT_BINS // 2:
            lengths = [choices[best] for best in seconds_kB.argmin(axis=0)]
    rows: list[list[float]] = np.array(table).T.tolist()
    return PaceTable(rows, bin_tokens, lengths)
