"""The multi-pass loss: against speculators, against the way drafts are made, and against what must not matter."""

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
from tests.unit.drafting.builders import HIDDEN, VOCAB, a_head, a_policy, some_ends, some_states

from specrl.drafting import online
from specrl.drafting.criteria import Criterion
from specrl.drafting.head import Eagle3Head, rotate
from specrl.drafting.online import (
    FULL_RATE_STARTS,
    PASS_DECAY,
    WARM_UP_UPDATES,
    DrafterTrainer,
    PolicyEnds,
    metrics_of,
    online_rate,
    starts_per_pass,
    training_time_test,
)
from specrl.drafting.packing import HeadBatch, lay_out, pack
from specrl.spec.trainer import DrafterLoss

PASSES = 3


def loss_of(head: Eagle3Head, ends: PolicyEnds, batch: HeadBatch) -> online.PassSums:
    lengths = (batch.lengths_B - batch.prompt_lengths_B).tolist()
    return training_time_test(head, ends, pack(batch), [max(1, n) for n in starts_per_pass(lengths, PASSES)])


def gradients(head: Eagle3Head, loss: torch.Tensor, *, keep: bool = False) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(head.parameters()), retain_graph=keep))


def drafts(head: Eagle3Head, ends: PolicyEnds, batch: HeadBatch, row: int, start: int) -> list[torch.Tensor]:
    """Log-probabilities [V] of each pass, computed as an engine drafts: token after token with a growing cache.

    Verified context first: pairs (h_t, x_{t+1}) for t <= start. Then each pass appends one more pair, of the last
    output and the next token, at the next position.
    """
    policy, layer = head.config.policy, head.midlayer
    hidden_SH = head.fc(batch.aux_BSA[row, : start + 1])
    tokens_S = batch.token_ids_BS[row, 1 : start + 2]
    found = []
    for step in range(PASSES):
        input_SX = head.qkv_input(ends.embedding_VH[tokens_S], hidden_SH)
        position_1S = torch.arange(len(tokens_S))[None]

        def heads(x_SX: torch.Tensor) -> torch.Tensor:
            return x_SX.view(len(x_SX), -1, policy.head_dim).transpose(0, 1)[None]

        query = rotate(heads(layer.self_attn.q_proj(input_SX)), position_1S, policy.rope_theta)[:, :, -1:]
        key = rotate(heads(layer.self_attn.k_proj(input_SX)), position_1S, policy.rope_theta)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, heads(layer.self_attn.v_proj(input_SX)), enable_gqa=True
        )
        out_H = head.after_attention(attended.transpose(1, 2).flatten(2)[0, 0], hidden_SH[-1])
        found.append(head.logits(out_H).log_softmax(-1))
        following = start + 2 + step
        if following < batch.token_ids_BS.shape[1]:
            tokens_S = torch.cat([tokens_S, batch.token_ids_BS[row, following : following + 1]])
            hidden_SH = torch.cat([hidden_SH, out_H[None]])
    return found


