"""How far distributions are apart, estimated at tokens that one of them drew; and what that leaves of a sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specrl.spec.trainer import KlEstimator
from specrl.trainer.losses.objectives import MOST_LOG_RATIO, ratios


def reference_kl(policy_T: torch.Tensor, reference_T: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimates [T] of KL(policy || reference) at tokens of the policy, differentiable in policy_T.

    d = policy - reference. K1: d, unbiased. K2: d^2 / 2, biased, and never negative; its gradient is an unbiased one of
    the divergence. K3: exp(-d) - 1 + d, unbiased and never negative. As a loss K1 does nothing: its gradient is 0 in
    expectation. Sources: J. Schulman, "Approximating KL divergence", 2020 (joschu.net/blog/kl-approx.html); gradients,
    Tang and Munos, arXiv:2506.09477.

    K3 holds d at -20 or above, where exp(-d) is cut off as all ratios are: below it, at tokens that the policy gives
    exp(20) times less probability than the reference, its value is that at -20 and its gradient 0. K1 and K2 grow with
    d and d^2 and need no bound: float32 holds them for all log-probabilities that are finite.
    """
    d_T = policy_T - reference_T.detach()
    match estimator:
        case KlEstimator.K1:
            return d_T
        case KlEstimator.K2:
            return d_T.square() / 2
        case KlEstimator.K3:
            d_T = d_T.clamp(min=-MOST_LOG_RATIO)
            return torch.expm1(-d_T) + d_T


def weighted_reference_kl(
    policy_T: torch.Tensor, sampler_T: torch.Tensor, reference_T: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Estimates [T] of KL(policy || reference) at tokens of the sampler, differentiable in policy_T.

    The value is w k, with w = policy / sampler (at most exp(20)) and k of `reference_kl`: in expectation over the
    sampler's tokens what k is over the policy's. The gradient is w d times that of policy, w and d constants: in
    expectation that of the divergence, whatever the estimator. It is K2's where w has no gradient, and K3's where w has
    one: w (k + 1 - exp(-d)) = w d. That difference of large numbers is why it is not left to autograd. docs/losses.md
    derives it. Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    weight_T = ratios((policy_T - sampler_T).detach())
    value_T = weight_T * reference_kl(policy_T.detach(), reference_T, estimator)
    gradient_T = weight_T * reference_kl(policy_T, reference_T, KlEstimator.K2)
    return value_T + (gradient_T - gradient_T.detach())


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
