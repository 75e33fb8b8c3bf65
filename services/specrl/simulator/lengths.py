"""How long rollouts are: a log-normal that ends at a cap, or what a run measured; alike within a prompt's group.

Completions of one prompt resemble each other. With correlation c a rollout's normal deviate is
sqrt(c) * its group's + sqrt(1 - c) * its own, which goes through the distribution's quantile function.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """quantiles_Q: tokens at equally spaced probabilities from 0 to 1, ascending. correlation: of a group, 0 to 1."""

    quantiles_Q: Floats
    correlation: float
    longest: int

    def draw(self, groups: int, size: int, random: np.random.Generator) -> Floats:
        """[groups, size] lengths in tokens, at least 1, at most `longest`."""
        shared = random.standard_normal((groups, 1)) * np.sqrt(self.correlation)
        own = random.standard_normal((groups, size)) * np.sqrt(1 - self.correlation)
        levels = _normal_cdf(shared + own)
        places = np.linspace(0.0, 1.0, len(self.quantiles_Q))
        return np.clip(np.round(np.interp(levels, places, self.quantiles_Q)), 1, self.longest)

    @property
    def mean(self) -> float:
        return float(np.clip(self.quantiles_Q, 1, self.longest).mean())


def log_normal(median: float, sigma: float, longest: int, correlation: float) -> Lengths:
    """Log-normal lengths; what would be longer than `longest` is cut off there, as an engine does."""
    levels = (np.arange(2048) + 0.5) / 2048
    return Lengths(np.minimum(median * np.exp(sigma * _normal_quantile(levels)), longest), correlation, longest)


def measured(quantiles: list[float], longest: int, correlation: float) -> Lengths:
    """As a run found them."""
    return Lengths(np.asarray(quantiles, dtype=np.float64), correlation, longest)


def _normal_cdf(values: Floats) -> Floats:
    from scipy.special import ndtr

    return np.asarray(ndtr(values), dtype=np.float64)


def _normal_quantile(levels: Floats) -> Floats:
    from scipy.special import ndtri

    return np.asarray(ndtri(levels), dtype=np.float64)
