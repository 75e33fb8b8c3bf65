"""Compares the first steps of a run with its last. No step counts at both ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

EDGE_STEPS = 5
"""Steps averaged at each end. A single step has few prompts, so its reward is noisy."""


@dataclass(frozen=True)
class EdgeMeans:
    """Means at both ends of a run.

    first: None with fewer than two values. last: None without any; with one value, that value.
    steps: how many values `first` is the mean of; 0 when it is None.
    """

    first: float | None
    last: float | None
    steps: int


def compare_edges(values: Sequence[float]) -> EdgeMeans:
    """Average the first and the last EDGE_STEPS values, or fewer, equally many at each end. values: in step order."""
    steps = min(EDGE_STEPS, len(values) // 2)
    # With a single value `steps` is 0: the first slice is empty, and the last one has that value.
    return EdgeMeans(_mean_or_none(values[:steps]), _mean_or_none(values[-max(steps, 1) :]), steps)


def compare_edges_by_name(names: Iterable[str], rows: Sequence[Mapping[str, float]]) -> dict[str, EdgeMeans]:
    """Compare the edges of each name, over the steps that have a value of it. rows: values of each step, by name."""
    return {name: compare_edges([row[name] for row in rows if name in row]) for name in names}


def compare_first_with_last(values: Sequence[float]) -> EdgeMeans:
    """Compare the first value with the mean of the last EDGE_STEPS values, or fewer, after it.

    For figures that change most in the first step, such as the acceptance length.
    """
    steps = min(1, len(values) // 2)  # 0 for a single value, which is the last one
    return EdgeMeans(_mean_or_none(values[:steps]), _mean_or_none(values[steps:][-EDGE_STEPS:]), steps)


def _mean_or_none(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
