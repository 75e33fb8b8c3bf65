"""What is minimised, token by token: functions of the ratio policy over base.

base is the proximal policy, the one that the step starts from (decoupled PPO, arXiv:2110.00641), or the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specrl.trainer.losses.sequences import Sequences

MOST_LOG_RATIO = 20.0
"""Ratios are cut off at exp(20), as in verl: float32 must not overflow at a token that nothing is to be learnt from."""


@dataclass(frozen=True)
class Clip:
    """Ratios are held within [1 - low, 1 + high]."""

    low: float
    high: float

    def held(self, ratio: torch.Tensor) -> torch.Tensor:
        """The ratio within the clip."""
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True)
class Surrogate:
    """loss_T: with gradient. is_low_T, is_high_T: tokens whose ratio the lower or the upper clip held."""

    loss_T: torch.Tensor
    is_low_T: torch.Tensor
    is_high_T: torch.Tensor


def clipped(policy_T: torch.Tensor, base_T: torch.Tensor, advantage_T: torch.Tensor, clip: Clip) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(policy - base). Differentiable in policy_T alone.

    A clip holds a token only where it makes the objective smaller. Sources: PPO, arXiv:1707.06347, eq. 7; GRPO,
    arXiv:2402.03300, eq. 3, without its KL term; two clips, DAPO, arXiv:2503.14476, eq. 8.
    """
    return _pessimistic(ratios(policy_T - base_T.detach()), advantage_T, clip)


def ratios(log_ratio: torch.Tensor) -> torch.Tensor:
    """Its exponential, finite."""
    return log_ratio.clamp(max=MOST_LOG_RATIO).exp()


def clipped_sequences(
    policy_T: torch.Tensor,
    base_T: torch.Tensor,
    advantage_T: torch.Tensor,
    sequences: Sequences,
    clip: Clip,
) -> Surrogate:
    """As `clipped`, with one ratio for all tokens of a rollout: s = exp(mean_t(policy - base)).

    Normalised by sequences it is mean_i min(s_i A_i, clip(s_i) A_i). Source: GSPO, arXiv:2507.18071, eq. 5 and 7.
    """
    ratio_S = ratios(sequences.means(policy_T - base_T.detach()))
    return _pessimistic(sequences.spread(ratio_S), advantage_T, clip)


def clipped_weights(policy_T: torch.Tensor, base_T: torch.Tensor, advantage_T: torch.Tensor, clip: Clip) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) A policy, sg without gradient: no token's gradient is cut off.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5 (with low >= 1: no lower bound, as there).
    """
    ratio_T = ratios((policy_T - base_T).detach())
    held_T = clip.held(ratio_T)
    return Surrogate(-held_T * advantage_T * policy_T, ratio_T < held_T, ratio_T > held_T)


def _pessimistic(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: Clip) -> Surrogate:
    free_T, bound_T = ratio_T * advantage_T, clip.held(ratio_T) * advantage_T
    is_held_T = bound_T < free_T
    return Surrogate(-torch.minimum(free_T, bound_T), is_held_T & (ratio_T < 1), is_held_T & (ratio_T > 1))
