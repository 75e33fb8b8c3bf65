"""Keeps the drafter in step with the policy: multi-pass (training-time test) loss on the policy's own hidden states.

Called by the trainer's backend with hidden states that its forward pass left behind, detached; so nothing here can
reach the policy's gradients. The head has its own optimizer and clip. It is replicated on all ranks and its data are
dealt to all of them; one all-reduce of the summed gradients keeps the replicas equal, bit for bit.

What is trained is what is used. A rollout has prompt x_0..x_{P-1} and completion x_P..x_{P+T-1}. vLLM drafts from
(h_t, x_{t+1}) for t >= P-1, and pass j (from 0) then predicts x_{t+2+j}; the policy's word on that token is its output
at t+1+j. So start m (t = P-1+m) is trained in pass j if m + j < T-1. Pass 0 attends to pass 0 at all positions <= t,
as vLLM's drafter does to verified tokens; pass j in addition to its own passes 1..j at t, which is how drafted tokens
see each other. Tokens of later passes are the rollout's own (teacher forcing). EAGLE-3, arXiv 2503.01840, section 3.

Shapes: B sequences, S tokens, M starts (the longest completion - 1), H hidden, G key/value groups, R query heads of one
group, D head size, V policy vocabulary, K draft vocabulary, E rows that count in a pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from specrl.drafting.head import Eagle3Head, rotate
from specrl.records import DrafterMetrics

PASS_DECAY = 0.8  # weight of pass j is 0.8^j, as in the EAGLE-3 authors' training code
BETAS = (0.9, 0.95)
BLOCK_STARTS = 1024  # attention of more starts than this is computed in blocks, and again in the backward pass


@dataclass(frozen=True)
class HeadBatch:
    """Sequences with what the policy's forward pass left behind. Right-padded; nothing here carries gradients.

    token_ids_BS [B, S] int64; aux_BSA [B, S, A*H] the auxiliary hidden states side by side; last_BSH [B, S, H]
    the input of the policy's final norm; prompt_lengths_B and lengths_B [B] int64: P, and P + T.
    """

    token_ids_BS: torch.Tensor
    aux_BSA: torch.Tensor
    last_BSH: torch.Tensor
    prompt_lengths_B: torch.Tensor
    lengths_B: torch.Tensor

    def rows(self, chosen: Sequence[int]) -> HeadBatch:
        """Some of the sequences."""
        if len(chosen) == len(self.lengths_B):
            return self
        index = torch.tensor(chosen, dtype=torch.int64, device=self.lengths_B.device)
        return HeadBatch(
            self.token_ids_BS[index],
            self.aux_BSA[index],
            self.last_BSH[index],
            self.prompt_lengths_B[index],
            self.lengths_B[index],
        )


@dataclass(frozen=True)
class PolicyEnds:
    """Frozen copies of the present policy's embedding [V, H], final norm [H] and output layer [V, H]."""

    embedding_VH: torch.Tensor
    norm_H: torch.Tensor
    lm_head_VH: torch.Tensor


def starts_per_pass(completion_lengths: Sequence[int], passes: int) -> list[int]:
    """How many starts count in each pass, over all rollouts of a step: what the loss is normalised by."""
    return [sum(max(0, length - 1 - j) for length in completion_lengths) for j in range(passes)]


@dataclass(frozen=True)
class PassSums:
    """Sums over the rows of one micro-batch, per pass j: loss, starts still right, starts right in pass j too."""

    loss: torch.Tensor
    kl_sums_J: torch.Tensor
    alive_J: torch.Tensor
    right_J: torch.Tensor


