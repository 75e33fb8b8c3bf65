"""Log-probabilities, entropies and gradients over sampling sets equal a dense float64 computation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.integration.trainer.runs import a_rollout

from specrl.errors import RecordInvalid
from specrl.records import Batch, SamplingSets, TrainRollout, VersionSpan
from specrl.spec.trainer import Loss
from specrl.trainer.losses.policy_loss import PolicyLoss, SampledTokens
from specrl.trainer.losses.sequences import Sequences
from specrl.trainer.megatron_backend.policy.truncation import build_set_mask
from specrl.trainer.megatron_backend.training.batches import check_sets
from specrl.trainer.megatron_backend.training.policy_step import _measure_sets

VOCAB = 30
CPU = torch.device("cpu")


def with_sets(item: TrainRollout, generator: np.random.Generator) -> TrainRollout:
    """Give every sampled token a set of itself and up to eleven others; the first one the whole vocabulary."""
    ids = item.rollout.token_ids_T
    sets = [sorted({int(token), *generator.integers(0, VOCAB, generator.integers(0, 12)).tolist()}) for token in ids]
    sets[0] = list(range(VOCAB))
    return replace(item, rollout=replace(item.rollout, sets=SamplingSets.from_lists(sets)))


@pytest.fixture
def items() -> list[TrainRollout]:
    generator = np.random.default_rng(3)
    return [with_sets(a_rollout(generator, number, VOCAB), generator) for number in range(3)]


def dense_mask(items: list[TrainRollout]) -> torch.Tensor:
    """[T, V]: whether each id could be sampled, from the lists alone."""
    rows = []
    for item in items:
        sets = item.rollout.sets
        assert sets is not None
        for ids in np.split(sets.ids_M, np.cumsum(sets.sizes_N)[:-1]):
            row = torch.zeros(VOCAB, dtype=torch.bool)
            row[torch.from_numpy(ids).long()] = True
            rows.append(row)
    return torch.stack(rows)


def loss_of(logprobs_T: torch.Tensor, items: list[TrainRollout]) -> torch.Tensor:
    """The default policy loss with proximal log-probabilities apart from the policy's, so that clipping occurs."""
    counts = [item.rollout.sampled_length for item in items]
    sampled = SampledTokens(
        proximal_T=logprobs_T.detach() + 0.3 * torch.sin(torch.arange(len(logprobs_T)).to(logprobs_T)),
        sampler_T=torch.from_numpy(np.concatenate([item.rollout.sampler_logprobs_T for item in items])).to(logprobs_T),
        advantage_T=torch.tensor(np.repeat([item.advantage for item in items], counts)).to(logprobs_T),
        sequences=Sequences(torch.repeat_interleave(torch.arange(len(items)), torch.tensor(counts)), len(items)),
    )
    return PolicyLoss(Loss(), 64, len(logprobs_T), len(items))(logprobs_T, sampled).loss


def test_the_gradient_of_the_renormalised_loss_equals_a_dense_one(items: list[TrainRollout]) -> None:
    """Through the normaliser: without its gradient, or with the mass of the whole vocabulary, they differ."""
    tokens = sum(item.rollout.sampled_length for item in items)
    target_T = torch.from_numpy(np.concatenate([item.rollout.token_ids_T for item in items])).long()
    logits_TV = 3 * torch.randn(tokens, VOCAB, generator=torch.Generator().manual_seed(1))
    mine_TV = logits_TV.clone().requires_grad_()
    sets = build_set_mask(items, torch.arange(tokens), CPU)
    assert sets is not None
    logprobs_T = sets.mask_outside(mine_TV.clone(), 0).log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    loss = loss_of(logprobs_T, items)
    loss.backward()

    dense_TV = logits_TV.double().requires_grad_()
    mass_T = (dense_TV.exp() * dense_mask(items)).sum(-1)
    expected_T = dense_TV.gather(1, target_T[:, None])[:, 0] - mass_T.log()
    expected = loss_of(expected_T, items)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine_TV.grad.double(), dense_TV.grad, rtol=1e-4, atol=1e-6)
    assert (mine_TV.grad[~dense_mask(items)] == 0).all()

    # With the mass alone: the right value of the log-probability, since the sampler's mass of the set is known, and the
    # whole vocabulary's normaliser in the gradient.
    whole_TV = logits_TV.double().requires_grad_()
    kept_T = (whole_TV.softmax(-1) * dense_mask(items)).sum(-1).detach().log()
    by_mass_T = whole_TV.log_softmax(-1).gather(1, target_T[:, None])[:, 0] - kept_T
    torch.testing.assert_close(by_mass_T, expected_T)
    loss_of(by_mass_T, items).backward()
    assert (whole_TV.grad - dense_TV.grad).abs().max() > 0.05 * dense_TV.grad.abs().max()


