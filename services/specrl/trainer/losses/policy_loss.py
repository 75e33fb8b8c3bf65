"""The run file's loss of one micro-batch, as its share of the whole batch's loss. Called by the backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specrl.spec.trainer import KlEstimator, KlPlace, Loss, Normaliser, Objective, RatioTo
from specrl.trainer.losses import corrections, objectives
from specrl.trainer.losses.divergence import reference_kl, weighted_reference_kl
from specrl.trainer.losses.objectives import Clip, Surrogate
from specrl.trainer.losses.sequences import Sequences

SUMS = ("loss", "clipped", "clipped_high", "weight", "weight_square", "bounded", "masked", "reference_kl")
"""What `LossTerms.sums_N` holds: the loss itself, and sums over tokens. bounded: weights that a bound of the correction
has truncated or masked. masked: tokens without a part in the policy gradient. reference_kl: weighted k3 estimates,
in nats."""


@dataclass(frozen=True)
class SampledTokens:
    """T sampled tokens of S whole rollouts, one rollout after another. reference_T: None without a reference."""

    proximal_T: torch.Tensor
    sampler_T: torch.Tensor
    advantage_T: torch.Tensor
    sequences: Sequences
    reference_T: torch.Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """loss: with gradient; those of all micro-batches of all ranks add up to the batch's. sums_N: as SUMS, float64."""

    loss: torch.Tensor
    sums_N: torch.Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one batch. tokens, rollouts: of the whole batch, over all ranks. longest: FixedLength's length."""

    settings: Loss
    longest: int
    tokens: int
    rollouts: int

    def __call__(self, policy_T: torch.Tensor, sampled: SampledTokens) -> LossTerms:
        """Loss of these tokens, differentiable in policy_T."""
        scale_T = self.scales(sampled.sequences).to(policy_T.dtype)
        surrogate = self._surrogate(policy_T, sampled)
        weight_T, is_bounded_T = self._weights(policy_T, sampled)
        loss = (scale_T * weight_T * surrogate.loss_T).sum()
        divergence_T = torch.zeros_like(policy_T)
        kl = self.settings.reference_kl
        if kl is not None:
            assert sampled.reference_T is not None
            sampler_T = sampled.sampler_T
            reference_T = sampled.reference_T
            divergence_T = weighted_reference_kl(policy_T.detach(), sampler_T, reference_T, KlEstimator.K3)
            if kl.place is KlPlace.LOSS:
                cost_T = (
                    weighted_reference_kl(policy_T, sampler_T, reference_T, kl.estimator)
                    if kl.importance_weighted
                    else reference_kl(policy_T, reference_T, kl.estimator)
                )
                loss = loss + float(kl.coefficient) * (scale_T * cost_T).sum()
        if self.settings.ratio_to is RatioTo.SAMPLER:  # the ratio is the weight, then
            weight_T = weight_T * objectives.ratios((policy_T - sampled.sampler_T).detach())
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

    def scales(self, sequences: Sequences) -> torch.Tensor:
        """[T] float64: what each token's loss is multiplied by.

        Tokens: 1 / all tokens, DAPO, arXiv:2503.14476, eq. 8. Sequences: 1 / (rollouts * tokens of its rollout), GRPO,
        arXiv:2402.03300, eq. 3. FixedLength: 1 / (rollouts * longest), Dr. GRPO, arXiv:2503.20783, section 3.2.
        """
        sequence_T = sequences.sequence_T
        match self.settings.normaliser:
            case Normaliser.TOKENS:
                divisor_T = torch.full_like(sequence_T, self.tokens)
            case Normaliser.SEQUENCES:
                divisor_T = self.rollouts * sequences.spread(sequences.lengths())
            case Normaliser.FIXED_LENGTH:
                divisor_T = torch.full_like(sequence_T, self.rollouts * self.longest)
        return 1 / divisor_T.double()

    def _surrogate(self, policy_T: torch.Tensor, sampled: SampledTokens) -> Surrogate:
        settings = self.settings
        base_T = sampled.proximal_T if settings.ratio_to is RatioTo.STEP_START else sampled.sampler_T
        clip = Clip(float(settings.clip_low), float(settings.clip_high))
        match settings.objective:
            case Objective.CLIP:
                return objectives.clipped(policy_T, base_T, sampled.advantage_T, clip)
            case Objective.GSPO:
                return objectives.clipped_sequences(policy_T, base_T, sampled.advantage_T, sampled.sequences, clip)
            case Objective.CISPO:
                return objectives.clipped_weights(policy_T, base_T, sampled.advantage_T, clip)

    def _weights(self, policy_T: torch.Tensor, sampled: SampledTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """What the correction and the mask of rollouts leave of each token [T], and what the correction bounded [T]."""
        correction, mask = self.settings.correction, self.settings.rollout_mask
        d_T = (sampled.proximal_T - sampled.sampler_T).detach()
        weight_T, is_bounded_T = corrections.importance_weights(
            d_T, sampled.sequences, correction.method, correction.level, (float(correction.low), float(correction.high))
        )
        if mask is None:
            return weight_T, is_bounded_T
        low, high = (None if bound is None else float(bound) for bound in (mask.ratio_low, mask.ratio_high))
        is_kept_S = corrections.likely_sequences(d_T, sampled.sequences, low, high)
        if mask.max_divergence is not None:
            most = float(mask.max_divergence)
            is_kept_S = is_kept_S & corrections.near_or_good_sequences(
                policy_T, sampled.sampler_T, sampled.advantage_T, sampled.sequences, most
            )
        return weight_T * sampled.sequences.spread(is_kept_S), is_bounded_T
