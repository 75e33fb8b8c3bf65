"""The multi-pass loss equals that of speculators and of token-by-token drafting, and packing does not change it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.live_tensors import LiveTensors
from tests.unit.drafting.builders import (
    HIDDEN,
    VOCAB,
    PolicyEnds,
    a_head,
    a_policy,
    choose_targets,
    some_ends,
    some_last,
    some_states,
)

from specrl.drafting import attention, online, vocabulary
from specrl.drafting.criteria import DraftCriterion
from specrl.drafting.eagle3.head import Eagle3Head, HeadConfig
from specrl.drafting.layers import apply_rotary
from specrl.drafting.online import (
    FULL_RATE_STARTS,
    PASS_DECAY,
    WARM_UP_UPDATES,
    DrafterTrainer,
    combine_updates,
    compute_multi_pass_loss,
    count_starts,
    scale_learning_rate,
)
from specrl.drafting.packing import LessonBatch, lay_out_rows, pack_rows
from specrl.spec.trainer import DrafterLoss

PASSES = 3


def loss_of(head: Eagle3Head, batch: LessonBatch) -> online.PassSums:
    lengths = (batch.lengths_B - batch.prompt_lengths_B).tolist()
    return compute_multi_pass_loss(head, pack_rows(batch), [max(1, n) for n in count_starts(lengths, PASSES)])


def gradients(head: Eagle3Head, loss: torch.Tensor, *, keep: bool = False) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(head.parameters()), retain_graph=keep))


def drafts(head: Eagle3Head, ends: PolicyEnds, batch: LessonBatch, row: int, start: int) -> list[torch.Tensor]:
    """Return log-probabilities [V] of each pass, computed as an engine drafts: token by token with a growing cache.

    Verified context first: pairs (h_t, x_{t+1}) for t <= start. Then each pass appends one more pair, of the last
    output and the next token, at the next position.
    """
    policy = head.config.policy
    layer = head.midlayer
    hidden_SH = head.fc(batch.aux_BSA[row, : start + 1])
    tokens_S = batch.token_ids_BS[row, 1 : start + 2]
    found = []
    for step in range(PASSES):
        input_SX = head.join_qkv_input(ends.embedding_VH[tokens_S], hidden_SH)
        position_1S = torch.arange(len(tokens_S))[None]

        def heads(x_SX: torch.Tensor) -> torch.Tensor:
            return x_SX.view(len(x_SX), -1, policy.head_dim).transpose(0, 1)[None]

        query = apply_rotary(heads(layer.self_attn.q_proj(input_SX)), position_1S, head.config.decoder_shape)[:, :, -1:]
        key = apply_rotary(heads(layer.self_attn.k_proj(input_SX)), position_1S, head.config.decoder_shape)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, heads(layer.self_attn.v_proj(input_SX)), enable_gqa=True
        )
        out_H = head.after_attention(attended.transpose(1, 2).flatten(2)[0, 0], hidden_SH[-1])
        found.append(head.compute_logits(out_H).log_softmax(-1))
        following = start + 2 + step
        if following < batch.token_ids_BS.shape[1]:
            tokens_S = torch.cat([tokens_S, batch.token_ids_BS[row, following : following + 1]])
            hidden_SH = torch.cat([hidden_SH, out_H[None]])
    return found


def test_the_loss_equals_that_of_drafting_token_by_token() -> None:
    head = a_head()
    ends = some_ends()
    batch = some_states([3, 2], [9, 6])
    last_BSH = some_last([9, 6])
    totals = count_starts([6, 4], PASSES)
    expected = 0.0
    for row in range(2):
        prompt = int(batch.prompt_lengths_B[row])
        length = int(batch.lengths_B[row])
        for start in range(prompt - 1, length - 2):
            for step, drafted_V in enumerate(drafts(head, ends, batch, row, start)):
                if start + 2 + step >= length:
                    continue
                wanted_V = ends.compute_logits(last_BSH[row, start + 1 + step]).log_softmax(-1)
                divergence = (wanted_V.exp() * (wanted_V - drafted_V)).sum()
                expected += PASS_DECAY**step * float(divergence.detach()) / totals[step]
    assert float(loss_of(head, batch).loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_padding_and_other_sequences_change_nothing() -> None:
    head = a_head()
    together = loss_of(head, some_states([3, 2], [9, 6]))
    padded = loss_of(head, some_states([3, 2], [9, 6], padding=5))
    assert float(together.loss.detach()) == pytest.approx(float(padded.loss.detach()), rel=1e-6)
    batch = some_states([3, 2], [9, 6])
    totals = count_starts([6, 4], PASSES)
    alone = [
        compute_multi_pass_loss(head, pack_rows(part), totals)
        for part in (batch.select_sequences([0]), batch.select_sequences([1]))
    ]
    assert sum(float(part.loss.detach()) for part in alone) == pytest.approx(float(together.loss.detach()), rel=1e-6)
    for name in ("loss_sums_J", "alive_J", "accepted_J"):
        torch.testing.assert_close(sum(getattr(part, name) for part in alone), getattr(together, name))


def test_attention_in_blocks_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    head = a_head()
    batch = some_states([3, 2], [20, 11])
    whole = gradients(head, loss_of(head, batch).loss)
    monkeypatch.setattr(attention, "BLOCK_STARTS", 5)
    for one, other in zip(whole, gradients(head, loss_of(head, batch).loss), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", DrafterLoss)
@pytest.mark.parametrize(("draft_vocab", "temperature"), [(VOCAB, 1.0), (16, 0.7)])
def test_starts_in_chunks_give_the_same_bits(
    loss: DrafterLoss, draft_vocab: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = a_head(draft_vocab)
    ids_K = head.draft_ids_K if draft_vocab < VOCAB else None
    batch = some_states([4, 2, 6], [20, 9, 17], draft_ids_K=ids_K, temperature=temperature)
    criterion = DraftCriterion(loss, temperature, is_probabilistic=temperature != 1)
    found = []
    for chunk in (vocabulary.CHUNK_BYTES, 4 * draft_vocab * 5):
        monkeypatch.setattr(vocabulary, "CHUNK_BYTES", chunk)
        sums = compute_multi_pass_loss(head, pack_rows(batch), [60, 50, 40], criterion)
        measured = [sums.loss.detach(), sums.loss_sums_J, sums.alive_J, sums.accepted_J]
        found.append([*measured, *gradients(head, sums.loss)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_wide_vocabulary_needs_little_more_than_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needed the share, the policy's probabilities, and several steps of each loss, for all starts at once."""
    words, starts = 151_936, 60
    head = Eagle3Head(HeadConfig(a_policy(vocab_size=words), words, (2, 3, 4)))
    batch = some_states([2], [starts + 3])
    targets_NK = torch.randn(starts, words, dtype=torch.bfloat16)
    batch = batch._replace(target_NK=targets_NK, normaliser_N1=torch.empty(starts, 0))
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", 4 * words * 4)
    with LiveTensors() as live:
        live.ignore(*head.parameters(), *batch)
        sums = compute_multi_pass_loss(head, pack_rows(batch), [starts] * PASSES, DraftCriterion(temperature=0.7))
        torch.autograd.backward(sums.loss)
    # The logits of all passes, the gradient of one, and that of the output layer.
    logits = 4 * starts * words
    assert live.most <= (PASSES + 1) * logits + head.lm_head.weight.nbytes


