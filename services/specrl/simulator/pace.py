"""Seconds for one token of each live rollout, by live batch and context: the one table that the events look up.

pace(B, s) = min over k of step(B, k, s) / tau(k), with k fixed unless it is chosen by the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specrl.simulator.acceptance import constant_chance, emitted
from specrl.simulator.costs import Costs, Floats
from specrl.simulator.scenario import Mechanism, Scenario, Speculation

CONTEXTS = 24  # bins of context; between them a step's cost is nearly linear


@dataclass(frozen=True)
class Pace:
    """rows[B][c]: seconds for a token at B live rollouts (from 0) in context bin c. bin_tokens: width of a bin.

    lengths_B: draft length at each B, at the middle bin.
    """

    rows: list[list[float]]
    bin_tokens: float
    lengths_B: list[int]


def tokens_per_step(speculation: Speculation, k: int) -> float:
    """tau(k) at another k than the one that the acceptance was measured at, too."""
    if k == 0 or speculation.mechanism is Mechanism.NONE:
        return 1.0
    if speculation.chances is not None:
        return emitted(speculation.chances, k)
    assert speculation.acceptance_length is not None  # rules.py
    return emitted([constant_chance(speculation.acceptance_length, speculation.k)], k)


def pace_of(scenario: Scenario, costs: Costs, max_live: int) -> Pace:
    """The table of a scenario, up to `max_live` rollouts of a replica."""
    speculation, work = scenario.speculation, scenario.workload
    bin_tokens = (work.prompt_tokens + work.max_tokens) / CONTEXTS
    batch_B = np.arange(0, max_live + 1, dtype=np.float64)
    batch_B[0] = 1.0
    longest = 0 if speculation.mechanism is Mechanism.NONE else speculation.k
    choices = range(longest + 1) if speculation.is_adaptive else (longest,)
    table: list[Floats] = []
    lengths: list[int] = []
    for place in range(CONTEXTS + 1):
        context = (place + 0.5) * bin_tokens
        seconds_kB = np.array([costs.step_s(batch_B, k, context) / tokens_per_step(speculation, k) for k in choices])
        table.append(seconds_kB.min(axis=0))
        if place == CONTEXTS // 2:
            lengths = [choices[best] for best in seconds_kB.argmin(axis=0)]
    rows: list[list[float]] = np.array(table).T.tolist()
    return Pace(rows, bin_tokens, lengths)
