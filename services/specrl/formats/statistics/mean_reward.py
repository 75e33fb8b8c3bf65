"""Computes the confidence interval of a validation's mean reward. Pure.

The interval is for another draw of both problems and answers. Answers to one problem are not independent, so each
problem counts once, with the mean of its answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrl.formats.statistics.pass_rates import NORMAL_95


def student_interval(means: Sequence[float]) -> tuple[float, float] | None:
    """Compute the 95 % interval of the mean by Student's t. means: one per problem.

    Returns None without any spread to estimate from: for a single problem, or if all values are equal.
    """
    count = len(means)
    if count < 2 or max(means) == min(means):
        return None
    # fsum is exact, so the order of the problems does not change the interval.
    mean = math.fsum(means) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in means) / (count - 1))
    half = student_95(count - 1) * deviation / math.sqrt(count)
    return mean - half, mean + half


def student_95(freedom: int) -> float:
    """Compute the two-sided 95 % quantile of Student's t. freedom: degrees of freedom.

    Exact for 1 and 2. Above, the expansion in 1/freedom of Abramowitz and Stegun 1964, 26.7.5, is within 0.2 %. The
    control plane does not install scipy, which has exact values.
    """
    if freedom == 1:
        return 12.7062  # tan(0.475 pi)
    if freedom == 2:
        return 4.3027  # 0.95 / sqrt(2 * 0.975 * 0.025)
    z: float = NORMAL_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
