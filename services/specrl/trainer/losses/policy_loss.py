"""The loss that the run file configures, for one micro-batch, as its share of the batch's loss.

    L = sum_t  c_t w_t l_t  +  beta sum_t  c_t u_t k_t          docs/losses.md

c: normaliser, w: correction and mask, l: objective, beta: the coefficient of the divergence, u k: divergence from the
reference. The backend's `policy_step.py` calls it once per micro-batch.

Shapes: T sampled tokens of a micro-batch, S its rollouts, N entries of SUMS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch

from specrl.spec.trainer import KlEstimator, KlPlace, Loss, Normaliser, Objective, RatioTo
from specrl.trainer.losses import corrections, objectives
from specrl.trainer.losses.divergence import estimate_reference_kl, estimate_weighted_kl
from specrl.trainer.losses.objectives import RatioClip, SurrogateLoss
from specrl.trainer.losses.sequences import Sequences

# The entries of `LossTerms.sums_N`. All but the loss are sums over tokens.
SUMS = (
    "loss",
    "clipped",  # tokens whose ratio the objective's clip held
    "clipped_high",  # those of them that the upper bound held
    "weight",  # importance weights; with ratioTo Sampler, ratios of policy over sampler
    "weight_square",
    "bounded",  # tokens whose weight a bound of the correction truncated or masked
    "masked",  # tokens with weight 0, which have no part in the policy gradient
    "reference_kl",  # weighted K3 estimates, in nats
)


@dataclass(frozen=True)
class SampledTokens:
    """The sampled tokens of whole rollouts.

    proximal_T, sampler_T, reference_T: log-probabilities without gradient; reference_T is None without a reference.
    advantage_T: the advantage of each token's rollout.
    """

    proximal_T: torch.Tensor
    sampler_T: torch.Tensor
    advantage_T: torch.Tensor
    sequences: Sequences
    reference_T: torch.Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """loss: a scalar with gradient; the sum over all micro-batches and ranks is the batch's loss.

    sums_N: the entries of SUMS, float64, without gradient.
    """

    loss: torch.Tensor
    sums_N: torch.Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one batch.

    tokens, rollouts: counts of the whole batch, over all ranks. longest: the length, in tokens, that the normaliser
    FixedLength divides by.
    """

    settings: Loss
    longest: int
    tokens: int
    rollouts: int

    def __call__(self, policy_T: torch.Tensor, sampled: SampledTokens) -> LossTerms:
        """Compute the loss of these tokens, differentiable in policy_T [T]."""
        # The objective, corrected for the sampler.
        scale_T = self.compute_scales(sampled.sequences).to(policy_T.dtype)
        surrogate = self._compute_surrogate(policy_T, sampled)
        weight_T, is_bounded_T = self._compute_weights(policy_T, sampled)
        loss = (scale_T * weight_T * surrogate.loss_T).sum()

        # The divergence from the reference. It is always reported by K3, and is part of the loss with place Loss.
        divergence_T = torch.zeros_like(policy_T)
        kl = self.settings.reference_kl
        if kl is not None:
            assert sampled.reference_T is not None
            sampler_T = sampled.sampler_T
            reference_T = sampled.reference_T
            divergence_T = estimate_weighted_kl(policy_T.detach(), sampler_T, reference_T, KlEstimator.K3)
            if kl.place is KlPlace.LOSS:
                cost_T = (
                    estimate_weighted_kl(policy_T, sampler_T, reference_T, kl.estimator)
                    if kl.importance_weighted
                    else estimate_reference_kl(policy_T, reference_T, kl.estimator)
                )
                loss = loss + float(kl.coefficient) * (scale_T * cost_T).sum()

        # The figures. With ratioTo Sampler the ratio itself corrects for the sampler, so it counts as a weight.
        if self.settings.ratio_to is RatioTo.SAMPLER:
            weight_T = weight_T * objectives.compute_ratios((policy_T - sampled.sampler_T).detach())
        sums = (
            loss.detach(),
            (surrogate.is_low_T | surrogate.is_high_T).sum(),
            surrogate.is_high_T.sum(),
            weight_T.sum(),
            weight_T.square().sum(),
            is_bounded_T.sum(),
            (weight_T == 0).sum(),
            divergence_T.sum(),
        )
        return LossTerms(loss, torch.stack([value.double() for value in sums]))

    def compute_scales(self, sequences: Sequences) -> torch.Tensor:
        """Compute the normaliser [T] float64, the factor of each token's loss.

        Tokens        1 / tokens of the batch                      DAPO, arXiv:2503.14476, eq. 8
        Sequences     1 / (rollouts * tokens of the rollout)       GRPO, arXiv:2402.03300, eq. 3
        FixedLength   1 / (rollouts * longest)                     Dr. GRPO, arXiv:2503.20783, section 3.2
        """
        sequence_T = sequences.sequence_T
        match self.settings.normaliser:
            case Normaliser.TOKENS:
                divisor_T = torch.full_like(sequence_T, self.tokens)
            case Normaliser.SEQUENCES:
                divisor_T = self.rollouts * sequences.spread_to_tokens(sequences.count_tokens())
            case Normaliser.FIXED_LENGTH:
                divisor_T = torch.full_like(sequence_T, self.rollouts * self.longest)
            case unknown:
                assert_never(unknown)
        return 1 / divisor_T.double()

    def _compute_surrogate(self, policy_T: torch.Tensor, sampled: SampledTokens) -> SurrogateLoss:
        settings = self.settings
        base_T = sampled.proximal_T if settings.ratio_to is RatioTo.STEP_START else sampled.sampler_T
        clip = RatioClip(float(settings.clip_low), float(settings.clip_high))
        match settings.objective:
            case Objective.CLIP:
                return objectives.compute_clip_loss(policy_T, base_T, sampled.advantage_T, clip)
            case Objective.GSPO:
                return objectives.compute_gspo_loss(policy_T, base_T, sampled.advantage_T, sampled.sequences, clip)
            case Objective.CISPO:
                return objectives.compute_cispo_loss(policy_T, base_T, sampled.advantage_T, clip)

    def _compute_weights(self, policy_T: torch.Tensor, sampled: SampledTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute each token's weight [T] from correction and rollout mask, and which weights [T] were bounded."""
        correction = self.settings.correction
        mask = self.settings.rollout_mask
        d_T = (sampled.proximal_T - sampled.sampler_T).detach()
        weight_T, is_bounded_T = corrections.compute_importance_weights(
            d_T, sampled.sequences, correction.method, correction.level, (float(correction.low), float(correction.high))
        )
        if mask is None:
            return weight_T, is_bounded_T
        low, high = (None if bound is None else float(bound) for bound in (mask.ratio_low, mask.ratio_high))
        is_kept_S = corrections.select_likely_sequences(d_T, sampled.sequences, low, high)
        if mask.max_divergence is not None:
            most = float(mask.max_divergence)
            is_kept_S = is_kept_S & corrections.select_near_or_good(
                policy_T, sampled.sampler_T, sampled.advantage_T, sampled.sequences, most
            )
        # Masked rollouts still count in the normaliser, as in TRL: masking makes the step smaller.
        return weight_T * sampled.sequences.spread_to_tokens(is_kept_S), is_bounded_T
