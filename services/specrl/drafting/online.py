"""Keeps the drafter in step with the policy: multi-pass (training-time test) loss on the policy's own hidden states.

Called by the trainer's backend with hidden states that its forward pass left behind, detached; so nothing here can
reach the policy's gradients. The head has its own optimizer and clip. It is replicated on all ranks and its data are
dealt to all of them; one all-reduce of the summed gradients keeps the replicas equal, bit for bit.

What is trained is what is used. A rollout has prompt x_0..x_{P-1} and completion x_P..x_{P+T-1}. vLLM drafts from
(h_t, x_{t+1}) for t >= P-1, and pass j (from 0) then predicts x_{t+2+j}; the policy's word on that token is its output
at t+1+j. So start m (t = P-1+m) is trained in pass j if m + j < T-1. Pass 0 attends to pass 0 at all positions <= t,
as vLLM's drafter does to verified tokens; pass j in addition to its own passes 1..j at t, which is how drafted tokens
see each other. Tokens of later passes are the rollout's own (teacher forcing). EAGLE-3, arXiv 2503.01840, section 3.

`budget.py` decides which rollouts of a step are used, in how many updates; `criteria.py` says what is minimised, and
what acceptance is.

Shapes: R packed rows, W tokens, M starts, H hidden, G key/value groups, Q query heads of one group, N = G * Q, D head
size, X anything, V policy vocabulary, K draft vocabulary, E starts that count in a pass, J passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from specrl.drafting import criteria
from specrl.drafting.criteria import Criterion, Targets
from specrl.drafting.head import Eagle3Head, rotate
from specrl.drafting.packing import HeadBatch, PackedRows, pack
from specrl.records import DrafterMetrics

PASS_DECAY = 0.8  # weight of pass j is 0.8^j, as in the EAGLE-3 authors' training code
BETAS = (0.9, 0.95)
# A gradient is the noisier the fewer starts it is of, and AdamW makes every update as long as the learning rate: small
# batches and fresh moments would push a good head off its place faster than the policy moves.
FULL_RATE_STARTS = 128  # of an update with fewer starts the learning rate falls with their square root
WARM_UP_UPDATES = 8  # of an optimizer without moments, as a head that was trained elsewhere has
BLOCK_STARTS = 1024  # attention of more starts than this is computed in blocks, and again in the backward pass


@dataclass(frozen=True)
class PolicyEnds:
    """Frozen copies of the present policy's embedding [V, H], final norm [H] and output layer [V, H]."""

    embedding_VH: torch.Tensor
    norm_H: torch.Tensor
    lm_head_VH: torch.Tensor


def starts_per_pass(completion_lengths: Sequence[int], passes: int) -> list[int]:
    """How many starts count in each pass, over all rollouts of a step: what the loss is normalised by."""
    return [sum(max(0, length - 1 - j) for length in completion_lengths) for j in range(passes)]


def online_rate(learning_rate: float, starts: int, updates: int) -> float:
    """Learning rate of an update on so many starts, after so many by the same optimizer."""
    return learning_rate * min(1.0, math.sqrt(starts / FULL_RATE_STARTS)) * min(1.0, (updates + 1) / WARM_UP_UPDATES)


@dataclass(frozen=True)
class PassSums:
    """Of some rows, per pass j: what was minimised, starts still alive, and how many of those pass j keeps alive.

    A start is alive in pass j with the probability that the policy's own tokens are what was drafted and accepted in
    the passes before it; of greedy drafts that is 1 while the head's top token was the rollout's, and 0 after that.
    """

    loss: torch.Tensor
    loss_sums_J: torch.Tensor
    alive_J: torch.Tensor
    accepted_J: torch.Tensor


