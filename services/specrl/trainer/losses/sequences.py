"""Which tokens of a micro-batch are of one rollout: sums and means over them, [T] to [S], differentiable."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sequences:
    """S = count rollouts of at least one token each. sequence_T: the rollout, from 0, that each token is of."""

    sequence_T: torch.Tensor
    count: int

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """[S] sums over the tokens of each rollout."""
        return values_T.new_zeros(self.count).index_add(0, self.sequence_T, values_T)

    def means(self, values_T: torch.Tensor) -> torch.Tensor:
        """[S] means over the tokens of each rollout."""
        return self.sums(values_T) / self.lengths()

    def lengths(self) -> torch.Tensor:
        """[S] tokens of each rollout."""
        return torch.bincount(self.sequence_T, minlength=self.count)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """[T] the value of its rollout for each token."""
        return values_S[self.sequence_T]