def test_too_short_completions_give_zero_loss() -> None:
    trainer = DrafterTrainer(a_head(), 1e-3, 1.0, PASSES)
    trainer.begin_update([1, 1])
    trainer.accumulate_gradients(some_states([3, 2], [4, 3]))
    metrics = combine_updates([trainer.finish_update()])
    assert metrics.loss == 0
    assert metrics.acceptance_per_position == (0.0, 0.0, 0.0)


def test_only_the_head_gets_gradients() -> None:
    batch = some_states([3], [9])
    batch.aux_BSA.requires_grad_()
    detached = batch._replace(aux_BSA=batch.aux_BSA.detach())
    head = a_head()
    torch.autograd.backward(loss_of(head, detached).loss)
    assert batch.aux_BSA.grad is None
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in head.parameters())


def test_acceptance_with_a_reduced_vocabulary_counts_draftable_tokens_only() -> None:
    head = a_head(draft_vocab=8)
    head.set_draft_vocabulary(torch.arange(40, 48))
    batch = some_states([2] * 8, [12] * 8, draft_ids_K=head.draft_ids_K)
    sums = loss_of(head, batch)
    assert math.isfinite(float(sums.loss.detach()))
    assert int(sums.alive_J[0]) == 8 * 9
    best_BS = some_ends().compute_logits(some_last([12] * 8)).softmax(-1)[..., 40:].max(-1).values
    assert 0 < float(sums.accepted_J[0]) <= float(best_BS[:, 2:11].sum())
    could_stay_BS = batch.token_ids_BS[:, 3:11] >= 40
    assert float(sums.alive_J[1]) <= int(could_stay_BS.sum())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_acceptance_equals_that_of_greedy_drafts_verified_one_by_one(temperature: float) -> None:
    head = a_head()
    ends = some_ends()
    batch = some_states([3, 2], [9, 12])
    last_BSH = some_last([9, 12])
    # The first tokens are those that the head drafts, so that some starts stay alive.
    batch.token_ids_BS[0, 4] = drafts(head, ends, batch, 0, 2)[0].argmax()
    batch.token_ids_BS[1, 6] = drafts(head, ends, batch, 1, 4)[0].argmax()
    batch = batch._replace(embedding_BSH=ends.embedding_VH[batch.token_ids_BS])
    alive = [0.0] * PASSES
    accepted = [0.0] * PASSES
    for row in range(2):
        prompt = int(batch.prompt_lengths_B[row])
        length = int(batch.lengths_B[row])
        for start in range(prompt - 1, length - 2):
            is_alive = True
            for step, drafted_V in enumerate(drafts(head, ends, batch, row, start)):
                if not is_alive or start + 2 + step >= length:
                    continue
                policy_V = (ends.compute_logits(last_BSH[row, start + 1 + step]) / temperature).softmax(-1)
                alive[step] += 1
                accepted[step] += float(policy_V[drafted_V.argmax()])
                is_alive = int(drafted_V.argmax()) == int(batch.token_ids_BS[row, start + 2 + step])
    totals = count_starts([6, 10], PASSES)
    sums = compute_multi_pass_loss(head, pack_rows(batch), totals, DraftCriterion(temperature=temperature))
    assert sums.alive_J.tolist() == alive
    assert alive[1] >= 2
    assert sums.accepted_J.tolist() == pytest.approx(accepted, rel=1e-4)


LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=5)


@given(LENGTHS, st.sampled_from(list(DrafterLoss)), st.sampled_from([48, 16]))
@settings(max_examples=25, deadline=None)
def test_packed_rows_give_the_same_result_as_unpacked_ones(
    sizes: list[tuple[int, int]], loss: DrafterLoss, draft_vocab: int
) -> None:
    prompts = [p for p, _ in sizes]
    lengths = [p + t for p, t in sizes]
    ids_K = torch.arange(draft_vocab) if draft_vocab < VOCAB else None
    batch = some_states(prompts, lengths, draft_ids_K=ids_K, temperature=0.7)
    batch = LessonBatch(*(x.double() if x.is_floating_point() else x for x in batch))
    head = a_head(draft_vocab).double()
    totals = [max(1, n) for n in count_starts([t for _, t in sizes], PASSES)]
    criterion = DraftCriterion(loss, temperature=0.7)
    whole = compute_multi_pass_loss(head, lay_out_rows(batch, [list(range(len(sizes)))]), totals, criterion)
    for rows in (pack_rows(batch), lay_out_rows(batch, [[i] for i in range(len(sizes))])):
        other = compute_multi_pass_loss(head, rows, totals, criterion)
        torch.testing.assert_close(other.loss, whole.loss, rtol=1e-10, atol=1e-12)
        for name in ("loss_sums_J", "alive_J", "accepted_J"):
            torch.testing.assert_close(getattr(other, name), getattr(whole, name), rtol=1e-9, atol=1e-12)
        if max(totals) > 1 or whole.loss_sums_J[0] > 0:
            for one, two in zip(gradients(head, whole.loss, keep=True), gradients(head, other.loss), strict=True):
                torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-11)


def test_packing_is_first_fit_and_wastes_little() -> None:
    batch = some_states([2, 2, 2, 2, 2], [20, 11, 9, 6, 5])
    rows = pack_rows(batch)
    assert rows.token_ids_RW.shape == (3, 20)
    assert int((rows.room_RM > 0).sum()) == sum(n - 3 for n in (20, 11, 9, 6, 5))


def test_a_slice_of_a_rollout_is_trained_like_a_completion() -> None:
    head = a_head()
    batch = some_states([3], [15])
    slice_of = {"target_NK": batch.target_NK[3:7], "normaliser_N1": batch.normaliser_N1[3:7]}
    slice_of |= {"prompt_lengths_B": torch.tensor([6]), "lengths_B": torch.tensor([11])}
    stretch = batch._replace(**slice_of)
    alone = LessonBatch(*(x[:, :11] for x in batch[:4]), *slice_of.values())
    assert float(loss_of(head, stretch).loss.detach()) == pytest.approx(float(loss_of(head, alone).loss.detach()))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_starts_per_pass_equal_the_terms_of_the_loss(lengths: list[int]) -> None:
    expected = [sum(1 for n in lengths for m in range(n - 1) if m + j < n - 1) for j in range(PASSES)]
    assert count_starts(lengths, PASSES) == expected