def training_time_test(
    head: Eagle3Head,
    ends: PolicyEnds,
    rows: PackedRows,
    starts_J: Sequence[int],
    criterion: Criterion = Criterion(),  # noqa: B008 - frozen
) -> PassSums:
    """Multi-pass loss: sum over passes j of 0.8^j * the criterion's loss summed over starts / starts_J[j].

    Differentiable in the head's parameters alone.
    """
    hidden_RWH = head.fc(rows.aux_RWA.to(head.fc.weight.dtype))
    next_ids_RW = functional.pad(rows.token_ids_RW[:, 1:], (0, 1))
    input_RWX = head.qkv_input(functional.embedding(next_ids_RW, ends.embedding_VH), hidden_RWH)
    attention = _Attention(head, rows)
    attention.remember_context(input_RWX)

    wanted, number_RM = _targets(head, ends, rows, criterion.temperature)
    hidden_RMH, input_RMX = _take(hidden_RWH, rows.start_RM), _take(input_RWX, rows.start_RM)
    alive_RM = torch.ones(rows.start_RM.shape, device=rows.start_RM.device)
    loss = torch.zeros((), device=rows.start_RM.device)
    sums: list[torch.Tensor] = []
    for j, total in enumerate(starts_J):
        is_counted_RM = rows.room_RM > j
        if not bool(is_counted_RM.any()):
            sums += [torch.zeros(3, dtype=torch.float64, device=loss.device)]
            continue
        if j > 0:
            input_RMX = head.qkv_input(functional.embedding(_token(rows, 1 + j), ends.embedding_VH), hidden_RMH)
        hidden_RMH = head.after_attention(attention(input_RMX, j), hidden_RMH)
        draft_EK = head.logits(hidden_RMH[is_counted_RM]).to(wanted.share_EK.dtype)
        # The policy's word on pass j of a start is that on pass 0 of the start j places later.
        answers = wanted.take(number_RM.roll(-j, 1)[is_counted_RM])
        loss_E = criteria.loss(criterion, draft_EK, answers)
        loss = loss + PASS_DECAY**j * loss_E.sum() / total
        next_E1 = head.draft_index(_token(rows, 2 + j)[is_counted_RM])[:, None]
        accepted_E, stays_E = criteria.acceptance(criterion, draft_EK.detach(), answers, next_E1)
        alive_E = alive_RM[is_counted_RM]
        sums.append(torch.stack([loss_E.detach().double().sum(), alive_E.sum(), (alive_E * accepted_E).double().sum()]))
        alive_RM = alive_RM.masked_scatter(is_counted_RM, (alive_E * stays_E).to(alive_RM.dtype))
    table_J3 = torch.stack(sums)
    return PassSums(loss, table_J3[:, 0], table_J3[:, 1], table_J3[:, 2])


def _take(x_RWX: torch.Tensor, index_RM: torch.Tensor) -> torch.Tensor:
    """The starts' places [R, M, X] of [R, W, X]."""
    return x_RWX.gather(1, index_RM[:, :, None].expand(-1, -1, x_RWX.shape[2]))


def _token(rows: PackedRows, ahead: int) -> torch.Tensor:
    """The token [R, M] so many places after each start; any token where the row ends before."""
    return rows.token_ids_RW.gather(1, (rows.start_RM + ahead).clamp(max=rows.token_ids_RW.shape[1] - 1))


@torch.no_grad()
def _targets(head: Eagle3Head, ends: PolicyEnds, rows: PackedRows, temperature: float) -> tuple[Targets, torch.Tensor]:
    """The policy's word one token after each start that counts, and each start's number among those [R, M]."""
    is_counted_RM = rows.room_RM > 0
    index_RM = (rows.start_RM + 1).clamp(max=rows.last_RWH.shape[1] - 1)
    last_EH = _take(rows.last_RWH, index_RM)[is_counted_RM].to(ends.norm_H.dtype)
    epsilon = head.config.policy.norm_epsilon
    logits_EV = functional.rms_norm(last_EH, (last_EH.shape[-1],), ends.norm_H, epsilon) @ ends.lm_head_VH.T
    if logits_EV.dtype == torch.bfloat16:
        logits_EV = logits_EV.float()
    number_RM = (is_counted_RM.flatten().cumsum(0) - 1).view_as(is_counted_RM)
    return criteria.targets(logits_EV, head.draft_ids_K, temperature), number_RM


