"""Weights and masks for tokens that an older policy or another engine sampled.

Invariant: no weight or mask has a gradient. Called by `policy_loss.py`.

In all formulas d = trainer - sampler, the difference of a token's log-probabilities, where the sampler drew the token.

Shapes: T sampled tokens of a micro-batch, S its rollouts.
"""

from __future__ import annotations

import math

import torch

from specrl.spec.trainer import CorrectionLevel, CorrectionMethod
from specrl.trainer.losses.objectives import MAX_LOG_RATIO
from specrl.trainer.losses.sequences import Sequences


def compute_importance_weights(
    d_T: torch.Tensor,
    sequences: Sequences,
    method: CorrectionMethod,
    level: CorrectionLevel,
    bounds: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute importance weights w [T], and which of them [T] a bound truncated or masked.

    Level Token: w = exp(d). Level Sequence: w = exp(sum_t d) over the rollout, for all of its tokens.
    Method Truncate: w is clamped to bounds (low, high). Mask: w is 0 outside of them. None: w is 1.

    Without bounds, the weights correct in expectation for tokens drawn from another distribution. The bounds trade
    some bias for a bounded variance.

    Sources: TIS, "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al., 2025,
    fengyao.notion.site/off-policy-rl), after Ionides, 2008. Masks of tokens: IcePop, arXiv:2510.18855. Weights and
    masks of sequences: "When speed kills stability" (Liu et al., 2025).
    """
    if method is CorrectionMethod.NONE:
        return torch.ones_like(d_T), torch.zeros_like(d_T, dtype=torch.bool)
    d_T = d_T.detach()
    if level is CorrectionLevel.SEQUENCE:
        d_T = sequences.spread_to_tokens(sequences.sum_tokens(d_T))
    low, high = bounds
    least = math.log(low) if low > 0 else -math.inf
    most = math.log(high)
    is_outside_T = (d_T < least) | (d_T > most)
    # Clamp before exp, so that it stays finite. Values above the bound are truncated or masked anyway.
    weight_T = d_T.clamp(least, min(most, MAX_LOG_RATIO)).exp()
    return weight_T.masked_fill(is_outside_T, 0) if method is CorrectionMethod.MASK else weight_T, is_outside_T


def select_likely_sequences(
    d_T: torch.Tensor, sequences: Sequences, low: float | None, high: float | None
) -> torch.Tensor:
    """Select the rollouts [S] with low <= exp(mean_t d) <= high. A bound of None does not apply.

    exp(mean_t d) is the geometric mean of trainer over sampler. As a mean over tokens it needs no bound per length.

    Source: "When speed kills stability" (Liu et al., 2025), part 3; verl's rollout correction (seq_mean_k1).
    """
    mean_S = sequences.average_tokens(d_T.detach())
    is_kept_S = torch.ones_like(mean_S, dtype=torch.bool)
    if low is not None:
        is_kept_S &= mean_S >= math.log(low)
    if high is not None:
        is_kept_S &= mean_S <= math.log(high)
    return is_kept_S


def select_near_or_good(
    policy_T: torch.Tensor,
    sampler_T: torch.Tensor,
    advantage_T: torch.Tensor,
    sequences: Sequences,
    most: float,
) -> torch.Tensor:
    """Select the rollouts [S] with an advantage >= 0, or with mean_t(sampler - policy) <= most, in nats per token.

    This drops bad answers that the current policy is unlikely to give anyway.

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    divergence_S = sequences.average_tokens((sampler_T - policy_T).detach())
    advantage_S = sequences.average_tokens(advantage_T)  # all tokens of a rollout have its advantage
    return (advantage_S >= 0) | (divergence_S <= most)
