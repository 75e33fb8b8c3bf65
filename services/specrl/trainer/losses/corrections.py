"""Weights and masks of tokens that were drawn by an older policy or another engine: functions of trainer over sampler.

None has a gradient. In all of them d = log trainer - log sampler of a token that the sampler drew.
"""

from __future__ import annotations

import math

import torch

from specrl.spec.trainer import CorrectionLevel, CorrectionMethod
from specrl.trainer.losses.objectives import MOST_LOG_RATIO
from specrl.trainer.losses.sequences import Sequences


def importance_weights(
    d_T: torch.Tensor,
    sequences: Sequences,
    method: CorrectionMethod,
    level: CorrectionLevel,
    bounds: tuple[float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T], and which of them [T] a bound has truncated or masked.

    w = exp(d), or for level Sequence exp(sum_t d) for all tokens of the rollout. Truncate: held within bounds, low and
    high. Mask: 0 outside of them. None: all 1. Corrects in expectation for tokens drawn from another distribution, but
    for what the bounds take; that is the price of a bounded variance. Sources: TIS, "Your efficient RL framework
    secretly brings you off-policy RL training" (Yao et al., 2025, fengyao.notion.site/off-policy-rl), after Ionides,
    2008; masks of tokens, IcePop, arXiv:2510.18855; weights and masks of sequences, "When speed kills stability" (Liu
    et al., 2025).
    """
    if method is CorrectionMethod.NONE:
        return torch.ones_like(d_T), torch.zeros_like(d_T, dtype=torch.bool)
    d_T = d_T.detach()
    if level is CorrectionLevel.SEQUENCE:
        d_T = sequences.spread(sequences.sums(d_T))
    low, high = bounds
    least, most = math.log(low) if low > 0 else -math.inf, math.log(high)
    is_outside_T = (d_T < least) | (d_T > most)
    # What is above is cut or masked anyway; cutting first keeps the exponential finite.
    weight_T = d_T.clamp(least, min(most, MOST_LOG_RATIO)).exp()
    return weight_T.masked_fill(is_outside_T, 0) if method is CorrectionMethod.MASK else weight_T, is_outside_T


def likely_sequences(d_T: torch.Tensor, sequences: Sequences, low: float | None, high: float | None) -> torch.Tensor:
    """Which rollouts [S] to keep: those whose geometric mean of trainer over sampler is within [low, high]; None: any.

    A mean over tokens, so that one bound serves all lengths. Source: "When speed kills stability" (Liu et al., 2025),
    part 3; rollout correction of verl (seq_mean_k1).
    """
    mean_S = sequences.means(d_T.detach())
    is_kept_S = torch.ones_like(mean_S, dtype=torch.bool)
    if low is not None:
        is_kept_S &= mean_S >= math.log(low)
    if high is not None:
        is_kept_S &= mean_S <= math.log(high)
    return is_kept_S


def near_or_good_sequences(
    policy_T: torch.Tensor,
    sampler_T: torch.Tensor,
    advantage_T: torch.Tensor,
    sequences: Sequences,
    most: float,
) -> torch.Tensor:
    """Which rollouts [S] to keep: those with an advantage >= 0, or with mean_t(sampler - policy) <= most nats.

    A bad answer that the policy would hardly give teaches little and disturbs much. Source: off-policy sequence
    masking, DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    divergence_S = sequences.means((sampler_T - policy_T).detach())
    advantage_S = sequences.means(advantage_T)
    return (advantage_S >= 0) | (divergence_S <= most)
