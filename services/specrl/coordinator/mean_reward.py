"""How well the mean reward of a validation is known. Pure.

The interval is over problems: another draw of problems and answers. The answers to one problem are no independent
sample, so each problem counts once, with the mean of its answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrl.coordinator.pass_rates import NORMAL_95


def mean_interval(means: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean of one value a problem, by Student's t.

    None where there is no spread to judge by: of a single problem, or when all values are equal.
    """
    count = len(means)
    if count < 2 or max(means) == min(means):
        return None
    mean = math.fsum(means) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in means) / (count - 1))
    half = student_95(count - 1) * deviation / math.sqrt(count)
    return mean - half, mean + half


def student_95(freedom: int) -> float:
    """95 % of Student's t with so many degrees of freedom lie within this.

    Exact for one and two; beyond that within 0.2 %, by the expansion in 1/freedom of Abramowitz and Stegun 1964,
    26.7.5. scipy has the exact ones, and a coordinator is installed without it.
    """
    if freedom == 1:
        return 12.7062
    if freedom == 2:
        return 4.3027
    z: float = NORMAL_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
