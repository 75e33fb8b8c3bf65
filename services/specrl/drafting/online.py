"""Trains a drafter online: the multi-pass (training-time test) loss on states of the policy's own forward pass.

Called by the trainer's backend with detached states, so drafter training cannot affect the policy's gradients. The
drafter has its own optimizer and gradient clipping. Every rank holds a replica of the drafter and trains on a share of
the data. One all-reduce of the summed gradients keeps the replicas bitwise equal.

Training computes what drafting computes. A rollout has prompt x_0..x_{P-1} and completion x_P..x_{P+T-1}. vLLM drafts
from (h_t, x_{t+1}) for t >= P-1, and pass j (counted from 0) predicts x_{t+2+j}. The target is the policy's output at
t+1+j. So start m (t = P-1+m) is trained in pass j if m + j < T-1.

The input tokens of later passes are the rollout's own (teacher forcing). Source: EAGLE-3, arXiv 2503.01840, section 3.

`drafter.py` says what a drafter computes. `budget.py` chooses the rollouts of a step and the number of updates.
`criteria.py` has the loss and the acceptance.

Shapes: R packed rows, M starts, K draft vocabulary, E starts that count in a pass, J passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from specrl.drafting import criteria
from specrl.drafting.criteria import DraftCriterion, PolicyTargets
from specrl.drafting.drafter import Drafter
from specrl.drafting.packing import LessonBatch, PackedRows, pack_rows, split_passes
from specrl.drafting.vocabulary import split_rows
from specrl.records import DrafterMetrics

PASS_DECAY = 0.8  # weight of pass j is 0.8^j, as in the EAGLE-3 authors' training code
BETAS = (0.9, 0.95)

# AdamW's step size does not shrink with a noisy gradient. With few starts or fresh moments, updates at the full rate
# would move a good head away faster than the policy changes. Both constants lower the rate then.
FULL_RATE_STARTS = 128  # below so many starts per update, the rate falls with their square root
WARM_UP_UPDATES = 8  # linear warm-up of an optimizer without moments, as for a head that was trained elsewhere


def count_starts(completion_lengths: Sequence[int], passes: int) -> list[int]:
    """Count the starts of each pass over all completions (lengths in tokens); the loss is divided by them."""
    return [sum(max(0, length - 1 - j) for length in completion_lengths) for j in range(passes)]


def scale_learning_rate(learning_rate: float, starts: int, updates: int) -> float:
    """Scale the learning rate for an update on `starts` starts, after `updates` updates by the same optimizer."""
    return learning_rate * min(1.0, math.sqrt(starts / FULL_RATE_STARTS)) * min(1.0, (updates + 1) / WARM_UP_UPDATES)


@dataclass(frozen=True)
class PassSums:
    """Sums over some rows. Entry j of each tensor belongs to pass j.

    loss: differentiable, weighted and normalised. loss_sums_J: the criterion's plain loss, summed over starts.
    alive_J: starts that would still be drafting in pass j, weighted as in `criteria.estimate_acceptance`. For greedy
    drafts a start is alive as long as the drafter's top token was the rollout's own in every pass before.
    accepted_J: of these, those whose draft in pass j the policy accepts.
    """

    loss: torch.Tensor
    loss_sums_J: torch.Tensor
    alive_J: torch.Tensor
    accepted_J: torch.Tensor


def compute_multi_pass_loss(
    drafter: Drafter,
    rows: PackedRows,
    starts_J: Sequence[int],
    criterion: DraftCriterion = DraftCriterion(),  # noqa: B008 - frozen
) -> PassSums:
    """Compute the multi-pass loss: sum over passes j of 0.8^j * (criterion's loss summed over starts) / starts_J[j].

    starts_J: starts of each pass over all ranks, so that summed gradients of all ranks are those of the whole batch.
    Differentiable in the drafter's parameters only.
    """
    meter = _StartMeter(drafter, rows, criterion)
    drafts = drafter.draft_logits(rows, len(starts_J))
    alive_RM = torch.ones(rows.start_RM.shape, device=rows.start_RM.device)
    loss = torch.zeros((), device=rows.start_RM.device)
    sums: list[torch.Tensor] = []
    for j, total in enumerate(starts_J):
        is_counted_RM = rows.select_starts(j)
        if not bool(is_counted_RM.any()):
            # No completion of these rows is long enough, but the result keeps one row per pass.
            sums += [torch.zeros(3, dtype=torch.float64, device=loss.device)]
            continue
        # The target of pass j at a start is j rows after that of pass 0.
        target_E = rows.target_RM[is_counted_RM] + j
        next_E1 = drafter.map_to_draft_ids(rows.gather_starts(rows.token_ids_RW, 2 + j)[is_counted_RM])[:, None]
        loss_E, accepted_E, stays_E = meter.measure_pass(next(drafts), target_E, next_E1)
        loss = loss + PASS_DECAY**j * loss_E.sum() / total
        alive_E = alive_RM[is_counted_RM]
        sums.append(torch.stack([loss_E.detach().double().sum(), alive_E.sum(), (alive_E * accepted_E).double().sum()]))
        alive_RM = alive_RM.masked_scatter(is_counted_RM, (alive_E * stays_E).to(alive_RM.dtype))
    table_J3 = torch.stack(sums)
    return PassSums(loss, table_J3[:, 0], table_J3[:, 1], table_J3[:, 2])


@dataclass(frozen=True)
class _StartMeter:
    """Compares the logits of starts with the policy's, which makes several float32 matrices as wide as the logits."""

    drafter: Drafter
    rows: PackedRows
    criterion: DraftCriterion

    def measure_pass(
        self, draft_EK: torch.Tensor, target_E: torch.Tensor, next_E1: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the loss [E] of each start, differentiable, and both results [E] of `criteria.estimate_acceptance`.

        target_E: rows of the starts' targets in target_NK. next_E1: the rollout's tokens, as draft ids. A few starts at
        a time, which a backward pass computes again; each start's values are the same bits as those of all at once.
        """
        sizes = [chunk.stop - chunk.start for chunk in split_rows(*draft_EK.shape)]
        if len(sizes) == 1:
            return self._measure_chunk(draft_EK, target_E, next_E1)
        chunks = zip(draft_EK.split(sizes), target_E.split(sizes), next_E1.split(sizes), strict=True)
        parts = [checkpoint(self._measure_chunk, *chunk, use_reentrant=False) for chunk in chunks]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def _measure_chunk(
        self, draft_EK: torch.Tensor, target_E: torch.Tensor, next_E1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shard = self.drafter.vocabulary
        wanted = self._compute_targets(target_E)
        draft_EK = shard.mask_padding(draft_EK.to(wanted.share_EK.dtype))
        loss_E = criteria.compute_loss(self.criterion, draft_EK, wanted, shard)
        # For metrics, without gradients: how many starts are accepted, and how many reach the next pass.
        return loss_E, *criteria.estimate_acceptance(self.criterion, draft_EK.detach(), wanted, next_E1, shard)

    @torch.no_grad()
    def _compute_targets(self, target_E: torch.Tensor) -> PolicyTargets:
        logits_EK = self.rows.target_NK[target_E]
        if logits_EK.dtype == torch.bfloat16:
            logits_EK = logits_EK.float()  # bfloat16 is too coarse for softmax and KL
        normaliser_E = self.rows.normaliser_N1[target_E, 0] if self.drafter.is_reduced else None
        shard = self.drafter.vocabulary
        return criteria.compute_targets(shard.mask_padding(logits_EK), self.criterion.temperature, normaliser_E, shard)


@dataclass(frozen=True)
class UpdateResult:
    """The result of one update or one measurement, summed over all ranks.

    sums_J3: loss, alive and accepted starts per pass, as in `PassSums`. starts_J: starts per pass.
    grad_norm: before clipping; 0 for a measurement. seconds: computation time of this rank.
    """

    sums_J3: torch.Tensor
    starts_J: Sequence[int]
    grad_norm: float
    seconds: float


def combine_updates(updates: Sequence[UpdateResult]) -> DrafterMetrics:
    """Combine several updates into metrics. Each start counts once; the gradient norm is the mean over updates."""
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
    """Trains a drafter in updates.

    Each update is a call of `begin_update`, one or more of `accumulate_gradients`, and one of `finish_update`.

    To measure without training, disable gradients and call `finish_measurement` at the end.
    """

    def __init__(
        self,
        model: Drafter,
        learning_rate: float,
        clip_norm: float,
        passes: int,
        criterion: DraftCriterion = DraftCriterion(),  # noqa: B008 - frozen
    ) -> None:
        self.model = model
        self.learning_rate = learning_rate
        self.clip_norm = clip_norm
        self.passes = passes
        self.criterion = criterion
        # Fused AdamW for float32 drafters; other precisions use PyTorch's default implementation.
        is_fused = next(model.parameters()).dtype == torch.float32
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=is_fused
        )

    def begin_update(self, completion_lengths: Sequence[int], criterion: DraftCriterion | None = None) -> None:
        """Start an update. completion_lengths: in tokens, over all ranks. criterion: None for the trainer's own."""
        self.update_criterion = criterion or self.criterion
        self.starts_J = count_starts(completion_lengths, self.passes)
        self.sums_J3 = torch.zeros(self.passes, 3, dtype=torch.float64, device=next(self.model.parameters()).device)
        self.seconds = 0.0
        self.optimizer.zero_grad()

    def accumulate_gradients(self, batch: LessonBatch) -> None:
        """Add the gradients and sums of some sequences. With gradients disabled only the sums are added."""
        started = time.perf_counter()
        for chosen in split_passes(batch, self.model.limits):
            self._accumulate_pass(batch.select_sequences(chosen))
        self.seconds += time.perf_counter() - started

    def _accumulate_pass(self, batch: LessonBatch) -> None:
        longest = int((batch.lengths_B - batch.prompt_lengths_B).max()) - 1
        if longest > 0:
            is_bf16 = batch.aux_BSA.dtype == torch.bfloat16
            with torch.autocast(batch.aux_BSA.device.type, torch.bfloat16, enabled=is_bf16):
                starts_J = [max(1, n) for n in self.starts_J]  # a pass without starts has a loss of 0
                sums = compute_multi_pass_loss(self.model, pack_rows(batch), starts_J, self.update_criterion)
            if torch.is_grad_enabled():
                torch.autograd.backward(sums.loss)
            self.sums_J3 += torch.stack([sums.loss_sums_J, sums.alive_J, sums.accepted_J], 1)

    def finish_update(self, learning_rate: float | None = None, group: dist.ProcessGroup | None = None) -> UpdateResult:
        """Sum gradients over `group`, clip them, and step the optimizer.

        If the gradient norm is not finite the step is skipped; the returned norm shows it.

        learning_rate: None computes the rate of an update in the RL loop, see `scale_learning_rate`.
        """
        started = time.perf_counter()
        parameters = list(self.model.parameters())
        for weight in parameters:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)  # this rank had no data; all ranks must join the all-reduce
        self._drop_repetitions(parameters)
        if group is not None and dist.get_world_size(group) > 1:
            self._all_reduce(parameters, group)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm))
        if learning_rate is None:
            learning_rate = scale_learning_rate(self.learning_rate, self.starts_J[0], self._count_updates())
        for settings in self.optimizer.param_groups:
            settings["lr"] = learning_rate
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - started
        return UpdateResult(self.sums_J3, self.starts_J, norm, self.seconds)

    def _count_updates(self) -> int:
        """Number of steps that the optimizer has made."""
        return int(next((state["step"] for state in self.optimizer.state.values() if "step" in state), 0))

    def finish_measurement(self, group: dist.ProcessGroup | None = None) -> UpdateResult:
        """End a measurement: sum over `group` what was accumulated without gradients."""
        self._drop_repetitions()
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(self.sums_J3, group=group)
        return UpdateResult(self.sums_J3, self.starts_J, 0.0, self.seconds)

    def _drop_repetitions(self, parameters: Sequence[torch.nn.Parameter] = ()) -> None:
        """Set gradients and sums to 0 at ranks that have the same ones as another rank, so that each counts once."""
        if not self.model.vocabulary.is_first:
            self.sums_J3.zero_()
            for weight in parameters:
                if weight.grad is not None:
                    weight.grad.zero_()

    def _all_reduce(self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        # One collective for all gradients instead of one per tensor.
        flat = torch.cat([weight.grad.flatten() for weight in parameters if weight.grad is not None])
        dist.all_reduce(flat, group=group)
        dist.all_reduce(self.sums_J3, group=group)
        pieces = torch.split(flat, [weight.numel() for weight in parameters])
        for weight, piece in zip(parameters, pieces, strict=True):
            weight.grad = piece.view_as(weight)

    def collect_state(self) -> dict[str, torch.Tensor]:
        """Collect weights (float32), optimizer moments and draft vocabulary for a checkpoint."""
        found = {f"head.{name}": tensor for name, tensor in self.model.collect_tensors(torch.float32).items()}
        for name, weight in self.model.named_parameters():
            for key, value in self.optimizer.state[weight].items():
                found[f"optimizer.{key}.{name}"] = value
        return found

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what `collect_state` returned. Raises CheckpointInvalid if it belongs to another head."""
        prefix = "head."
        self.model.load_tensors({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})
        for name, weight in self.model.named_parameters():
            found = {key: state.get(f"optimizer.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if any(value is None for value in found.values()):
                self.optimizer.state.pop(weight, None)  # the checkpoint is from before the first update
                continue
            self.optimizer.state[weight] = {k: v.clone().to(weight.device) for k, v in found.items() if v is not None}
