"""Compares the beginning of a run with its end. No step is counted at both ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

EDGE_STEPS = 5
"""One step says little of a reward: it has a few prompts."""


@dataclass(frozen=True)
class Edges:
    """first: None with fewer than two measurements, which cannot be compared; last is that of the only one then.

    steps: how many measurements first is the mean of.
    """

    first: float | None
    last: float | None
    steps: int


def compare_edges(values: Sequence[float]) -> Edges:
    """Means over the first and over the last few steps, as many at each end. values: of each step, ascending."""
    steps = min(EDGE_STEPS, len(values) // 2)
    return Edges(_mean(values[:steps]), _mean(values[-max(steps, 1) :]), steps)


def compare_first_with_last(values: Sequence[float]) -> Edges:
    """The first value alone, for what changes most in the first step, and the mean over the last few after it."""
    steps = min(1, len(values) // 2)
    return Edges(_mean(values[:steps]), _mean(values[steps:][-EDGE_STEPS:]), steps)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