def training_time_test(head: Eagle3Head, ends: PolicyEnds, batch: HeadBatch, starts_J: Sequence[int]) -> PassSums:
    """Multi-pass loss: sum over passes j of 0.8^j * KL(policy || head) summed over starts / starts_J[j].

    Differentiable in the head's parameters alone. A start is alive in pass j while the head's top token was the
    policy's in all passes before.
    """
    policy = head.config.policy
    index_BM, room_B = _starts(batch)
    take = _Take(index_BM)
    position_BS = torch.arange(batch.token_ids_BS.shape[1], device=index_BM.device)[None]
    hidden_BSH = head.fc(batch.aux_BSA.to(head.fc.weight.dtype))
    next_ids_BS = functional.pad(batch.token_ids_BS[:, 1:], (0, 1))
    input_BSX = head.qkv_input(functional.embedding(next_ids_BS, ends.embedding_VH), hidden_BSH)
    attention = _Attention(head, policy.rope_theta)
    attention.remember_context(input_BSX, position_BS)

    target_EV, target_row_BM = _targets(ends, policy.norm_epsilon, batch, take, room_B)
    hidden_BMH, input_BMX = take(hidden_BSH), take(input_BSX)
    alive_BM = torch.ones_like(index_BM, dtype=torch.bool)
    steps_M = torch.arange(index_BM.shape[1], device=index_BM.device)
    loss = torch.zeros((), device=index_BM.device)
    sums: list[torch.Tensor] = []
    for j, total in enumerate(starts_J):
        valid_BM = steps_M[None] + j < room_B[:, None]
        if not bool(valid_BM.any()):
            sums += [torch.zeros(3, dtype=torch.float64, device=index_BM.device)]
            continue
        if j > 0:
            token_BM = batch.token_ids_BS.gather(1, (index_BM + 1 + j).clamp(max=batch.token_ids_BS.shape[1] - 1))
            input_BMX = head.qkv_input(functional.embedding(token_BM, ends.embedding_VH), hidden_BMH)
        attended_BMX = attention(input_BMX, index_BM, j)
        hidden_BMH = head.after_attention(attended_BMX, hidden_BMH)
        rows_E = target_row_BM[:, : valid_BM.shape[1]].roll(-j, 1)[valid_BM]
        kl_E, is_right_E = _compare(head, hidden_BMH[valid_BM], target_EV[rows_E])
        loss = loss + PASS_DECAY**j * kl_E.sum() / total
        was_alive_E = alive_BM[valid_BM]
        alive_BM = alive_BM.clone()
        alive_BM[valid_BM] = was_alive_E & is_right_E
        sums.append(torch.stack([kl_E.detach().sum().double(), was_alive_E.sum(), (was_alive_E & is_right_E).sum()]))
    table_J3 = torch.stack(sums)
    return PassSums(loss, table_J3[:, 0], table_J3[:, 1], table_J3[:, 2])


