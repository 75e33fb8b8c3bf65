"""The columns of the policy's vocabulary that this rank's logits have: all of them, or those of one tensor rank.

A drafter that drafts by the policy's own output layer has only the columns of its tensor rank, as the policy does. All
ranks of a tensor group then work on the same starts, each with its columns. Every method that needs the others is a
collective of that group, and returns the same at all of its ranks.

Also splits logits into chunks of rows, since several float32 matrices of all rows would not fit into memory.

Called by `criteria.py` and `online.py`, by drafters whose logits are so divided, and for the policy's logits.

Shapes: E positions, W columns of this rank.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Of one float32 matrix of logits that is in work; there are a few at once. Large enough to keep a GPU busy.
CHUNK_BYTES = 256 * 2**20

PADDING = -1e30  # logit of a padded column: its probability is 0, and unlike -inf, 0 times it is 0


def split_rows(rows: int, columns: int) -> list[slice]:
    """Split the rows of a matrix into chunks of about equal size, of at most `CHUNK_BYTES` of float32 each."""
    most = max(1, CHUNK_BYTES // (4 * columns))
    count = max(1, -(-rows // most))
    # Equal sizes: torch sums a lone row of a matrix in another order.
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(first, end) for first, end in itertools.pairwise(ends)]


class _SumOverRanks(torch.autograd.Function):
    """Sums over the ranks. Every rank differentiates the same sum, so the gradient of its own part is passed on."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


@dataclass(frozen=True)
class VocabularyShard:
    """Columns of the vocabulary: `first` and the following.

    size: tokens of the vocabulary; a column beyond is padding. group: the ranks that have the other columns; None if
    this rank has all.
    """

    first: int = 0
    size: int | None = None
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all that have the same results."""
        return self.group is None or dist.get_rank(self.group) == 0

    def share_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return x unchanged, and sum the gradients that the ranks compute with their own columns.

        For what every rank has alike, such as the input of the output layer.
        """
        if self.group is None or not x.requires_grad:
            return x
        shared = x.view_as(x)
        shared.register_hook(self._sum_gradients)
        return shared

    def _sum_gradients(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def mask_padding(self, logits_EW: torch.Tensor) -> torch.Tensor:
        """Give padded columns a probability of 0."""
        if self.size is None or self.first + logits_EW.shape[-1] <= self.size:
            return logits_EW
        is_padding_W = torch.arange(logits_EW.shape[-1], device=logits_EW.device) >= self.size - self.first
        return logits_EW.masked_fill(is_padding_W, PADDING)

    def sum_columns(self, x_EW: torch.Tensor) -> torch.Tensor:
        """Sum over all columns; returns [E]. Differentiable."""
        sum_E = x_EW.sum(-1)
        if self.group is None:
            return sum_E
        total_E: torch.Tensor = _SumOverRanks.apply(sum_E, self.group)  # type: ignore[no-untyped-call]
        return total_E

    def logsumexp(self, logits_EW: torch.Tensor) -> torch.Tensor:
        """Compute the log of the normaliser; returns [E]. Differentiable."""
        if self.group is None:
            return logits_EW.logsumexp(-1)
        top_E1 = self._max_columns(logits_EW.detach())[:, None]
        return self.sum_columns((logits_EW - top_E1).exp()).log() + top_E1[:, 0]

    def log_softmax(self, logits_EW: torch.Tensor) -> torch.Tensor:
        """Compute log-probabilities [E, W] of this rank's columns. Differentiable."""
        if self.group is None:
            return logits_EW.log_softmax(-1)
        # Every rank uses the normaliser for its own columns, so its gradient is the sum of all ranks'.
        return logits_EW - self.share_input(self.logsumexp(logits_EW))[:, None]

    def softmax(self, logits_EW: torch.Tensor) -> torch.Tensor:
        """Compute probabilities [E, W] of this rank's columns. Differentiable."""
        return logits_EW.softmax(-1) if self.group is None else self.log_softmax(logits_EW).exp()

    @torch.no_grad()
    def find_top(self, logits_EW: torch.Tensor) -> torch.Tensor:
        """Find the column [E, 1] with the largest logit, counted over all ranks. Of equal ones, the first."""
        if self.group is None:
            return logits_EW.argmax(-1, keepdim=True)
        top_E = self._max_columns(logits_EW)
        own_E = logits_EW.argmax(-1) + self.first
        is_here_E = logits_EW.max(-1).values == top_E
        column_E = own_E.where(is_here_E, torch.iinfo(torch.int64).max)
        dist.all_reduce(column_E, dist.ReduceOp.MIN, group=self.group)
        return column_E[:, None]

    def gather_columns(self, x_EW: torch.Tensor, column_E1: torch.Tensor) -> torch.Tensor:
        """Gather the value [E, 1] of one column of each row, numbered over all ranks. Not differentiable."""
        if self.group is None:
            return x_EW.gather(1, column_E1)
        local_E1 = column_E1 - self.first
        is_here_E1 = (local_E1 >= 0) & (local_E1 < x_EW.shape[1])
        own_E1 = x_EW.gather(1, local_E1.clamp(0, x_EW.shape[1] - 1)).where(is_here_E1, 0)
        dist.all_reduce(own_E1, group=self.group)
        return own_E1

    def _max_columns(self, x_EW: torch.Tensor) -> torch.Tensor:
        top_E = x_EW.max(-1).values
        dist.all_reduce(top_E, dist.ReduceOp.MAX, group=self.group)
        return top_E


WHOLE = VocabularyShard()


@dataclass(frozen=True)
class PolicyOutput:
    """The policy's output layer, for a drafter that drafts by it. It is read and never trained by the drafter.

    shard: the columns of this rank. weight: its rows [W, H] of the layer, as they are now; None at stages without it.
    """

    shard: VocabularyShard
    weight: torch.Tensor | None