def test_loss_is_that_of_drafting_token_by_token() -> None:
    head, ends, batch = a_head(), some_ends(), some_states([3, 2], [9, 6])
    totals = starts_per_pass([6, 4], PASSES)
    expected = 0.0
    for row in range(2):
        prompt, length = int(batch.prompt_lengths_B[row]), int(batch.lengths_B[row])
        for start in range(prompt - 1, length - 2):
            for step, drafted_V in enumerate(drafts(head, ends, batch, row, start)):
                if start + 2 + step >= length:
                    continue
                last_H = batch.last_BSH[row, start + 1 + step]
                normed_H = torch.nn.functional.rms_norm(last_H, (HIDDEN,), ends.norm_H, 1e-6)
                wanted_V = (normed_H @ ends.lm_head_VH.T).log_softmax(-1)
                divergence = (wanted_V.exp() * (wanted_V - drafted_V)).sum()
                expected += PASS_DECAY**step * float(divergence.detach()) / totals[step]
    assert float(loss_of(head, ends, batch).loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_padding_and_company_change_nothing() -> None:
    head, ends = a_head(), some_ends()
    together = loss_of(head, ends, some_states([3, 2], [9, 6]))
    padded = loss_of(head, ends, some_states([3, 2], [9, 6], padding=5))
    assert float(together.loss.detach()) == pytest.approx(float(padded.loss.detach()), rel=1e-6)
    batch = some_states([3, 2], [9, 6])
    totals = starts_per_pass([6, 4], PASSES)
    alone = [training_time_test(head, ends, pack(part), totals) for part in (batch.rows([0]), batch.rows([1]))]
    assert sum(float(part.loss.detach()) for part in alone) == pytest.approx(float(together.loss.detach()), rel=1e-6)
    for name in ("loss_sums_J", "alive_J", "accepted_J"):
        torch.testing.assert_close(sum(getattr(part, name) for part in alone), getattr(together, name))


def test_blocks_of_starts_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    head, ends, batch = a_head(), some_ends(), some_states([3, 2], [20, 11])
    whole = gradients(head, loss_of(head, ends, batch).loss)
    monkeypatch.setattr(online, "BLOCK_STARTS", 5)
    for one, other in zip(whole, gradients(head, loss_of(head, ends, batch).loss), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_too_short_completions_are_no_error() -> None:
    trainer = DrafterTrainer(a_head(), 1e-3, 1.0, PASSES)
    trainer.begin(some_ends(), [1, 1])
    trainer.accumulate(some_states([3, 2], [4, 3]))
    metrics = metrics_of([trainer.finish()])
    assert metrics.loss == 0
    assert metrics.acceptance_per_position == (0.0, 0.0, 0.0)


def test_only_the_head_gets_gradients() -> None:
    ends, batch = some_ends(), some_states([3], [9])
    batch.aux_BSA.requires_grad_()
    detached = HeadBatch(batch.token_ids_BS, batch.aux_BSA.detach(), *list(vars(batch).values())[2:])
    head = a_head()
    torch.autograd.backward(loss_of(head, ends, detached).loss)
    assert batch.aux_BSA.grad is None
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in head.parameters())


def test_reduced_vocabulary_accepts_what_the_policy_gives_to_tokens_it_can_draft() -> None:
    head, ends, batch = a_head(draft_vocab=8), some_ends(), some_states([2] * 8, [12] * 8)
    head.set_draft_vocabulary(torch.arange(40, 48))
    sums = loss_of(head, ends, batch)
    assert math.isfinite(float(sums.loss.detach()))
    assert int(sums.alive_J[0]) == 8 * 9
    normed = torch.nn.functional.rms_norm(batch.last_BSH, (HIDDEN,), ends.norm_H, 1e-6)
    best_BS = (normed @ ends.lm_head_VH.T).softmax(-1)[..., 40:].max(-1).values
    assert 0 < float(sums.accepted_J[0]) <= float(best_BS[:, 2:11].sum())
    could_stay_BS = batch.token_ids_BS[:, 3:11] >= 40
    assert float(sums.alive_J[1]) <= int(could_stay_BS.sum())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_acceptance_is_that_of_greedy_drafts_verified_one_by_one(temperature: float) -> None:
    head, ends, batch = a_head(), some_ends(), some_states([3, 2], [9, 12])
    # Tokens that the head itself drafts first, so that some starts stay alive.
    batch.token_ids_BS[0, 4] = drafts(head, ends, batch, 0, 2)[0].argmax()
    batch.token_ids_BS[1, 6] = drafts(head, ends, batch, 1, 4)[0].argmax()
    alive, accepted = [0.0] * PASSES, [0.0] * PASSES
    for row in range(2):
        prompt, length = int(batch.prompt_lengths_B[row]), int(batch.lengths_B[row])
        for start in range(prompt - 1, length - 2):
            is_alive = True
            for step, drafted_V in enumerate(drafts(head, ends, batch, row, start)):
                if not is_alive or start + 2 + step >= length:
                    continue
                last_H = batch.last_BSH[row, start + 1 + step]
                normed_H = torch.nn.functional.rms_norm(last_H, (HIDDEN,), ends.norm_H, 1e-6)
                policy_V = (normed_H @ ends.lm_head_VH.T / temperature).softmax(-1)
                alive[step] += 1
                accepted[step] += float(policy_V[drafted_V.argmax()])
                is_alive = int(drafted_V.argmax()) == int(batch.token_ids_BS[row, start + 2 + step])
    totals = starts_per_pass([6, 10], PASSES)
    sums = training_time_test(head, ends, pack(batch), totals, Criterion(temperature=temperature))
    assert sums.alive_J.tolist() == alive
    assert alive[1] >= 2
    assert sums.accepted_J.tolist() == pytest.approx(accepted, rel=1e-4)


LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=5)


