"""Losses and acceptance, compared with formulas in float64, finite differences and simulated rejection sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specrl.drafting import criteria
from specrl.drafting.criteria import DraftCriterion, PolicyTargets
from specrl.records import DrafterMetrics
from specrl.spec.trainer import DrafterLoss

E = 5
V = 9
ALL = torch.arange(V)
SOME = torch.tensor([0, 2, 3, 7])


def some_logits(seed: int, width: int = V) -> torch.Tensor:
    return 2 * torch.randn(E, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets_of(policy_EV: torch.Tensor, draft_ids: torch.Tensor, temperature: float) -> PolicyTargets:
    """Compute targets as the trainer does: from the logits that can be drafted, and the whole normaliser."""
    normaliser_E = (policy_EV / temperature).logsumexp(-1) if len(draft_ids) < V else None
    return criteria.compute_targets(policy_EV[:, draft_ids], temperature, normaliser_E)


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    mass = np.exp(logits / temperature)
    found: np.ndarray = mass / mass.sum(-1, keepdims=True)
    return found


@pytest.mark.parametrize("draft_ids", [ALL, SOME])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.4])
def test_total_variation_is_one_minus_the_overlap(draft_ids: torch.Tensor, temperature: float) -> None:
    policy_EV = some_logits(1)
    draft_EK = some_logits(2, len(draft_ids))
    p_EV = softmax(policy_EV.numpy(), temperature)
    q_EV = np.zeros_like(p_EV)
    q_EV[:, draft_ids.numpy()] = softmax(draft_EK.numpy(), temperature)
    found = criteria.total_variation(draft_EK, targets_of(policy_EV, draft_ids, temperature), temperature)
    np.testing.assert_allclose(found, 0.5 * np.abs(p_EV - q_EV).sum(-1), rtol=1e-12)
    np.testing.assert_allclose(found, 1 - np.minimum(p_EV, q_EV).sum(-1), rtol=1e-12)


@pytest.mark.parametrize("draft_ids", [ALL, SOME])
def test_soft_cross_entropy_is_the_kl_divergence_over_the_draft_vocabulary(draft_ids: torch.Tensor) -> None:
    policy_EV = some_logits(1)
    draft_EK = some_logits(2, len(draft_ids))
    p_EK = softmax(policy_EV[:, draft_ids].numpy())
    q_EK = softmax(draft_EK.numpy())
    found = criteria.soft_cross_entropy(draft_EK, targets_of(policy_EV, draft_ids, 0.6))
    np.testing.assert_allclose(found, (p_EK * np.log(p_EK / q_EK)).sum(-1), rtol=1e-10)


@pytest.mark.parametrize("loss", DrafterLoss)
@pytest.mark.parametrize("draft_ids", [ALL, SOME])
def test_gradients_equal_finite_differences(loss: DrafterLoss, draft_ids: torch.Tensor) -> None:
    wanted = targets_of(some_logits(1), draft_ids, 0.8)
    draft_EK = some_logits(2, len(draft_ids)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: criteria.compute_loss(DraftCriterion(loss, 0.8), x, wanted), draft_EK, eps=1e-7
    )


def test_both_losses_are_positive_and_zero_for_the_policy_itself() -> None:
    policy_EV = some_logits(1)
    wanted = targets_of(policy_EV, ALL, 1.0)
    for loss in DrafterLoss:
        assert criteria.compute_loss(DraftCriterion(loss), some_logits(3), wanted).min() > 0
        assert criteria.compute_loss(DraftCriterion(loss), policy_EV, wanted).abs().max() < 1e-12


@pytest.mark.parametrize("is_probabilistic", [False, True])
@pytest.mark.parametrize("draft_ids", [ALL, SOME])
def test_acceptance_equals_that_of_rejection_sampling(is_probabilistic: bool, draft_ids: torch.Tensor) -> None:
    """Simulates drafting and verification. Weighted tokens of a rollout are distributed as accepted drafts."""
    draws = 200_000
    temperature = 0.7
    policy_EV = some_logits(1)
    draft_EK = some_logits(2, len(draft_ids))
    wanted = targets_of(policy_EV, draft_ids, temperature)
    criterion = DraftCriterion(temperature=temperature, is_probabilistic=is_probabilistic)
    rng = np.random.default_rng(0)
    p_EV = softmax(policy_EV.numpy(), temperature)
    q_EV = np.zeros((E, V))
    drawn_EK = (
        softmax(draft_EK.numpy(), temperature) if is_probabilistic else np.eye(len(draft_ids))[draft_EK.argmax(-1)]
    )
    q_EV[:, draft_ids.numpy()] = drawn_EK
    for row in range(E):
        drafted = rng.choice(V, draws, p=q_EV[row])
        is_accepted = rng.random(draws) < p_EV[row, drafted] / q_EV[row, drafted]
        accepted = np.bincount(drafted[is_accepted], minlength=V) / draws
        for token in range(V):
            index = (draft_ids == token).nonzero()
            next_EK1 = torch.full((E, 1), int(index[0, 0]) if len(index) else -1)
            share_E, weight_E = criteria.estimate_acceptance(criterion, draft_EK, wanted, next_EK1)
            assert float(share_E[row]) == pytest.approx(accepted.sum(), abs=0.006)
            assert p_EV[row, token] * float(weight_E[row]) == pytest.approx(
                accepted[token] if is_probabilistic else p_EV[row, token] * (token == drafted[0]), abs=0.006
            )


def test_acceptance_length_counts_the_bonus_token() -> None:
    assert DrafterMetrics(0.0, 0.0, (0.8, 0.5, 0.5), 0.0).acceptance_length == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert DrafterMetrics(0.0, 0.0, (), 0.0).acceptance_length == 1
