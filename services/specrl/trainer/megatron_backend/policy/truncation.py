"""Restricts a micro-batch's logits to the tokens that top-p and top-k left the sampler.

The sampler drew each token from the probabilities of its sampling set, renormalised. With all other logits at -inf, the
softmax is the same distribution under the trainer's weights: log p(t) = logit(t) - logsumexp over the set. Gradients go
through the normaliser, and are 0 outside of the set. So log-probabilities and entropies need no code of their own, with
tensor parallelism too: each rank masks its own columns.

Called by `tensors.py` and `distributions.py`.

Shapes: T sampled tokens of a micro-batch, L of them on this context parallel rank; M ids of their sets; W columns of
the vocabulary on this tensor parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specrl.records import TrainRollout


@dataclass(frozen=True)
class SetMask:
    """The sampling sets of a micro-batch, on this context parallel rank.

    row_M: index into [L] of each id's sampled token. id_M: the ids. is_whole_L: whether a token was drawn from the
    whole vocabulary, since its rollout has no sets.
    """

    row_M: torch.Tensor
    id_M: torch.Tensor
    is_whole_L: torch.Tensor

    def select_rows(self, rows: slice) -> SetMask:
        """Select the sets of consecutive sampled tokens. rows: of [L], with both ends."""
        is_here_M = (self.row_M >= rows.start) & (self.row_M < rows.stop)
        return SetMask(self.row_M[is_here_M] - rows.start, self.id_M[is_here_M], self.is_whole_L[rows])

    def mask_outside(self, logits_LW: torch.Tensor, first_column: int) -> torch.Tensor:
        """Set logits outside of the sets to -inf, in place, and return them.

        first_column: the id of this rank's first column.
        """
        columns = logits_LW.shape[1]
        column_M = self.id_M - first_column
        is_mine_M = (column_M >= 0) & (column_M < columns)
        is_outside_LW = (~self.is_whole_L)[:, None].repeat(1, columns)
        is_outside_LW[self.row_M[is_mine_M], column_M[is_mine_M]] = False
        return logits_LW.masked_fill_(is_outside_LW, -torch.inf)


def build_set_mask(chosen: Sequence[TrainRollout], sampled_L: torch.Tensor, device: torch.device) -> SetMask | None:
    """Build the mask of a micro-batch; None if none of its rollouts has sampling sets.

    sampled_L: indices into [T] of the tokens whose distributions are on this rank.
    """
    if all(item.rollout.sets is None for item in chosen):
        return None
    sizes: list[np.ndarray] = []
    ids: list[np.ndarray] = []
    for item in chosen:
        sets = item.rollout.sets
        sizes.append(np.zeros(item.rollout.sampled_length, dtype=np.int32) if sets is None else sets.sizes_N)
        if sets is not None:
            ids.append(sets.ids_M)
    sizes_T = torch.from_numpy(np.concatenate(sizes).astype(np.int64))
    id_M = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    # Of the sets of all context parallel ranks, keep those of this rank's tokens.
    row_T = torch.full((len(sizes_T),), -1).index_copy(0, sampled_L, torch.arange(len(sampled_L)))
    row_M = row_T.repeat_interleave(sizes_T)
    is_mine_M = row_M >= 0
    is_whole_L = sizes_T[sampled_L] == 0  # no set is empty, so these tokens' rollouts have none
    return SetMask(row_M[is_mine_M].to(device), id_M[is_mine_M].to(device), is_whole_L.to(device))