@given(LENGTHS, st.sampled_from(list(DrafterLoss)), st.sampled_from([48, 16]))
@settings(max_examples=25, deadline=None)
def test_packed_rows_are_the_same_as_unpacked_ones(
    sizes: list[tuple[int, int]], loss: DrafterLoss, draft_vocab: int
) -> None:
    prompts, lengths = [p for p, _ in sizes], [p + t for p, t in sizes]
    batch, ends = some_states(prompts, lengths), some_ends()
    batch = HeadBatch(
        batch.token_ids_BS, batch.aux_BSA.double(), batch.last_BSH.double(), *list(vars(batch).values())[3:]
    )
    ends = PolicyEnds(ends.embedding_VH.double(), ends.norm_H.double(), ends.lm_head_VH.double())
    head = a_head(draft_vocab).double()
    totals = [max(1, n) for n in starts_per_pass([t for _, t in sizes], PASSES)]
    criterion = Criterion(loss, temperature=0.7)
    whole = training_time_test(head, ends, lay_out(batch, [list(range(len(sizes)))]), totals, criterion)
    for rows in (pack(batch), lay_out(batch, [[i] for i in range(len(sizes))])):
        other = training_time_test(head, ends, rows, totals, criterion)
        torch.testing.assert_close(other.loss, whole.loss, rtol=1e-10, atol=1e-12)
        for name in ("loss_sums_J", "alive_J", "accepted_J"):
            torch.testing.assert_close(getattr(other, name), getattr(whole, name), rtol=1e-9, atol=1e-12)
        if max(totals) > 1 or whole.loss_sums_J[0] > 0:
            for one, two in zip(gradients(head, whole.loss, keep=True), gradients(head, other.loss), strict=True):
                torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-11)


def test_packing_is_by_first_fit_and_wastes_little() -> None:
    batch = some_states([2, 2, 2, 2, 2], [20, 11, 9, 6, 5])
    rows = pack(batch)
    assert rows.token_ids_RW.shape == (3, 20)
    assert int((rows.room_RM > 0).sum()) == sum(n - 3 for n in (20, 11, 9, 6, 5))


def test_a_stretch_of_a_rollout_is_trained_like_a_completion_of_its_own() -> None:
    head, ends, batch = a_head(), some_ends(), some_states([3], [15])
    stretch = batch.cut([6], [11])
    alone = HeadBatch(*(x[:, :11] for x in list(vars(batch).values())[:3]), torch.tensor([6]), torch.tensor([11]))
    assert float(loss_of(head, ends, stretch).loss.detach()) == pytest.approx(
        float(loss_of(head, ends, alone).loss.detach())
    )


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_starts_per_pass_count_what_the_loss_sums(lengths: list[int]) -> None:
    expected = [sum(1 for n in lengths for m in range(n - 1) if m + j < n - 1) for j in range(PASSES)]
    assert starts_per_pass(lengths, PASSES) == expected


def test_head_learns_a_policy_that_can_be_learnt() -> None:
    generator = torch.Generator().manual_seed(5)
    ends = some_ends()
    tokens_BS = (torch.randint(0, VOCAB, (64, 1), generator=generator) + 5 * torch.arange(12)) % VOCAB
    # The last hidden state says the next token: its output row, after a norm that leaves it as it is.
    following_BS = (tokens_BS + 5) % VOCAB
    lined_up = torch.nn.functional.normalize(ends.lm_head_VH, dim=-1)[following_BS] * 20
    aux = torch.cat([ends.embedding_VH[tokens_BS]] * 3, -1)
    batch = HeadBatch(tokens_BS, aux, lined_up, torch.full((64,), 2), torch.full((64,), 12))
    plain = PolicyEnds(ends.embedding_VH, torch.ones(HIDDEN), torch.nn.functional.normalize(ends.lm_head_VH, dim=-1))
    # At temperature 1 the policy itself gives its best token 0.8 only.
    trainer = DrafterTrainer(a_head(), 1e-2, 1.0, PASSES, Criterion(temperature=0.5))
    history = []
    for _ in range(30):
        trainer.begin(plain, [10] * 64)
        trainer.accumulate(batch)
        history.append(metrics_of([trainer.finish(1e-2)]))
    assert history[-1].loss < history[0].loss / 4
    assert min(history[-1].acceptance_per_position) > 0.9


