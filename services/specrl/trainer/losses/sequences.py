"""Sums and means over the tokens of each rollout of a micro-batch, differentiable. Used by all losses.

Invariant: every sum, including those in gradients, is taken in a fixed order, so a step can be repeated bit for bit.
`segment_reduce` guarantees this: on a CPU it loops over a rollout's tokens, on a GPU it uses one block of threads
without atomics. `index_add` and the gradient of indexing have a fixed order only while
`torch.use_deterministic_algorithms` is on. The trainer turns that on for GPUs only.

Shapes: T sampled tokens of a micro-batch, S its rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sequences:
    """Rollout to which each token belongs.

    sequence_T: the rollout's number, from 0, ascending. count: rollouts, S. Each has at least one token.
    """

    sequence_T: torch.Tensor
    count: int

    def sum_tokens(self, values_T: torch.Tensor) -> torch.Tensor:
        """Sum the values [T] over the tokens of each rollout. Returns [S]."""
        return _sum_segments(values_T, self.count_tokens())

    def average_tokens(self, values_T: torch.Tensor) -> torch.Tensor:
        """Average the values [T] over the tokens of each rollout. Returns [S]."""
        return self.sum_tokens(values_T) / self.count_tokens()

    def count_tokens(self) -> torch.Tensor:
        """Count the tokens of each rollout [S]."""
        return torch.bincount(self.sequence_T, minlength=self.count)

    def spread_to_tokens(self, values_S: torch.Tensor) -> torch.Tensor:
        """Give each token its rollout's value: [S] to [T]."""
        spread_T: torch.Tensor = _SpreadToTokens.apply(values_S, self.sequence_T, self.count_tokens())  # type: ignore[no-untyped-call]
        return spread_T


class _SpreadToTokens(torch.autograd.Function):
    """values_S[sequence_T], with a gradient whose sums have a fixed order."""

    @staticmethod
    def forward(ctx: Any, values_S: torch.Tensor, sequence_T: torch.Tensor, length_S: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(length_S)
        return values_S[sequence_T]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_T,) = gradients
        return _sum_segments(gradient_T, *ctx.saved_tensors), None, None


def _sum_segments(values_T: torch.Tensor, length_S: torch.Tensor) -> torch.Tensor:
    # unsafe skips the check of the lengths. It would wait for the GPU, and fail for a micro-batch without rollouts.
    return torch.segment_reduce(values_T, "sum", lengths=length_S, unsafe=True)
