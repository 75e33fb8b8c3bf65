"""The losses against TRL, against their formulas in float64, and against finite differences."""

from __future__ import annotations

import collections
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specrl.trainer.losses import (
    LossSettings,
    capped_tokens,
    clipped_policy_gradient,
    effective_sample_size,
    sampler_mismatch,
    truncated_importance_weights,
)

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.3, importance_cap=2.0)
TOKENS = 200


@pytest.fixture
def tokens() -> SimpleNamespace:
    """Log-probabilities far enough apart that both clips and the cap are hit."""
    generator = torch.Generator().manual_seed(0)

    def draw(scale: float) -> torch.Tensor:
        return scale * torch.randn(TOKENS, generator=generator, dtype=torch.float64)

    policy_T = -1 - draw(1).abs()
    proximal_T = policy_T + draw(0.3)
    return SimpleNamespace(policy=policy_T, proximal=proximal_T, sampler=proximal_T + draw(0.7), advantage=draw(1))


def test_loss_is_its_formula_token_by_token(tokens: SimpleNamespace) -> None:
    weight_T = truncated_importance_weights(tokens.proximal, tokens.sampler, 2.0)
    terms = clipped_policy_gradient(tokens.policy, tokens.proximal, tokens.advantage, weight_T, SETTINGS)
    expected, clipped, clipped_high = 0.0, 0, 0
    for policy, proximal, sampler, advantage in zip(
        tokens.policy.tolist(),
        tokens.proximal.tolist(),
        tokens.sampler.tolist(),
        tokens.advantage.tolist(),
        strict=True,
    ):
        weight = min(math.exp(proximal - sampler), 2.0)
        ratio = math.exp(policy - proximal)
        free, bound = ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage
        expected -= weight * min(free, bound)
        clipped += bound < free
        clipped_high += bound < free and ratio > 1
    assert float(terms.loss_sum.detach()) == pytest.approx(expected, rel=1e-12)
    assert int(terms.clipped_tokens) == clipped > clipped_high
    assert int(terms.clipped_high_tokens) == clipped_high > 0
    assert int(capped_tokens(tokens.proximal, tokens.sampler, 2.0)) == int((weight_T == 2.0).sum()) > 0
    assert int(capped_tokens(tokens.proximal, tokens.sampler, 0)) == 0


def test_gradient_is_that_of_finite_differences(tokens: SimpleNamespace) -> None:
    weight_T = truncated_importance_weights(tokens.proximal, tokens.sampler, 2.0)

    def loss(policy_T: torch.Tensor) -> torch.Tensor:
        return clipped_policy_gradient(policy_T, tokens.proximal, tokens.advantage, weight_T, SETTINGS).loss_sum

    assert torch.autograd.gradcheck(loss, tokens.policy.clone().requires_grad_())


def test_loss_equals_that_of_trl(tokens: SimpleNamespace) -> None:
    trainer_class = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is the independent loss").GRPOTrainer
    mask = torch.ones(1, TOKENS, dtype=torch.int64)
    policy = tokens.policy.clone().requires_grad_()
    trainer = trl_trainer(trainer_class, policy)
    weight_T = truncated_importance_weights(tokens.proximal, tokens.sampler, 2.0)
    inputs = {
        "prompt_ids": torch.zeros(1, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(1, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(1, TOKENS, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": tokens.advantage[None],
        "old_per_token_logps": tokens.proximal[None],
        "importance_sampling_ratio": weight_T[None],
        "sampling_per_token_logps": tokens.sampler[None],
        "num_items_in_batch": torch.tensor(TOKENS),
    }
    theirs = trainer_class._compute_loss(trainer, None, inputs)
    (their_gradient,) = torch.autograd.grad(theirs, policy)
    mine = tokens.policy.clone().requires_grad_()
    ours = clipped_policy_gradient(mine, tokens.proximal, tokens.advantage, weight_T, SETTINGS).loss_sum / TOKENS
    (our_gradient,) = torch.autograd.grad(ours, mine)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-12)


def _same(tensor: torch.Tensor, **_: object) -> torch.Tensor:
    """What a collective of one process does."""
    return tensor


def trl_trainer(trainer_class: type, policy_T: torch.Tensor) -> object:
    """Just enough of a GRPOTrainer for its loss: everything else of it is about generating and logging."""
    trainer = trainer_class.__new__(trainer_class)
    trainer.__dict__.update(
        beta=0.0,
        top_entropy_quantile=1.0,
        loss_type="dapo",
        importance_sampling_level="token",
        epsilon_low=SETTINGS.clip_low,
        epsilon_high=SETTINGS.clip_high,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        off_policy_mask_threshold=None,
        use_bias_correction_kl=False,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=_same, reduce=_same, sync_gradients=True),
        model=SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy_T[None], torch.zeros(1, len(policy_T)), None),
    )
    return trainer


def test_first_update_of_a_step_is_a_plain_policy_gradient(tokens: SimpleNamespace) -> None:
    policy_T = tokens.policy.clone().requires_grad_()
    ones_T = torch.ones_like(policy_T)
    terms = clipped_policy_gradient(policy_T, tokens.policy, tokens.advantage, ones_T, SETTINGS)
    (gradient_T,) = torch.autograd.grad(terms.loss_sum, policy_T)
    torch.testing.assert_close(gradient_T, -tokens.advantage)
    assert int(terms.clipped_tokens) == 0


def test_weights_carry_no_gradient_and_stay_below_the_cap() -> None:
    proximal_T = torch.tensor([-1.0, -0.1, -200.0, 0.0], requires_grad=True)
    weight_T = truncated_importance_weights(proximal_T, torch.tensor([-1.0, -9.0, -0.1, -500.0]), 2.0)
    assert not weight_T.requires_grad
    torch.testing.assert_close(weight_T, torch.tensor([1.0, 2.0, 0.0, 2.0]))


def test_cap_0_turns_the_correction_off() -> None:
    assert truncated_importance_weights(torch.zeros(3), torch.full((3,), -5.0), 0.0).tolist() == [1.0] * 3


def test_mismatch_counts_tokens_of_the_present_version_only() -> None:
    proximal_T, sampler_T = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -9.0])
    mismatch = sampler_mismatch(proximal_T, sampler_T, torch.tensor([True, True, False]))
    assert int(mismatch.tokens) == 2
    assert float(mismatch.abs_sum) == pytest.approx(0.5)
    assert float(mismatch.abs_max) == pytest.approx(0.5)
    assert float(mismatch.kl_sum) == pytest.approx(math.exp(0.5) - 1 - 0.5)


def test_mismatch_of_no_tokens_is_zero() -> None:
    mismatch = sampler_mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert [float(value) for value in vars(mismatch).values()] == [0.0] * 4


def test_k3_estimates_the_divergence_without_bias() -> None:
    sampler_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer_V = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    per_token = [
        float(sampler_mismatch(trainer_V[i : i + 1].log(), sampler_V[i : i + 1].log(), torch.tensor([True])).kl_sum)
        for i in range(3)
    ]
    expected = float((sampler_V * (sampler_V / trainer_V).log()).sum())
    assert sum(p * k for p, k in zip(sampler_V.tolist(), per_token, strict=True)) == pytest.approx(expected)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=50))
def test_effective_sample_size_is_a_share(weights: list[float]) -> None:
    share = effective_sample_size(sum(weights), sum(w * w for w in weights), len(weights))
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9


def test_effective_sample_size_of_equal_weights_is_1() -> None:
    assert effective_sample_size(6.0, 12.0, 3) == pytest.approx(1.0)
