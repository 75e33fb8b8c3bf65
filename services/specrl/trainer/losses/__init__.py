"""The policy's loss and what is measured beside it: pure functions of per-token log-probabilities.

Three log-probabilities of the same token, never mixed up, and a fourth where there is a reference:
    sampler     recorded by the engine that drew it, possibly under an older version
    proximal    the trainer's own, recomputed at the start of the step (stage `logprob`), without gradient
    policy      the trainer's own, with gradient; equal to proximal in the first update of a step
    reference   a frozen policy's, without gradient

    objectives.py    policy over proximal (or sampler), clipped: what is minimised
    corrections.py   proximal over sampler: weights and masks of what was drawn by another policy or engine
    divergence.py    policy against reference, sampler against trainer, effective sample size
    policy_loss.py   all of it for one micro-batch, as a share of the whole batch's loss

Everything is a sum over tokens, and a rollout's tokens lie in one micro-batch; so sums over micro-batches and data
parallel ranks are exact, packed or padded. docs/losses.md has the formulas with their sources.

Shapes: T sampled tokens of a micro-batch, one rollout after another; S its rollouts; sequence_T the rollout, from 0,
that a token is of.
"""

from specrl.trainer.losses.divergence import (
    Mismatch,
    effective_sample_size,
    reference_kl,
    sampler_mismatch,
    weighted_reference_kl,
)
from specrl.trainer.losses.policy_loss import SUMS, LossTerms, PolicyLoss, SampledTokens
from specrl.trainer.losses.sequences import Sequences

__all__ = [
    "SUMS",
    "LossTerms",
    "Mismatch",
    "PolicyLoss",
    "SampledTokens",
    "Sequences",
    "effective_sample_size",
    "reference_kl",
    "sampler_mismatch",
    "weighted_reference_kl",
]
