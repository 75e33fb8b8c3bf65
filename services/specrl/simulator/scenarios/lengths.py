"""How long rollouts are, and how similar within a group: a distribution that ends at a cap, or a run's own groups.

Completions of one prompt resemble each other. With only a distribution and a correlation c, a rollout's normal deviate
is sqrt(c) * its group's + sqrt(1 - c) * its own. The quantile function turns it into a length. A run tells more:
which prompts get long answers, and how far their answers differ. So a measured prompt is drawn with its own lengths,
and the time until a step's last rollout comes out as it was. Called by `simulate` and `pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

Floats = npt.NDArray[np.float64]

NAMED_LENGTHS: dict[str, tuple[float, float]] = {
    "short-answers": (200.0, 0.5),
    "chat": (500.0, 0.8),
    "math-base": (1500.0, 0.9),
    "math-reasoning": (5000.0, 0.8),
    "agentic-code": (8000.0, 1.0),
}
"""Log-normal distributions by name: (median in tokens, sigma). For users who have no run of their own yet.

These are round figures of the size that public reasoning and chat runs report. For a forecast that matters, use the
lengths of a run (`--calibration`)."""


class LengthModel(Protocol):
    """The lengths of a workload's rollouts."""

    def draw_lengths(self, groups: int, size: int, random: np.random.Generator) -> Floats:
        """Draw lengths [groups, size] in tokens, from 1 to the longest."""

    @property
    def mean_tokens(self) -> float:
        """Mean length in tokens."""


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths from a distribution. quantiles_Q: tokens at equally spaced probabilities from 0 to 1, ascending.

    correlation: within a group, 0 to 1. longest: the cap, in tokens.
    """

    quantiles_Q: Floats
    correlation: float
    longest: int

    def draw_lengths(self, groups: int, size: int, random: np.random.Generator) -> Floats:
        """Implement `LengthModel.draw_lengths`."""
        shared = random.standard_normal((groups, 1)) * np.sqrt(self.correlation)
        own = random.standard_normal((groups, size)) * np.sqrt(1 - self.correlation)
        levels: Floats = ndtr(shared + own)  # the normal distribution's cumulative probability
        places = np.linspace(0.0, 1.0, len(self.quantiles_Q))
        return np.clip(np.round(np.interp(levels, places, self.quantiles_Q)), 1, self.longest)

    @property
    def mean_tokens(self) -> float:
        return float(np.clip(self.quantiles_Q, 1, self.longest).mean())


@dataclass(frozen=True)
class MeasuredGroups:
    """Lengths from a run. lengths: those of every measured prompt's rollouts."""

    lengths: Sequence[Sequence[float]]
    longest: int

    def draw_lengths(self, groups: int, size: int, random: np.random.Generator) -> Floats:
        """Implement `LengthModel.draw_lengths`. Prompts are drawn in shuffled passes, as from a run's stream."""
        passes = -(-groups // len(self.lengths))
        order = np.concatenate([random.permutation(len(self.lengths)) for _ in range(passes)])[:groups]
        found = np.stack([_draw_group(self.lengths[place], size, random) for place in order])
        return np.clip(np.round(found), 1, self.longest)

    @property
    def mean_tokens(self) -> float:
        return float(np.mean([np.clip(group, 1, self.longest).mean() for group in self.lengths]))


def _draw_group(lengths: Sequence[float], size: int, random: np.random.Generator) -> Floats:
    """Draw [size] lengths of a measured prompt.

    A group of the same size gets the very same lengths; for another size they are interpolated between the measured
    ones.
    """
    if len(lengths) == size:
        return random.permutation(np.asarray(lengths, dtype=np.float64))
    return np.asarray(np.quantile(lengths, random.random(size)), dtype=np.float64)


def log_normal(median: float, sigma: float, longest: int, correlation: float) -> LengthDistribution:
    """Return log-normal lengths. Longer ones are cut off at `longest`, as an engine does."""
    levels = (np.arange(2048) + 0.5) / 2048  # bin centers, since the quantile at 0 or 1 is infinite
    lengths = median * np.exp(sigma * ndtri(levels))
    return LengthDistribution(np.minimum(lengths, longest), correlation, longest)
