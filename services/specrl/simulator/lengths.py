"""How long rollouts are, and how alike those of a prompt's group: a distribution that ends at a cap, or a run's groups.

Completions of one prompt resemble each other. Where a distribution is all that is known, with correlation c a rollout's
normal deviate is sqrt(c) * its group's + sqrt(1 - c) * its own, which goes through the quantile function. A run knows
more: which prompts are answered at length, and how far their answers differ. So a measured prompt is drawn with its own
lengths, and how long the last rollout of a step takes comes out as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Lengths(Protocol):
    """Of the rollouts of a workload."""

    def draw(self, groups: int, size: int, random: np.random.Generator) -> Floats:
        """[groups, size] lengths in tokens, at least 1, at most the longest."""

    @property
    def mean(self) -> float:
        """Tokens."""


@dataclass(frozen=True)
class Distribution:
    """quantiles_Q: tokens at equally spaced probabilities from 0 to 1, ascending. correlation: of a group, 0 to 1."""

    quantiles_Q: Floats
    correlation: float
    longest: int

    def draw(self, groups: int, size: int, random: np.random.Generator) -> Floats:
        """See Lengths."""
        shared = random.standard_normal((groups, 1)) * np.sqrt(self.correlation)
        own = random.standard_normal((groups, size)) * np.sqrt(1 - self.correlation)
        levels = _normal_cdf(shared + own)
        places = np.linspace(0.0, 1.0, len(self.quantiles_Q))
        return np.clip(np.round(np.interp(levels, places, self.quantiles_Q)), 1, self.longest)

    @property
    def mean(self) -> float:
        return float(np.clip(self.quantiles_Q, 1, self.longest).mean())


@dataclass(frozen=True)
class Groups:
    """lengths: of every measured prompt's rollouts."""

    lengths: Sequence[Sequence[float]]
    longest: int

    def draw(self, groups: int, size: int, random: np.random.Generator) -> Floats:
        """See Lengths. Prompts come in passes, in another order each, as from a run's stream."""
        passes = -(-groups // len(self.lengths))
        order = np.concatenate([random.permutation(len(self.lengths)) for _ in range(passes)])[:groups]
        found = np.stack([_of_group(self.lengths[place], size, random) for place in order])
        return np.clip(np.round(found), 1, self.longest)

    @property
    def mean(self) -> float:
        return float(np.mean([np.clip(group, 1, self.longest).mean() for group in self.lengths]))


def _of_group(lengths: Sequence[float], size: int, random: np.random.Generator) -> Floats:
    """[size] lengths: the very ones in groups of their own size, of another size what lies between them."""
    if len(lengths) == size:
        return random.permutation(np.asarray(lengths, dtype=np.float64))
    return np.asarray(np.quantile(lengths, random.random(size)), dtype=np.float64)


def log_normal(median: float, sigma: float, longest: int, correlation: float) -> Distribution:
    """Log-normal lengths; what would be longer than `longest` is cut off there, as an engine does."""
    levels = (np.arange(2048) + 0.5) / 2048
    return Distribution(np.minimum(median * np.exp(sigma * _normal_quantile(levels)), longest), correlation, longest)


def _normal_cdf(values: Floats) -> Floats:
    from scipy.special import ndtr

    return np.asarray(ndtr(values), dtype=np.float64)


def _normal_quantile(levels: Floats) -> Floats:
    from scipy.special import ndtri

    return np.asarray(ndtri(levels), dtype=np.float64)
