"""Divergences between two policies, estimated at tokens that one of them sampled, and the effective sample size.

`policy_loss.py` uses the divergence from the reference as a term of the loss. The backend's `policy_step.py` reports
the mismatch between sampler and trainer, and subtracts the divergence from rewards if the run file says so.

Shapes: T sampled tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specrl.spec.trainer import KlEstimator
from specrl.trainer.losses.objectives import MAX_LOG_RATIO, compute_ratios


def estimate_reference_kl(policy_T: torch.Tensor, reference_T: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimate KL(policy || reference) [T], in nats, at tokens sampled from the policy. Differentiable in policy_T.

    With d = policy - reference:
        K1   d                  unbiased; as a loss it does nothing, since its gradient is 0 in expectation
        K2   d^2 / 2            biased, never negative; its gradient is an unbiased gradient of the divergence
        K3   exp(-d) - 1 + d    unbiased, never negative

    Sources: J. Schulman, "Approximating KL divergence", 2020 (joschu.net/blog/kl-approx.html). Gradients: Tang and
    Munos, arXiv:2506.09477.

    K3 clamps d at -20. Tokens with d < -20 are more than exp(20) times less likely under the policy than under the
    reference. Their value is that at -20, and their gradient is 0.
    """
    d_T = policy_T - reference_T.detach()
    match estimator:
        case KlEstimator.K1:
            return d_T
        case KlEstimator.K2:
            return d_T.square() / 2
        case KlEstimator.K3:
            # exp(-d) would overflow float32 and make the whole step's gradient infinite. K1 and K2 cannot overflow for
            # finite log-probabilities.
            d_T = d_T.clamp(min=-MAX_LOG_RATIO)
            return torch.expm1(-d_T) + d_T  # expm1: exp(-d) - 1 loses all digits near d = 0


def estimate_weighted_kl(
    policy_T: torch.Tensor, sampler_T: torch.Tensor, reference_T: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Estimate KL(policy || reference) [T], in nats, at tokens sampled from the sampler. Differentiable in policy_T.

    With d = policy - reference, k the value of `estimate_reference_kl`, and w = exp(policy - sampler), at most exp(20):
        value      w k
        gradient   w d times the gradient of policy, with w and d constant

    For every estimator and in expectation over the sampler's tokens: the value equals that of k over the policy's
    tokens, and the gradient equals that of the divergence. docs/losses.md derives both. Source: DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1.
    """
    weight_T = compute_ratios((policy_T - sampler_T).detach())
    value_T = weight_T * estimate_reference_kl(policy_T.detach(), reference_T, estimator)
    # K2's gradient is d times that of policy, so this term has the gradient w d. Autograd of w K3 would give
    # w (k + 1 - exp(-d)). That is also w d, but it cancels large numbers where d is very negative.
    gradient_T = weight_T * estimate_reference_kl(policy_T, reference_T, KlEstimator.K2)
    # The difference is 0. It only adds the gradient.
    return value_T + (gradient_T - gradient_T.detach())


@dataclass(frozen=True)
class SamplerMismatch:
    """Disagreement of sampler and trainer: sums and maximum over tokens, in nats, and the number of tokens.

    All are scalars, so that they can be added up over micro-batches and ranks.
    """

    abs_sum: torch.Tensor
    abs_max: torch.Tensor
    kl_sum: torch.Tensor
    tokens: torch.Tensor


def measure_mismatch(proximal_T: torch.Tensor, sampler_T: torch.Tensor, is_current_T: torch.Tensor) -> SamplerMismatch:
    """Measure how far sampler and trainer disagree on tokens of the version that the step starts from.

    is_current_T: which tokens these are. For them both should agree, since they have the same weights.

    With d = proximal - sampler, it sums |d| and the k3 estimate of KL(sampler || trainer), exp(d) - 1 - d. In
    expectation over the sampler's tokens, k3 is unbiased; it is never negative. Source: J. Schulman, "Approximating KL
    divergence", 2020 (joschu.net/blog/kl-approx.html).
    """
    # float64, because d is close to float32's resolution when both agree.
    difference_T = (proximal_T.detach().double() - sampler_T.double())[is_current_T]
    abs_T = difference_T.abs()
    return SamplerMismatch(
        abs_T.sum(),
        abs_T.max() if len(abs_T) else abs_T.new_zeros(()),
        (difference_T.expm1() - difference_T).sum(),
        is_current_T.sum(),
    )


def compute_effective_sample_size(weight_sum: float, square_sum: float, tokens: int) -> float:
    """Compute the effective sample size of n weighted tokens as a share of n: (sum w)^2 / (n * sum w^2).

    It is 1 if all weights are equal, and 0 if there are no tokens or all weights are 0.

    Source: Kong, 1992; Owen, Monte Carlo theory, methods and examples, section 9.3.
    """
    return weight_sum**2 / (tokens * square_sum) if tokens and square_sum > 0 else 0.0
