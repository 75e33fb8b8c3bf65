"""Log-probabilities and entropies of sampled tokens, computed from logits a few rows at a time.

The float32 matrices of a softmax are several times the policy's bf16 logits. For 15,000 tokens and a vocabulary of
150,000, each takes 9 GB. So only the logits exist for all rows at once: a chunk of rows is scaled, measured and
forgotten, and the backward pass scales it again. Gradients take the place of the logits, which nothing needs by then.

Invariant: a row's result does not depend on the rows beside it.

Called by `sharded_policy.py`.

Shapes: L rows, one for each sampled token of this context parallel rank; R rows of a chunk; W columns of the vocabulary
on this tensor parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from specrl.drafting.vocabulary import split_rows
from specrl.trainer.megatron_backend.model.gpt_model import mask_padding
from specrl.trainer.megatron_backend.parallel.groups import GroupPosition
from specrl.trainer.megatron_backend.policy.truncation import SetMask


@dataclass(frozen=True)
class SamplingDistributions:
    """How the policy's logits become the distributions that tokens were sampled from.

    vocab_size: of the model; columns beyond are padding. sets: see `MicroBatch`. tensor: the ranks with other columns.
    """

    temperature: float
    vocab_size: int
    sets: SetMask | None
    tensor: GroupPosition

    def measure_tokens(self, logits_LW: torch.Tensor, target_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probability [L] of each target, differentiable, and the entropy [L] of its distribution.

        Both in nats, float32. target_L: token ids. A collective of the tensor parallel ranks. Differentiating
        overwrites logits_LW with its gradient, so it can be done once.
        """
        found: tuple[torch.Tensor, torch.Tensor] = _MeasureTokens.apply(logits_LW, target_L, self)  # type: ignore[no-untyped-call]
        return found

    def scale_rows(self, logits_LW: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the logits [R, W] of some rows as float32, at the temperature, -inf where no token was sampled."""
        scaled_RW = logits_LW[rows].to(torch.float32, copy=True).div_(self.temperature)
        scaled_RW = mask_padding(scaled_RW, self.vocab_size)
        if self.sets is not None:
            self.sets.select_rows(rows).mask_outside(scaled_RW, self.tensor.rank * scaled_RW.shape[1])
        return scaled_RW

    def locate_targets(self, target_R: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the column [R] of each target on this rank, 0 if another rank has it, and whether this one does."""
        column_R = target_R - self.tensor.rank * columns
        is_here_R = (column_R >= 0) & (column_R < columns)
        return column_R.where(is_here_R, 0), is_here_R


class _Context(Protocol):
    """What autograd passes from forward to backward."""

    sampling: SamplingDistributions
    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...


class _MeasureTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, logits_LW: torch.Tensor, target_L: torch.Tensor, sampling: SamplingDistributions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            _measure_rows(sampling.scale_rows(logits_LW, rows), target_L[rows], sampling)
            for rows in split_rows(*logits_LW.shape)
        ]
        logprob_L, entropy_L, top_L, mass_L = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.sampling = sampling
        ctx.save_for_backward(logits_LW, target_L, top_L, mass_L)
        ctx.mark_non_differentiable(entropy_L)
        return logprob_L, entropy_L

    @staticmethod
    def backward(ctx: _Context, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of log p(t) is [t = target] - p(t), divided by the temperature."""
        logits_LW, target_L, top_L, mass_L = ctx.saved_tensors
        sampling = ctx.sampling
        for rows in split_rows(*logits_LW.shape):
            share_RW = sampling.scale_rows(logits_LW, rows)
            share_RW.sub_(top_L[rows, None]).exp_().div_(mass_L[rows, None])
            column_R, is_here_R = sampling.locate_targets(target_L[rows], share_RW.shape[1])
            share_RW[torch.arange(len(column_R), device=column_R.device), column_R] -= is_here_R.float()
            logits_LW[rows] = share_RW.mul_(-gradients[0][rows, None]).div_(sampling.temperature)
        return logits_LW, None, None


def _measure_rows(
    scaled_RW: torch.Tensor, target_R: torch.Tensor, sampling: SamplingDistributions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities [R], entropies [R], the largest logits [R], and the masses [R]. Overwrites scaled_RW.

    The mass is Z = sum_t exp(logit_t - largest). The entropy is log Z - E[logit - largest].
    """
    top_R = scaled_RW.max(-1).values
    if sampling.tensor.size > 1:
        dist.all_reduce(top_R, dist.ReduceOp.MAX, group=sampling.tensor.group)
    shifted_RW = scaled_RW.sub_(top_R[:, None])
    column_R, is_here_R = sampling.locate_targets(target_R, scaled_RW.shape[1])
    target_logit_R = shifted_RW.gather(1, column_R[:, None])[:, 0].where(is_here_R, 0)
    mass_RW = shifted_RW.exp()
    mass_R = mass_RW.sum(-1)
    # Masked columns have mass 0 and logit -inf, whose product is NaN. The clamp makes it 0.
    weighted_R = shifted_RW.clamp_(min=torch.finfo(torch.float32).min).mul_(mass_RW).sum(-1)
    sums_3R = torch.stack([target_logit_R, mass_R, weighted_R])
    if sampling.tensor.size > 1:
        dist.all_reduce(sums_3R, group=sampling.tensor.group)
    target_logit_R, mass_R, weighted_R = sums_3R
    return target_logit_R - mass_R.log(), mass_R.log() - weighted_R / mass_R, top_R, mass_R
