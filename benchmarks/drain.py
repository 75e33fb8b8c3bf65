"""Computes how long a synchronous step generates: seconds from the first token of a batch to its last rollout.

    T = max over replicas of the sum over rollouts, shortest first, of (L_i - L_(i-1)) * pace(rollouts left, context)

All rollouts start together. The simulator's events give the same result if every rollout has a seat at once, which a
test checks. `simulator_accuracy` needs this result a thousand times, so it uses the formula.
"""

from __future__ import annotations

import numpy as np

from specrl.simulator.costs.interface import Floats
from specrl.simulator.costs.pace import PaceTable


def drain_s(lengths_PG: Floats, replicas: int, pace: PaceTable, prompt_tokens: float) -> float:
    """Compute the seconds.

    lengths_PG: [prompts, group] tokens; group i goes to replica i mod N. Raises ValueError unless each rollout has a
    seat.
    """
    prompts, size = lengths_PG.shape
    rounds = -(-prompts // replicas)
    if rounds * size >= len(pace.rows):
        raise ValueError(f"rollouts of a replica must fit its seats, got {rounds * size} > {len(pace.rows) - 1}")
    padded = np.zeros((rounds * replicas, size))
    padded[:prompts] = lengths_PG
    ends_RN = np.sort(padded.reshape(rounds, replicas, size).swapaxes(0, 1).reshape(replicas, rounds * size), axis=1)
    starts_RN = np.concatenate([np.zeros((replicas, 1)), ends_RN[:, :-1]], axis=1)
    context_RN = prompt_tokens + (starts_RN + ends_RN) / 2
    table = np.asarray(pace.rows)
    bins_RN = np.minimum((context_RN / pace.bin_tokens).astype(int), table.shape[1] - 1)
    live_N = np.arange(ends_RN.shape[1], 0, -1)
    return float(((ends_RN - starts_RN) * table[live_N, bins_RN]).sum(axis=1).max())
