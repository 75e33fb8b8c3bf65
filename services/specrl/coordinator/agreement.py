"""Do sampler and trainer have the same policy? Pure: log-probabilities in, a verdict out. `canary.py` acts on it.

Both score the same tokens. With equal weights they differ by rounding alone, so what is compared with a bound is not
how good a policy is but whether it is one policy. T: tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from specrl.records import TrainRollout
from specrl.spec.run import Canary, Dtype


@dataclass(frozen=True)
class Bound:
    """Largest differences that rounding explains, in nats."""

    mean_abs: float
    max_abs: float


BOUNDS = {
    # vLLM against Megatron on CPUs, tiny policy: 2e-7 on average, 2e-6 at most. With a stale output layer: up to 0.25.
    Dtype.FLOAT32: Bound(1e-3, 1e-2),
    # bfloat16 keeps 8 bits: a logit between 16 and 32 is off by up to 2^-4, two of them and the layers below by some
    # tenths where the token is unlikely, by hundredths on average. So the mean is what finds a stale layer here.
    Dtype.BFLOAT16: Bound(5e-2, 1.0),
}


def bound_of(canary: Canary, dtype: Dtype) -> Bound:
    """The run file's bounds, or those of the precision."""
    usual = BOUNDS[dtype]
    return Bound(
        usual.mean_abs if canary.max_mean_abs is None else float(canary.max_mean_abs),
        usual.max_abs if canary.max_abs is None else float(canary.max_abs),
    )


@dataclass(frozen=True)
class Comparison:
    """|sampler - trainer| over some tokens, in nats. other_versions: versions of tokens that were not to be there."""

    tokens: int = 0
    mean_abs: float = 0.0
    max_abs: float = 0.0
    other_versions: frozenset[int] = frozenset()

    def plus(self, other: Comparison) -> Comparison:
        """Over the tokens of both."""
        tokens = self.tokens + other.tokens
        total = self.mean_abs * self.tokens + other.mean_abs * other.tokens
        return Comparison(
            tokens,
            total / tokens if tokens else 0.0,
            max(self.max_abs, other.max_abs),
            self.other_versions | other.other_versions,
        )


def compare(version: int, rollouts: Sequence[TrainRollout], scores: Sequence[Sequence[float]]) -> Comparison:
    """Hold one replica's rollouts against the trainer's log-probabilities [T] of each, and against `version`."""
    samplers = [item.rollout.sampler_logprobs_T[item.rollout.sampled_N].astype(np.float64) for item in rollouts]
    differences_T = np.abs(np.concatenate(samplers) - np.concatenate([np.asarray(score_T) for score_T in scores]))
    versions = {span.policy_version for item in rollouts for span in item.rollout.versions}
    return Comparison(
        len(differences_T), float(differences_T.mean()), float(differences_T.max()), frozenset(versions - {version})
    )


class Verdict(StrEnum):
    """AGREES: the replica is trusted. REPEAT: it is sent the weights once more. END: the run must not go on."""

    AGREES = "agrees"
    REPEAT = "repeat"
    END = "end"


def judge(comparison: Comparison, bound: Bound, *, is_repeated: bool) -> Verdict:
    """What follows from a comparison of at least one token; is_repeated: the weights have been sent twice already.

    A difference that is no number is beyond every bound.
    """
    is_close = comparison.mean_abs <= bound.mean_abs and comparison.max_abs <= bound.max_abs
    if is_close and not comparison.other_versions:
        return Verdict.AGREES
    return Verdict.END if is_repeated else Verdict.REPEAT