def test_a_head_learns_a_predictable_policy() -> None:
    generator = torch.Generator().manual_seed(5)
    ends = some_ends()
    tokens_BS = (torch.randint(0, VOCAB, (64, 1), generator=generator) + 5 * torch.arange(12)) % VOCAB
    # The last hidden state is the output row of the next token, and the norm leaves it unchanged.
    following_BS = (tokens_BS + 5) % VOCAB
    rows_VH = torch.nn.functional.normalize(ends.lm_head_VH, dim=-1)
    logits_BSV = PolicyEnds(torch.ones(HIDDEN), rows_VH, rows_VH).compute_logits(rows_VH[following_BS] * 20)
    targets = choose_targets(logits_BSV, [2] * 64, [12] * 64)
    aux = torch.cat([ends.embedding_VH[tokens_BS]] * 3, -1)
    batch = LessonBatch(
        tokens_BS, aux, aux[..., :HIDDEN], aux[..., :0], *targets, torch.full((64,), 2), torch.full((64,), 12)
    )
    # At temperature 1 the policy itself gives its top token a probability of only 0.8.
    trainer = DrafterTrainer(a_head(), 1e-2, 1.0, PASSES, DraftCriterion(temperature=0.5))
    history = []
    for _ in range(30):
        trainer.begin_update([10] * 64)
        trainer.accumulate_gradients(batch)
        history.append(combine_updates([trainer.finish_update(1e-2)]))
    assert history[-1].loss < history[0].loss / 4
    assert min(history[-1].acceptance_per_position) > 0.9


def test_the_state_restores_the_optimizer() -> None:
    batch = some_states([3, 2], [9, 6])

    def step(trainer: DrafterTrainer) -> float:
        trainer.begin_update([6, 4])
        trainer.accumulate_gradients(batch)
        return combine_updates([trainer.finish_update()]).loss

    first, second = (DrafterTrainer(a_head(seed=seed), 1e-2, 1.0, PASSES) for seed in (0, 9))
    step(first)
    second.load_state(first.collect_state())
    assert [step(first), step(first)] == [step(second), step(second)]
    fresh = DrafterTrainer(a_head(seed=3), 1e-2, 1.0, PASSES)
    second.load_state(fresh.collect_state())  # saved before its first update
    assert step(second) == step(fresh)


@pytest.mark.filterwarnings("ignore")  # speculators and what it imports warn about themselves
def test_the_loss_equals_that_of_speculators(tmp_path: Path) -> None:
    batch = some_states([1, 1], [9, 9])
    ends = some_ends()
    head = a_head()
    theirs = speculators_loss(tmp_path, head, ends, batch)
    totals = count_starts([8, 8], PASSES)
    ours = compute_multi_pass_loss(head, pack_rows(batch), totals)
    for j in range(PASSES):
        assert float(ours.loss_sums_J[j]) / totals[j] == pytest.approx(theirs[j], rel=1e-5)


