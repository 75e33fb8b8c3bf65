"""How many tokens a verification emits: tau(k) = 1 + sum_j prod_{i<=j} a_i.

A scenario gives either the chances by position as a run measured them, or the acceptance length at its own k; then all
positions have the same chance p, which is what public EAGLE traces look like (no downward trend by position).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def emitted(chances: Sequence[float], k: int) -> float:
    """tau(k), bonus token included. Positions beyond those given are like the last."""
    longer = [*chances[:k], *[chances[-1] if chances else 0.0] * (k - len(chances))]
    return 1.0 + float(sum(accumulate(longer, mul)))


def constant_chance(acceptance_length: float, k: int) -> float:
    """The p of which 1 + p + ... + p^k is this length, 1 <= length <= k + 1; by bisection, to 1e-12."""
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if emitted([middle], k) < acceptance_length else (low, middle)
    return (low + high) / 2
