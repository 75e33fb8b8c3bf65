"""One part of the kit: what it needs, what it measures, and which figures would be a failure.

A part runs in a process of its own, so that a crash, a hang or a full GPU ends that part alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Figures = dict[str, Any]


class State(StrEnum):
    """How a part ended."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


class PartSkipped(Exception):
    """This machine lacks what the part needs. The message says what."""


@dataclass(frozen=True)
class Size:
    """How much a part computes. scale: 2 for a GPU, 1 for a CPU in miniature, 0 for tests."""

    scale: int

    def choose(self, gpu: int, cpu: int, test: int) -> int:
        """Return the value for this size."""
        return (test, cpu, gpu)[self.scale]


@dataclass(frozen=True)
class Part:
    """One part.

    find_fault: says what is wrong with its figures; None if nothing is. broken: figures that `find_fault` must refuse;
    `--inject` and the tests put them into real ones.
    """

    name: str
    measures: str
    measure: Callable[[Size], Figures]
    find_fault: Callable[[Mapping[str, Any]], str | None]
    broken: Figures


def find_bad_rate(figures: Mapping[str, Any], *names: str) -> str | None:
    """Say which of these figures is no positive finite number, as every time and every rate must be."""
    for name in names:
        value = figures.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            return f"{name} must be a positive number, got {value}"
    return None