def _starts(batch: HeadBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Position t of each start [B, M] (clamped into the row where a sequence has fewer) and starts per sequence [B]."""
    room_B = batch.lengths_B - batch.prompt_lengths_B - 1
    steps_M = torch.arange(max(1, int(room_B.max())), device=room_B.device)
    index_BM = batch.prompt_lengths_B[:, None] - 1 + steps_M[None]
    return index_BM.clamp(max=batch.token_ids_BS.shape[1] - 1), room_B


class _Take:
    """Picks the starts' rows out of [B, S, X]."""

    def __init__(self, index_BM: torch.Tensor) -> None:
        self.index_BM = index_BM

    def __call__(self, x_BSX: torch.Tensor, shift: int = 0) -> torch.Tensor:
        index_BM = (self.index_BM + shift).clamp(max=x_BSX.shape[1] - 1)
        return x_BSX.gather(1, index_BM[:, :, None].expand(-1, -1, x_BSX.shape[2]))


@torch.no_grad()
def _targets(
    ends: PolicyEnds, epsilon: float, batch: HeadBatch, take: _Take, room_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy's logits [E, V] one token after each start that counts, and each start's row in them [B, M]."""
    steps_M = torch.arange(take.index_BM.shape[1], device=room_B.device)
    valid_BM = steps_M[None] < room_B[:, None]
    last_EH = take(batch.last_BSH, shift=1)[valid_BM].to(ends.norm_H.dtype)
    target_EV = functional.rms_norm(last_EH, (last_EH.shape[-1],), ends.norm_H, epsilon) @ ends.lm_head_VH.T
    row_BM = (valid_BM.flatten().cumsum(0) - 1).view_as(valid_BM)
    return target_EV.float(), row_BM


def _compare(head: Eagle3Head, hidden_EH: torch.Tensor, target_EV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(policy || head) [E] over the draft vocabulary, and whether the head's top token is the policy's [E]."""
    logprob_EK = head.logits(hidden_EH).float().log_softmax(-1)
    drafted_E = head.draft_ids_K[logprob_EK.detach().argmax(-1)]
    is_right_E = drafted_E == target_EV.argmax(-1)
    if head.config.is_reduced:
        target_EV = target_EV[:, head.draft_ids_K]
    wanted_EK = target_EV.log_softmax(-1)
    return functional.kl_div(logprob_EK, wanted_EK, reduction="none", log_target=True).sum(-1), is_right_E


class _Attention:
    """The head's attention over all passes: pass 0 is the context of every later one."""

    def __init__(self, head: Eagle3Head, theta: float) -> None:
        self.projections = head.midlayer.self_attn
        self.groups, self.dim = head.config.policy.num_groups, head.config.policy.head_dim
        self.theta = theta
        self.own_keys: list[torch.Tensor] = []
        self.own_values: list[torch.Tensor] = []

    def remember_context(self, input_BSX: torch.Tensor, position_BS: torch.Tensor) -> None:
        """Keys and values [B, G, S, D] of pass 0 at every position, prompts included."""
        self.key_BGSD = rotate(self._split(self.projections.k_proj(input_BSX)), position_BS, self.theta)
        self.value_BGSD = self._split(self.projections.v_proj(input_BSX))

    def __call__(self, input_BMX: torch.Tensor, start_BM: torch.Tensor, step: int) -> torch.Tensor:
        """Attend from pass `step` at the starts; returns [B, M, heads * D]."""
        position_BM = start_BM + step
        query_BNMD = rotate(self._split(self.projections.q_proj(input_BMX)), position_BM, self.theta)
        if step > 0:
            self.own_keys.append(rotate(self._split(self.projections.k_proj(input_BMX)), position_BM, self.theta))
            self.own_values.append(self._split(self.projections.v_proj(input_BMX)))
        # As it is now: blocks are computed again in the backward pass, when later passes have been added.
        own = tuple(zip(self.own_keys, self.own_values, strict=True))
        batch, heads, starts, dim = query_BNMD.shape
        query_BGRMD = query_BNMD.view(batch, self.groups, heads // self.groups, starts, dim)
        if starts <= BLOCK_STARTS:
            out_BGRMD = self._attend(query_BGRMD, start_BM, 0, own)
        else:
            blocks = [
                checkpoint(
                    self._attend,
                    query_BGRMD[..., first : first + BLOCK_STARTS, :],
                    start_BM[:, first : first + BLOCK_STARTS],
                    first,
                    own,
                    use_reentrant=False,
                )
                for first in range(0, starts, BLOCK_STARTS)
            ]
            out_BGRMD = torch.cat(blocks, -2)
        return out_BGRMD.reshape(batch, heads, starts, dim).transpose(1, 2).flatten(2)

    def _attend(
        self,
        query_BGRMD: torch.Tensor,
        start_BM: torch.Tensor,
        first: int,
        own: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    ) -> torch.Tensor:
        """Softmax over the context up to each start and over the passes of the start itself."""
        batch, groups, repeats, starts, dim = query_BGRMD.shape
        cut = slice(first, first + starts)
        score_BGXS = query_BGRMD.flatten(2, 3) @ self.key_BGSD.transpose(-1, -2)
        context = score_BGXS.shape[-1]
        score_BGRMS = score_BGXS.view(batch, groups, repeats, starts, context)
        is_later_BMS = torch.arange(context, device=start_BM.device)[None, None] > start_BM[:, :, None]
        parts = [score_BGRMS.masked_fill(is_later_BMS[:, None, None], -math.inf)]
        parts += [(query_BGRMD * key[:, :, None, cut]).sum(-1, keepdim=True) for key, _ in own]
        weight = (torch.cat(parts, -1) / math.sqrt(dim)).softmax(-1, dtype=torch.float32).to(query_BGRMD.dtype)
        out_BGXD = weight[..., :context].flatten(2, 3) @ self.value_BGSD
        out_BGRMD: torch.Tensor = out_BGXD.view(batch, groups, repeats, starts, dim)
        for i, (_, value) in enumerate(own):
            out_BGRMD = out_BGRMD + weight[..., context + i, None] * value[:, :, None, cut]
        return out_BGRMD

    def _split(self, x_BSX: torch.Tensor) -> torch.Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]."""
        return x_BSX.view(*x_BSX.shape[:2], -1, self.dim).transpose(1, 2)


class DrafterTrainer:
    """A head, its optimizer, and one step after another: `begin`, `accumulate` for each micro-batch, `finish`."""

    def __init__(self, head: Eagle3Head, learning_rate: float, clip_norm: float, passes: int) -> None:
        self.head = head
        self.learning_rate, self.clip_norm, self.passes = learning_rate, clip_norm, passes
        is_fused = next(head.parameters()).dtype == torch.float32
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=is_fused
        )

    def begin(self, ends: PolicyEnds, completion_lengths: Sequence[int]) -> None:
        """Start a step on rollouts of these lengths, over all ranks; `ends` are of the version that gave the states."""
        self.ends = ends
        self.starts_J = starts_per_pass(completion_lengths, self.passes)
        self.sums_J3 = torch.zeros(self.passes, 3, dtype=torch.float64, device=ends.norm_H.device)
        self.seconds = 0.0
        self.optimizer.zero_grad()

    def accumulate(self, batch: HeadBatch) -> None:
        """Add the gradients of one micro-batch."""
        started = time.perf_counter()
        longest = int((batch.lengths_B - batch.prompt_lengths_B).max()) - 1
        if longest > 0:
            is_bf16 = self.ends.embedding_VH.dtype == torch.bfloat16
            with torch.autocast(batch.aux_BSA.device.type, torch.bfloat16, enabled=is_bf16):
                sums = training_time_test(self.head, self.ends, batch, [max(1, n) for n in self.starts_J])
            torch.autograd.backward(sums.loss)
            self.sums_J3 += torch.stack([sums.kl_sums_J, sums.alive_J, sums.right_J], 1)
        self.seconds += time.perf_counter() - started

    def finish(self, learning_rate: float | None = None, group: dist.ProcessGroup | None = None) -> DrafterMetrics:
        """Sum gradients over `group`, clip, step. A gradient that is not finite is dropped, and the metrics show it."""
        started = time.perf_counter()
        parameters = list(self.head.parameters())
        for weight in parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        if group is not None and dist.get_world_size(group) > 1:
            self._all_reduce(parameters, group)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm))
        for settings in self.optimizer.param_groups:
            settings["lr"] = self.learning_rate if learning_rate is None else learning_rate
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - started
        kl_J, alive_J, right_J = self.sums_J3.T.tolist()
        weights = [PASS_DECAY**j for j in range(self.passes)]
        loss = sum(w * kl / max(1, n) for w, kl, n in zip(weights, kl_J, self.starts_J, strict=True))
        acceptance = tuple(right / alive if alive else 0.0 for right, alive in zip(right_J, alive_J, strict=True))
        return DrafterMetrics(loss, norm, acceptance, self.seconds)

    def _all_reduce(self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        flat = torch.cat([weight.grad.flatten() for weight in parameters if weight.grad is not None])
        dist.all_reduce(flat, group=group)
        dist.all_reduce(self.sums_J3, group=group)
        pieces = torch.split(flat, [weight.numel() for weight in parameters])
        for weight, piece in zip(parameters, pieces, strict=True):
            weight.grad = piece.view_as(weight)

    def state(self) -> dict[str, torch.Tensor]:
        """Weights in float32, optimizer moments and chosen vocabulary, for a checkpoint."""
        found = {f"head.{name}": tensor for name, tensor in self.head.tensors(torch.float32).items()}
        for name, weight in self.head.named_parameters():
            for key, value in self.optimizer.state[weight].items():
                found[f"optimizer.{key}.{name}"] = value
        return found

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take what `state` gave. Raises CheckpointInvalid when it is of another head."""
        prefix = "head."
        self.head.load_tensors({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})
        for name, weight in self.head.named_parameters():
            found = {key: state.get(f"optimizer.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if any(value is None for value in found.values()):
                self.optimizer.state.pop(weight, None)  # saved before the first step
                continue
            self.optimizer.state[weight] = {k: v.clone().to(weight.device) for k, v in found.items() if v is not None}