def test_every_rank_masks_its_own_tokens_and_columns(items: list[TrainRollout]) -> None:
    """As with tensor parallelism in two, the vocabulary padded by two columns, and context parallelism in two."""
    mask_TV = dense_mask(items)
    tokens = len(mask_TV)
    for sampled_L in (torch.arange(0, tokens, 2).flip(0), torch.arange(1, tokens, 2)):
        sets = build_set_mask(items, sampled_L, CPU)
        assert sets is not None
        half = VOCAB // 2 + 1
        halves = [sets.mask_outside(torch.zeros(len(sampled_L), half), first) for first in (0, half)]
        is_kept_LV = torch.isfinite(torch.cat(halves, -1))
        assert torch.equal(is_kept_LV[:, :VOCAB], mask_TV[sampled_L])
        assert not is_kept_LV[:, VOCAB:].any()


def test_rollouts_without_sets_keep_the_whole_vocabulary(items: list[TrainRollout]) -> None:
    plain = replace(items[1], rollout=replace(items[1].rollout, sets=None))
    mixed = [items[0], plain, items[2]]
    first, second, _ = (item.rollout.sampled_length for item in mixed)
    expected = dense_mask(items)
    expected[first : first + second] = True
    sets = build_set_mask(mixed, torch.arange(len(expected)), CPU)
    assert sets is not None
    assert torch.equal(torch.isfinite(sets.mask_outside(torch.zeros(len(expected), VOCAB), 0)), expected)
    assert build_set_mask([plain], torch.arange(second), CPU) is None
    assert build_set_mask([], torch.arange(0), CPU) is None


def test_a_step_reports_the_size_of_its_sets() -> None:
    """Of five sampled tokens, with 1, 3, 1, 1 and 4 tokens to sample from; 4 bytes for each, and 4 for each size."""
    generator = np.random.default_rng(1)
    rollouts = []
    for sets in ([[5], [6, 7, 8], [9]], [[5], [6, 7, 8, 9]]):
        item = a_rollout(generator, 0, VOCAB)
        ids_T = np.array([ids[0] for ids in sets], np.int32)
        given = {"token_ids_T": ids_T, "versions": (VersionSpan(0, 0, len(ids_T)),)}
        given["sampler_logprobs_T"] = np.zeros(len(ids_T), np.float32)
        rollouts.append(replace(item, rollout=replace(item.rollout, sets=SamplingSets.from_lists(sets), **given)))
    found = _measure_sets(Batch(1, tuple(rollouts)), 5)
    assert found == {"sampling_set_tokens": 2.0, "sampling_set_bytes": 12.0, "certain_fraction": 0.6}
    assert _measure_sets(Batch(1, (a_rollout(generator, 0, VOCAB),)), 5) == {}


def test_a_run_with_top_p_trains_no_rollout_without_sets(items: list[TrainRollout]) -> None:
    check_sets(items, is_truncated=True)
    plain = [replace(item, rollout=replace(item.rollout, sets=None)) for item in items]
    check_sets(plain, is_truncated=False)
    with pytest.raises(RecordInvalid, match="r0: sampling sets must be recorded"):
        check_sets(plain, is_truncated=True)
