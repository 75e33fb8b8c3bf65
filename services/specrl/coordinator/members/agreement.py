"""Decides whether a replica samples from the trainer's policy. Pure: compares log-probabilities. Used by `canary.py`.

Replica and trainer score the same tokens. With equal weights the scores differ by rounding alone, so a larger
difference means different weights or a broken engine.

T: tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrl.records import TrainRollout
from specrl.spec.run import Canary, Dtype


@dataclass(frozen=True)
class AgreementBound:
    """Largest differences that rounding can explain, in nats: mean over all tokens, and at any single token."""

    mean_abs: float
    max_abs: float


DEFAULT_BOUNDS = {
    # Measured with vLLM and Megatron on CPUs and a tiny policy: mean 2e-7, maximum 2e-6. A stale output layer: up to
    # 0.25 at one token.
    Dtype.FLOAT32: AgreementBound(1e-3, 1e-2),
    # bfloat16 has 8 significant bits, so a logit between 16 and 32 is off by up to 2^-4. With the error of the layers
    # below, unlikely tokens differ by some tenths, and the mean by hundredths. Here the mean reveals a stale layer.
    Dtype.BFLOAT16: AgreementBound(5e-2, 1.0),
}


def choose_bound(canary: Canary, dtype: Dtype) -> AgreementBound:
    """Return the bounds of the run file. Where it gives none, return those of the model's precision."""
    usual = DEFAULT_BOUNDS[dtype]
    return AgreementBound(
        usual.mean_abs if canary.max_mean_abs is None else float(canary.max_mean_abs),
        usual.max_abs if canary.max_abs is None else float(canary.max_abs),
    )


@dataclass(frozen=True)
class LogprobComparison:
    """|sampler - trainer| over some tokens, in nats. other_versions: policy versions that no token should have had."""

    tokens: int = 0
    mean_abs: float = 0.0
    max_abs: float = 0.0
    other_versions: frozenset[int] = frozenset()

    def is_within(self, bound: AgreementBound) -> bool:
        """Whether rounding can explain the differences, and no token has another version."""
        # A NaN compares as false, so it counts as beyond every bound.
        is_close = self.mean_abs <= bound.mean_abs and self.max_abs <= bound.max_abs
        return is_close and not self.other_versions

    def plus(self, other: LogprobComparison) -> LogprobComparison:
        """Combine two comparisons into one over the tokens of both."""
        tokens = self.tokens + other.tokens
        total = self.mean_abs * self.tokens + other.mean_abs * other.tokens
        return LogprobComparison(
            tokens,
            total / tokens if tokens else 0.0,
            max(self.max_abs, other.max_abs),
            self.other_versions | other.other_versions,
        )


def compare_logprobs(
    version: int, rollouts: Sequence[TrainRollout], scores: Sequence[Sequence[float]]
) -> LogprobComparison:
    """Compare one replica's rollouts with the trainer's log-probabilities, and their versions with `version`.

    scores: the trainer's log-probabilities [T] of each rollout's sampled tokens, in nats.
    """
    samplers = [item.rollout.sampler_logprobs_T[item.rollout.sampled_N].astype(np.float64) for item in rollouts]
    differences_T = np.abs(np.concatenate(samplers) - np.concatenate([np.asarray(score_T) for score_T in scores]))
    versions = {span.policy_version for item in rollouts for span in item.rollout.versions}
    return LogprobComparison(
        len(differences_T), float(differences_T.mean()), float(differences_T.max()), frozenset(versions - {version})
    )
