"""Which tokens of a micro-batch are of one rollout: sums and means over them, [T] to [S], differentiable.

Every sum, of a gradient too, is taken with `segment_reduce`, which has a fixed order on every device: one loop over a
rollout's tokens on a CPU, one block of threads without atomics on a GPU. The gradients of indexing, and `index_add`,
have such an order only while `torch.use_deterministic_algorithms` is on. The trainer turns that on for GPUs alone, and
the parallel gradient of indexing has no fixed order on a CPU either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sequences:
    """S = count rollouts of at least one token each. sequence_T: the rollout of each token, from 0, ascending."""

    sequence_T: torch.Tensor
    count: int

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """[S] sums over the tokens of each rollout."""
        return _sums(values_T, self.lengths())

    def means(self, values_T: torch.Tensor) -> torch.Tensor:
        """[S] means over the tokens of each rollout."""
        return self.sums(values_T) / self.lengths()

    def lengths(self) -> torch.Tensor:
        """[S] tokens of each rollout."""
        return torch.bincount(self.sequence_T, minlength=self.count)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """[T] the value of its rollout for each token."""
        spread_T: torch.Tensor = _Spread.apply(values_S, self.sequence_T, self.lengths())  # type: ignore[no-untyped-call]
        return spread_T


class _Spread(torch.autograd.Function):
    """values_S[sequence_T], whose gradient is the sum over each rollout's tokens."""

    @staticmethod
    def forward(ctx: Any, values_S: torch.Tensor, sequence_T: torch.Tensor, length_S: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(length_S)
        return values_S[sequence_T]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_T,) = gradients
        return _sums(gradient_T, *ctx.saved_tensors), None, None


def _sums(values_T: torch.Tensor, length_S: torch.Tensor) -> torch.Tensor:
    # unsafe: lengths are not checked, which would wait for the GPU, and fail for a micro-batch without rollouts.
    return torch.segment_reduce(values_T, "sum", lengths=length_S, unsafe=True)