def test_state_brings_the_optimizer_back() -> None:
    ends, batch = some_ends(), some_states([3, 2], [9, 6])

    def step(trainer: DrafterTrainer) -> float:
        trainer.begin(ends, [6, 4])
        trainer.accumulate(batch)
        return metrics_of([trainer.finish()]).loss

    first, second = (DrafterTrainer(a_head(seed=seed), 1e-2, 1.0, PASSES) for seed in (0, 9))
    step(first)
    second.load_state(first.state())
    assert [step(first), step(first)] == [step(second), step(second)]
    fresh = DrafterTrainer(a_head(seed=3), 1e-2, 1.0, PASSES)
    second.load_state(fresh.state())  # from before its first step
    assert step(second) == step(fresh)


@pytest.mark.filterwarnings("ignore")  # speculators and what it imports warn about themselves
def test_loss_equals_that_of_speculators(tmp_path: Path) -> None:
    batch, ends, head = some_states([1, 1], [9, 9]), some_ends(), a_head()
    theirs = speculators_loss(tmp_path, head, ends, batch)
    totals = starts_per_pass([8, 8], PASSES)
    ours = training_time_test(head, ends, pack(batch), totals)
    for j in range(PASSES):
        assert float(ours.loss_sums_J[j]) / totals[j] == pytest.approx(theirs[j], rel=1e-5)


def speculators_loss(folder: Path, head: Eagle3Head, ends: PolicyEnds, batch: HeadBatch) -> list[float]:
    """Mean divergence of each pass by speculators' Eagle3DraftModel, sequences packed into one row."""
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
            "verifier_last_hidden_states": batch.last_BSH[:, 1:].reshape(1, -1, HIDDEN),
        }
        found = []
        for sequence in range(sequences):  # a pass that runs past a sequence's end would read the next one's target
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


def test_metrics_count_each_start_once_however_many_updates_saw_it() -> None:
    sequences, lengths = some_states([3, 2, 4], [13, 6, 8]), [10, 4, 4]
    looks = []
    with torch.no_grad():
        for some in ([0, 1, 2], [0], [1, 2]):
            trainer = DrafterTrainer(a_head(), 1e-3, 1.0, PASSES)
            trainer.begin(some_ends(), [lengths[i] for i in some])
            trainer.accumulate(sequences.rows(some))
            looks.append(trainer.measured())
    whole, parts = metrics_of(looks[:1]), metrics_of(looks[1:])
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.acceptance_per_position == pytest.approx(whole.acceptance_per_position, rel=1e-6)


def test_sequences_of_several_passes_are_taught_as_if_they_were_of_one() -> None:
    head, ends = a_head(), some_ends()
    short = some_states([3], [8], padding=4)
    long = some_states([2, 5], [20, 11], seed=3).cut([2, 5], [16, 11])
    together = HeadBatch.joined([short, long])
    assert together.token_ids_BS.shape == (3, 16)
    found = loss_of(head, ends, together)
    alone = [loss_of(head, ends, batch) for batch in (short, long)]
    torch.testing.assert_close(found.loss_sums_J, alone[0].loss_sums_J + alone[1].loss_sums_J)
    torch.testing.assert_close(found.accepted_J, alone[0].accepted_J + alone[1].accepted_J)


def test_learning_rate_of_the_loop_is_whole_for_many_starts_after_the_warm_up() -> None:
    assert online_rate(1e-3, FULL_RATE_STARTS, WARM_UP_UPDATES) == 1e-3
    assert online_rate(1e-3, 10 * FULL_RATE_STARTS, 1000) == 1e-3
    assert online_rate(1e-3, FULL_RATE_STARTS // 16, 1000) == pytest.approx(1e-3 / 4)
    assert online_rate(1e-3, FULL_RATE_STARTS, 0) == pytest.approx(1e-3 / WARM_UP_UPDATES)
    assert online_rate(1e-3, 0, 1000) == 0
