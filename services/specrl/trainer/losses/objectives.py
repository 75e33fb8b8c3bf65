"""The policy objectives: per-token surrogate losses of the ratio policy over base. Called by `policy_loss.py`.

The base is the proximal policy, which the step starts from (decoupled PPO, arXiv:2110.00641), or the sampler.

Shapes: T sampled tokens of a micro-batch, S its rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specrl.trainer.losses.sequences import Sequences

# Ratios are limited to exp(20), as in verl. Larger ones would overflow float32, and one such token would make the
# gradient of the whole step infinite.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class RatioClip:
    """The bounds [1 - low, 1 + high] of a ratio."""

    low: float
    high: float

    def clamp_ratio(self, ratio: torch.Tensor) -> torch.Tensor:
        """Clamp a ratio to the bounds."""
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True)
class SurrogateLoss:
    """loss_T: per-token loss, with gradient. is_low_T, is_high_T: tokens that the lower or the upper bound clipped."""

    loss_T: torch.Tensor
    is_low_T: torch.Tensor
    is_high_T: torch.Tensor


def compute_clip_loss(
    policy_T: torch.Tensor, base_T: torch.Tensor, advantage_T: torch.Tensor, clip: RatioClip
) -> SurrogateLoss:
    """Compute the clipped loss -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(policy - base), per token.

    Differentiable in policy_T alone. A token counts as clipped only where the clip makes the objective smaller.

    Sources: PPO, arXiv:1707.06347, eq. 7. GRPO, arXiv:2402.03300, eq. 3, without its KL term. Separate lower and upper
    clip: DAPO, arXiv:2503.14476, eq. 8.
    """
    return _clip_pessimistically(compute_ratios(policy_T - base_T.detach()), advantage_T, clip)


def compute_ratios(log_ratio: torch.Tensor) -> torch.Tensor:
    """Compute exp(log_ratio), at most exp(20)."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def compute_gspo_loss(
    policy_T: torch.Tensor,
    base_T: torch.Tensor,
    advantage_T: torch.Tensor,
    sequences: Sequences,
    clip: RatioClip,
) -> SurrogateLoss:
    """Compute the clipped loss with one ratio s = exp(mean_t(policy - base)) for all tokens of a rollout.

    Differentiable in policy_T alone. With the normaliser Sequences the objective is
    mean_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i) over rollouts i.

    Source: GSPO, arXiv:2507.18071, eq. 5 and 7.
    """
    ratio_S = compute_ratios(sequences.average_tokens(policy_T - base_T.detach()))
    return _clip_pessimistically(sequences.spread_to_tokens(ratio_S), advantage_T, clip)


def compute_cispo_loss(
    policy_T: torch.Tensor, base_T: torch.Tensor, advantage_T: torch.Tensor, clip: RatioClip
) -> SurrogateLoss:
    """Compute the loss -sg(clip(r, 1 - low, 1 + high)) A policy, where sg stops the gradient.

    r = exp(policy - base). The clip bounds a token's weight, but unlike PPO's it never removes the token's gradient.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. The paper has no lower bound, which is low >= 1 here.
    """
    ratio_T = compute_ratios((policy_T - base_T).detach())
    held_T = clip.clamp_ratio(ratio_T)
    return SurrogateLoss(-held_T * advantage_T * policy_T, ratio_T < held_T, ratio_T > held_T)


def _clip_pessimistically(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: RatioClip) -> SurrogateLoss:
    free_T = ratio_T * advantage_T
    bound_T = clip.clamp_ratio(ratio_T) * advantage_T
    is_held_T = bound_T < free_T  # the clipped term is the minimum, so the token has no gradient
    return SurrogateLoss(-torch.minimum(free_T, bound_T), is_held_T & (ratio_T < 1), is_held_T & (ratio_T > 1))
