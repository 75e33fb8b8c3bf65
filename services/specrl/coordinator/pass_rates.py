"""How often a policy solves a problem within k attempts, and how well a validation knows it. Pure.

An attempt passes with a reward of 1. Called where all rewards are 0 or 1: with others nothing says what is right.
Intervals are over problems: another draw of problems and attempts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrl.coordinator.report import PassAt

NORMAL_95 = 1.959964
"""Of the normal distribution 95 % lie within so many standard deviations."""


def pass_at(k: int, attempts: int, passed: int) -> float:
    """Probability that k of the attempts, drawn without putting back, have one that passed: 1 - C(n-c, k) / C(n, k).

    1 <= k <= attempts. Unbiased over attempts, unlike 1 - (1 - c/n)^k. Source: Chen et al. 2021, arXiv:2107.03374.
    """
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def pass_rates(counts: Sequence[tuple[int, int]]) -> list[PassAt]:
    """Mean pass@k over problems, each as (attempts, passed), for k = 1, 2, 4 and so on, and the most attempts.

    A problem with fewer than k attempts says nothing of pass@k, and is left out of it.
    """
    most = max((attempts for attempts, _ in counts), default=0)
    found = []
    for k in sorted({*(1 << power for power in range(most.bit_length())), most} - {0}):
        values = [pass_at(k, attempts, passed) for attempts, passed in counts if attempts >= k]
        rate = sum(values) / len(values)
        low, high = interval(values, most // k)
        found.append(PassAt(k=k, rate=rate, low=low, high=high, problems=len(values)))
    return found


def interval(values: Sequence[float], draws: int) -> tuple[float, float]:
    """95 % interval of the mean of one value in 0 to 1 a problem: Wilson's, of the effective number of problems.

    That is the number of yes-or-no problems whose share would vary as much, n p (1-p) / s^2 with the values' variance
    s^2; n for values of 0 and 1, more for means of several attempts. It is at most n * draws, of which each value is a
    mean. Source: Dean and Pagano 2015, doi:10.1093/jssam/smv024 (Wilson intervals with an effective sample size).
    """
    count = len(values)
    if count == 0:
        return 0.0, 1.0
    mean = sum(values) / count
    spread, variance = mean * (1 - mean), sum((value - mean) ** 2 for value in values) / count
    most = count * (draws if spread > 0 else 1)
    return wilson(mean, min(most, count * spread / variance) if variance > 0 else most)


def wilson(share: float, count: float) -> tuple[float, float]:
    """95 % confidence interval of a share of `count` problems (Wilson 1927). Within 0 and 1, unlike the normal one."""
    if count == 0:
        return 0.0, 1.0
    z2 = NORMAL_95**2 / count
    centre, half = share + z2 / 2, NORMAL_95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return max(0.0, (centre - half) / (1 + z2)), min(1.0, (centre + half) / (1 + z2))
