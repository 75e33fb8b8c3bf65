"""The policy's loss and what is measured beside it: pure functions of per-token log-probabilities.

Three log-probabilities of the same token, never mixed up:
    sampler     recorded by the engine that drew it, possibly under an older version
    proximal    the trainer's own, recomputed at the start of the step (stage `logprob`), without gradient
    policy      the trainer's own, with gradient; equal to proximal in the first update of a step
Proximal over sampler corrects for lag and for engine differences (weight); policy over proximal is clipped (ratio).

Shapes: T generated tokens of a micro-batch, completions one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossSettings:
    """trainer.loss of the run file, as floats. importance_cap 0 turns the correction off."""

    clip_low: float
    clip_high: float
    importance_cap: float


@dataclass(frozen=True)
class LossTerms:
    """Sums over tokens; the caller divides by the token count of the whole batch."""

    loss_sum: torch.Tensor
    clipped_tokens: torch.Tensor
    clipped_high_tokens: torch.Tensor


def truncated_importance_weights(proximal_T: torch.Tensor, sampler_T: torch.Tensor, cap: float) -> torch.Tensor:
    """w = min(exp(proximal - sampler), cap), without gradient; all 1 when cap is 0.

    Corrects in expectation for tokens drawn from another distribution than the step's starting policy, with bounded
    variance. Source: truncated importance sampling as in "Your efficient RL framework secretly brings you off-policy
    RL training" (Yao et al., 2025, fengyao.notion.site/off-policy-rl); truncation after Ionides, 2008.
    """
    if cap == 0:
        return torch.ones_like(proximal_T)
    # Above ln(cap) the exponential is cut anyway; cutting first keeps it finite.
    return (proximal_T - sampler_T).detach().clamp(max=_log(cap)).exp()


def capped_tokens(proximal_T: torch.Tensor, sampler_T: torch.Tensor, cap: float) -> torch.Tensor:
    """How many importance weights their cap holds; 0 when `cap` is, since nothing is corrected then."""
    if cap == 0:
        return torch.zeros((), device=proximal_T.device)
    return ((proximal_T - sampler_T).detach() > _log(cap)).sum()


def _log(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log())


def clipped_policy_gradient(
    policy_T: torch.Tensor,
    proximal_T: torch.Tensor,
    advantage_T: torch.Tensor,
    weight_T: torch.Tensor,
    settings: LossSettings,
) -> LossTerms:
    """-sum_t w_t * min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), with r = exp(policy - proximal).

    Divided by the number of generated tokens of the whole batch (all groups, all ranks) this is the token-level mean
    of DAPO; each token counts the same, whatever the length of its completion. Differentiable in policy_T alone.
    Sources: GRPO, arXiv:2402.03300, eq. 3 (without its KL term); token-level mean and two clips, DAPO,
    arXiv:2503.14476, eq. 8; proximal policy apart from the sampler, arXiv:2110.00641.
    """
    ratio_T = (policy_T - proximal_T.detach()).exp()
    inside_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    free_T, bound_T = ratio_T * advantage_T, inside_T * advantage_T
    is_clipped_T = bound_T < free_T
    loss_sum = -(weight_T * torch.minimum(free_T, bound_T)).sum()
    return LossTerms(loss_sum, is_clipped_T.sum(), (is_clipped_T & (ratio_T > 1)).sum())


@dataclass(frozen=True)
class Mismatch:
    """Sampler against trainer over tokens that both should agree on: sums over tokens, maximum, count."""

    abs_sum: torch.Tensor
    abs_max: torch.Tensor
    kl_sum: torch.Tensor
    tokens: torch.Tensor


def sampler_mismatch(proximal_T: torch.Tensor, sampler_T: torch.Tensor, is_current_T: torch.Tensor) -> Mismatch:
    """How far sampler and trainer are apart on tokens of the version that the step starts from (is_current_T).

    KL(sampler || trainer) by the k3 estimate, E_sampler[exp(d) - 1 - d] with d = proximal - sampler: unbiased, and
    never negative. Source: J. Schulman, "Approximating KL divergence", 2020 (joschu.net/blog/kl-approx.html).
    In float64, since d is near float32's resolution when the two agree.
    """
    difference_T = (proximal_T.detach().double() - sampler_T.double())[is_current_T]
    abs_T = difference_T.abs()
    return Mismatch(
        abs_T.sum(),
        abs_T.max() if len(abs_T) else abs_T.new_zeros(()),
        (difference_T.expm1() - difference_T).sum(),
        is_current_T.sum(),
    )


def effective_sample_size(weight_sum: float, square_sum: float, tokens: int) -> float:
    """(sum w)^2 / (n * sum w^2): the share of n tokens that count as much as uncorrected ones. 1 when all are equal.

    Source: Kong, 1992; Owen, Monte Carlo theory, methods and examples, section 9.3.
    """
    return weight_sum**2 / (tokens * square_sum) if tokens and square_sum > 0 else 0.0