class _Attention:
    """The head's attention over all passes: pass 0 is the context of every later one."""

    def __init__(self, head: Eagle3Head, rows: PackedRows) -> None:
        self.projections = head.midlayer.self_attn
        shape = head.config.shape
        self.groups, self.dim, self.theta = shape.num_groups, shape.head_dim, shape.rope_theta
        self.rows = rows
        self.start_position_RM = rows.position_RW.gather(1, rows.start_RM)
        self.own_keys: list[torch.Tensor] = []
        self.own_values: list[torch.Tensor] = []

    def remember_context(self, input_RWX: torch.Tensor) -> None:
        """Keys and values [R, G, W, D] of pass 0 at every position, prompts included."""
        self.key_RGWD = rotate(self._split(self.projections.k_proj(input_RWX)), self.rows.position_RW, self.theta)
        self.value_RGWD = self._split(self.projections.v_proj(input_RWX))

    def __call__(self, input_RMX: torch.Tensor, step: int) -> torch.Tensor:
        """Attend from pass `step` at the starts; returns [R, M, heads * D]."""
        position_RM = self.start_position_RM + step
        query_RNMD = rotate(self._split(self.projections.q_proj(input_RMX)), position_RM, self.theta)
        if step > 0:
            self.own_keys.append(rotate(self._split(self.projections.k_proj(input_RMX)), position_RM, self.theta))
            self.own_values.append(self._split(self.projections.v_proj(input_RMX)))
        # As it is now: blocks are computed again in the backward pass, when later passes have been added.
        own = tuple(zip(self.own_keys, self.own_values, strict=True))
        rows, heads, starts, dim = query_RNMD.shape
        query_RGQMD = query_RNMD.view(rows, self.groups, heads // self.groups, starts, dim)
        if starts <= BLOCK_STARTS:
            out_RGQMD = self._attend(query_RGQMD, 0, own)
        else:
            blocks = [
                checkpoint(
                    self._attend, query_RGQMD[..., first : first + BLOCK_STARTS, :], first, own, use_reentrant=False
                )
                for first in range(0, starts, BLOCK_STARTS)
            ]
            out_RGQMD = torch.cat(blocks, -2)
        return out_RGQMD.reshape(rows, heads, starts, dim).transpose(1, 2).flatten(2)

    def _attend(
        self, query_RGQMD: torch.Tensor, first: int, own: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    ) -> torch.Tensor:
        """Softmax over each start's own sequence up to the start, and over the passes of the start itself."""
        rows, groups, repeats, starts, dim = query_RGQMD.shape
        cut = slice(first, first + starts)
        score_RGXW = query_RGQMD.flatten(2, 3) @ self.key_RGWD.transpose(-1, -2)
        width = score_RGXW.shape[-1]
        score_RGQMW = score_RGXW.view(rows, groups, repeats, starts, width)
        place_W = torch.arange(width, device=score_RGXW.device)
        start_RM1, first_RM1 = self.rows.start_RM[:, cut, None], self.rows.first_RM[:, cut, None]
        is_hidden_RMW = (place_W > start_RM1) | (place_W < first_RM1)
        parts = [score_RGQMW.masked_fill(is_hidden_RMW[:, None, None], -math.inf)]
        parts += [(query_RGQMD * key[:, :, None, cut]).sum(-1, keepdim=True) for key, _ in own]
        score = torch.cat(parts, -1) / math.sqrt(dim)
        weight = score.softmax(-1, dtype=torch.float64 if score.dtype == torch.float64 else torch.float32)
        weight = weight.to(query_RGQMD.dtype)
        out_RGXD = weight[..., :width].flatten(2, 3) @ self.value_RGWD
        out_RGQMD: torch.Tensor = out_RGXD.view(rows, groups, repeats, starts, dim)
        for i, (_, value) in enumerate(own):
            out_RGQMD = out_RGQMD + weight[..., width + i, None] * value[:, :, None, cut]
        return out_RGQMD

    def _split(self, x_RWX: torch.Tensor) -> torch.Tensor:
        """[R, W, heads * D] -> [R, heads, W, D]."""
        return x_RWX.view(*x_RWX.shape[:2], -1, self.dim).transpose(1, 2)


@dataclass(frozen=True)
class Update:
    """What one update, or one look, saw over all ranks: sums_J3 as in `PassSums`, starts_J, and the gradient's norm.

    seconds: of this rank.
    """

    sums_J3: torch.Tensor
    starts_J: Sequence[int]
    grad_norm: float
    seconds: float


def metrics_of(updates: Sequence[Update]) -> DrafterMetrics:
    """Of all that these saw, each start counting once; the gradient's norm is their mean."""
    loss_J, alive_J, accepted_J = torch.stack([update.sums_J3 for update in updates]).sum(0).T.tolist()
    starts_J = [sum(counts) for counts in zip(*(update.starts_J for update in updates), strict=True)]
    return DrafterMetrics(
        loss=sum(PASS_DECAY**j * loss_J[j] / max(1, count) for j, count in enumerate(starts_J)),
        grad_norm=fmean(update.grad_norm for update in updates),
        acceptance_per_position=tuple(
            kept / alive if alive else 0.0 for kept, alive in zip(accepted_J, alive_J, strict=True)
        ),
        seconds=sum(update.seconds for update in updates),
    )


class DrafterTrainer:
    """A head, its optimizer, and one update after another: `begin`, `accumulate` some sequences, `finish`.

    `measured` instead of `finish` ends what looks and does not learn.
    """

    def __init__(
        self,
        head: Eagle3Head,
        learning_rate: float,
        clip_norm: float,
        passes: int,
        criterion: Criterion = Criterion(),  # noqa: B008 - frozen
    ) -> None:
        self.head = head
        self.learning_rate, self.clip_norm, self.passes = learning_rate, clip_norm, passes
        self.criterion = criterion
        is_fused = next(head.parameters()).dtype == torch.float32
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=is_fused
        )

    def begin(self, ends: PolicyEnds, completion_lengths: Sequence[int], criterion: Criterion | None = None) -> None:
        """Start an update on completions of these lengths, over all ranks; `ends` are of the states' version."""
        self.ends, self.now = ends, criterion or self.criterion
        self.starts_J = starts_per_pass(completion_lengths, self.passes)
        self.sums_J3 = torch.zeros(self.passes, 3, dtype=torch.float64, device=ends.norm_H.device)
        self.seconds = 0.0
        self.optimizer.zero_grad()

    def accumulate(self, batch: HeadBatch) -> None:
        """Add the gradients of some sequences, unless gradients are off; their sums count in any case."""
        started = time.perf_counter()
        longest = int((batch.lengths_B - batch.prompt_lengths_B).max()) - 1
        if longest > 0:
            is_bf16 = self.ends.embedding_VH.dtype == torch.bfloat16
            with torch.autocast(batch.aux_BSA.device.type, torch.bfloat16, enabled=is_bf16):
                starts_J = [max(1, n) for n in self.starts_J]
                sums = training_time_test(self.head, self.ends, pack(batch), starts_J, self.now)
            if torch.is_grad_enabled():
                torch.autograd.backward(sums.loss)
            self.sums_J3 += torch.stack([sums.loss_sums_J, sums.alive_J, sums.accepted_J], 1)
        self.seconds += time.perf_counter() - started

    def finish(self, learning_rate: float | None = None, group: dist.ProcessGroup | None = None) -> Update:
        """Sum gradients over `group`, clip, step. A gradient that is not finite is dropped, and its norm shows it.

        learning_rate: of this update; None for that of one within the RL loop.
        """
        started = time.perf_counter()
        parameters = list(self.head.parameters())
        for weight in parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        if group is not None and dist.get_world_size(group) > 1:
            self._all_reduce(parameters, group)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm))
        if learning_rate is None:
            learning_rate = online_rate(self.learning_rate, self.starts_J[0], self._updates())
        for settings in self.optimizer.param_groups:
            settings["lr"] = learning_rate
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - started
        return Update(self.sums_J3, self.starts_J, norm, self.seconds)

    def _updates(self) -> int:
        """How many the optimizer has made."""
        return int(next((state["step"] for state in self.optimizer.state.values() if "step" in state), 0))

    def measured(self, group: dist.ProcessGroup | None = None) -> Update:
        """Sum over `group` what was accumulated without gradients."""
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(self.sums_J3, group=group)
        return Update(self.sums_J3, self.starts_J, 0.0, self.seconds)

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
