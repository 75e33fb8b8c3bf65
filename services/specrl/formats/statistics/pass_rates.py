"""Estimates pass@k of a validation, with confidence intervals. Pure.

An attempt passes if its reward is 1. Validation calls it only if all rewards are 0 or 1: otherwise no threshold says
which answers are right. The intervals are for another draw of both problems and attempts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrl.formats.reports import PassAt

NORMAL_95 = 1.959964
"""95 % of a normal distribution lie within this many standard deviations of its mean."""


def estimate_pass_at(k: int, attempts: int, passed: int) -> float:
    """Estimate the probability that at least one of k attempts passes: 1 - C(n-c, k) / C(n, k), 1 <= k <= n.

    n: attempts. c: passed. Unbiased, unlike 1 - (1 - c/n)^k. Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def estimate_pass_rates(counts: Sequence[tuple[int, int]]) -> list[PassAt]:
    """Average pass@k over problems, for k = 1, 2, 4, ... and for the most attempts of any problem.

    counts: (attempts, passed) of each problem. A problem with fewer than k attempts does not count for that k.
    """
    most = max((attempts for attempts, _ in counts), default=0)
    found = []
    # Without problems `most` is 0, which is not a number of attempts.
    for k in sorted({*(1 << power for power in range(most.bit_length())), most} - {0}):
        values = [estimate_pass_at(k, attempts, passed) for attempts, passed in counts if attempts >= k]
        rate = sum(values) / len(values)
        # The attempts of a problem hold most // k disjoint sets of k, each an independent draw.
        low, high = effective_wilson_interval(values, most // k)
        found.append(PassAt(k=k, rate=rate, low=low, high=high, problems=len(values)))
    return found


def effective_wilson_interval(values: Sequence[float], draws: int) -> tuple[float, float]:
    """Compute the 95 % interval of the mean of `values`: Wilson's, with an effective sample size.

    values: one per problem, in 0 to 1, each the mean of `draws` independent draws. The effective sample size is
    n p (1-p) / s^2, with the values' mean p and variance s^2. A share of that many yes-or-no problems would vary as
    much. The size is n for values of 0 and 1, and is capped at n * draws.
    Source: Dean and Pagano 2015, doi:10.1093/jssam/smv024 (Wilson intervals with an effective sample size).
    """
    count = len(values)
    if count == 0:
        return 0.0, 1.0
    mean = sum(values) / count
    spread = mean * (1 - mean)
    variance = sum((value - mean) ** 2 for value in values) / count
    # If all answers pass, or none does, nothing shows that draws of one problem differ. Then each problem counts once.
    most = count * (draws if spread > 0 else 1)
    return wilson_interval(mean, min(most, count * spread / variance) if variance > 0 else most)


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Compute the 95 % interval of a share of `count` problems (Wilson 1927). Unlike the normal one it stays in 0 to 1.

    count: may be fractional.
    """
    if count == 0:
        return 0.0, 1.0
    z2 = NORMAL_95**2 / count
    centre = share + z2 / 2
    half = NORMAL_95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    return max(0.0, (centre - half) / (1 + z2)), min(1.0, (centre + half) / (1 + z2))