def speculators_loss(folder: Path, head: Eagle3Head, ends: PolicyEnds, batch: LessonBatch) -> list[float]:
    """Compute each pass's mean divergence with speculators' Eagle3DraftModel, with sequences packed into one row."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel
    from transformers import LlamaConfig, Qwen3Config

    policy = a_policy()
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": policy.intermediate_size,
        "num_attention_heads": policy.num_heads,
        "num_key_value_heads": policy.num_groups,
        "head_dim": policy.head_dim,
        "max_position_embeddings": policy.max_length,
        "rms_norm_eps": policy.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": policy.rope_theta},
        "tie_word_embeddings": False,
    }
    Qwen3Config(num_hidden_layers=4, architectures=["Qwen3ForCausalLM"], **shape).save_pretrained(folder)
    verifier = {
        "model.embed_tokens.weight": ends.embedding_VH,
        "model.norm.weight": ends.norm_H,
        "lm_head.weight": ends.lm_head_VH,
    }
    save_file(verifier, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(verifier, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = Eagle3DraftModel.from_training_args(
        LlamaConfig(num_hidden_layers=1, **shape),
        draft_vocab_size=VOCAB,
        norm_before_residual=False,
        ttt_steps=PASSES,
        verifier_name_or_path=str(folder),
        target_layer_ids=[2, 3, 4],
        draft_attn_impl="eager",
    )
    with torch.no_grad():
        named = dict(model.named_parameters())
        for name, weight in head.named_parameters():
            named[name.replace("midlayer.", "layers.0.")].copy_(weight)
        model.verifier_norm.weight.copy_(ends.norm_H)
        # Position t of a row: hidden state t, token t+1, the policy's output at t+1.
        sequences, width = batch.token_ids_BS.shape
        rows = {
            "hidden_states": batch.aux_BSA[:, :-1].reshape(1, -1, 3 * HIDDEN),
            "input_ids": batch.token_ids_BS[:, 1:].reshape(1, -1),
            "document_ids": torch.arange(sequences).repeat_interleave(width - 1)[None],
            "position_ids": torch.arange(width - 1).repeat(sequences)[None],
            "verifier_last_hidden_states": some_last([9, 9])[:, 1:].reshape(1, -1, HIDDEN),
        }
        found = []
        # A pass that runs past the end of a sequence would read the next sequence's target.
        for sequence in range(sequences):
            one = slice(sequence * (width - 1), (sequence + 1) * (width - 1))
            _, _, metrics = model(
                **{name: value[:, one] for name, value in rows.items()},
                loss_mask=torch.ones(1, width - 1, dtype=torch.bool) & (torch.arange(width - 1) < width - 2)[None],
                ttt_steps=PASSES,
                ttt_step_loss_decay=1.0,
                loss_config=resolve_loss_config("kl_div", "eager"),
            )
            found.append([float(metrics[f"loss_{j}_sum"]) for j in range(PASSES)])
    return [sum(column) / sequences for column in zip(*found, strict=True)]


def test_metrics_count_each_start_once_over_several_updates() -> None:
    sequences = some_states([3, 2, 4], [13, 6, 8])
    lengths = [10, 4, 4]
    looks = []
    with torch.no_grad():
        for some in ([0, 1, 2], [0], [1, 2]):
            trainer = DrafterTrainer(a_head(), 1e-3, 1.0, PASSES)
            trainer.begin_update([lengths[i] for i in some])
            trainer.accumulate_gradients(sequences.select_sequences(some))
            looks.append(trainer.finish_measurement())
    whole = combine_updates(looks[:1])
    parts = combine_updates(looks[1:])
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.acceptance_per_position == pytest.approx(whole.acceptance_per_position, rel=1e-6)


def test_joined_batches_train_like_one_batch() -> None:
    head = a_head()
    short = some_states([3], [8], padding=4)
    long = some_states([2, 5], [16, 11], seed=3, padding=4)
    together = LessonBatch.join_batches([short, long])
    assert together.token_ids_BS.shape == (3, 16)
    found = loss_of(head, together)
    alone = [loss_of(head, batch) for batch in (short, long)]
    torch.testing.assert_close(found.loss_sums_J, alone[0].loss_sums_J + alone[1].loss_sums_J)
    torch.testing.assert_close(found.accepted_J, alone[0].accepted_J + alone[1].accepted_J)


def test_selected_sequences_keep_their_own_targets() -> None:
    batch = some_states([3, 2, 4], [9, 6, 12], draft_ids_K=torch.arange(0, 48, 4))
    chosen = batch.select_sequences([2, 0])
    assert chosen.count_targets() == [7, 5]
    torch.testing.assert_close(chosen.target_NK, torch.cat([batch.target_NK[8:], batch.target_NK[:5]]))
    torch.testing.assert_close(chosen.normaliser_N1, torch.cat([batch.normaliser_N1[8:], batch.normaliser_N1[:5]]))
    joined = LessonBatch.join_batches([chosen, batch.select_sequences([1])])
    torch.testing.assert_close(joined.target_NK, torch.cat([chosen.target_NK, batch.target_NK[5:8]]))
    rows = pack_rows(joined)
    torch.testing.assert_close(rows.target_RM[rows.select_starts(0)].sort().values, torch.arange(len(joined.target_NK)))


def test_the_learning_rate_is_full_for_many_starts_after_the_warm_up() -> None:
    assert scale_learning_rate(1e-3, FULL_RATE_STARTS, WARM_UP_UPDATES) == 1e-3
    assert scale_learning_rate(1e-3, 10 * FULL_RATE_STARTS, 1000) == 1e-3
    assert scale_learning_rate(1e-3, FULL_RATE_STARTS // 16, 1000) == pytest.approx(1e-3 / 4)
    assert scale_learning_rate(1e-3, FULL_RATE_STARTS, 0) == pytest.approx(1e-3 / WARM_UP_UPDATES)
    assert scale_learning_rate(1e-3, 0, 1000) == 0
