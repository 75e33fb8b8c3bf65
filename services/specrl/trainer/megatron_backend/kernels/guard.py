"""Runs a fast kernel only after it has agreed with its reference on the run's own numbers.

    COMPARING -> FAST       it agreed in every call of the first micro-batch
              -> REFERENCE  it differed, or torch could not run it; a warning has the numbers

While comparing, each call computes output and gradients both ways, on copies of its arguments. This takes the memory of
one layer twice. Each rank decides alone: no kernel communicates, so ranks may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from specrl.errors import first_line

BOUND = 0.03
"""Largest difference in bfloat16, as a share of the reference's largest absolute value. Both sides round to 8 bits, so
that one rounding is 0.004 or less of the largest value."""

Compute = Callable[..., torch.Tensor]

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class KernelDifference:
    """Largest differences of a kernel from its reference, as shares of the reference's largest absolute value.

    NaN: not known, or one of both is not finite.
    """

    output: float
    gradient: float

    @property
    def is_within_bound(self) -> bool:
        """Whether the kernel agrees. NaN does not."""
        return self.output <= BOUND and self.gradient <= BOUND


class GuardedKernel:
    """Computes by `fast` or by `reference`, two functions of the same arguments that return a tensor."""

    def __init__(self, name: str, fast: Compute, reference: Compute, calls: int) -> None:
        """calls: of the first micro-batch, one for each layer. All of them are compared."""
        self._name = name
        self._fast = fast
        self._reference = reference
        self._calls_to_compare = calls
        self._is_refused = False

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Compute the output of this call."""
        if self._calls_to_compare and not self._is_refused:
            if _is_empty(arguments):  # an expert without tokens shows nothing
                return self._reference(*arguments)
            self._calls_to_compare -= 1
            self._compare_call(arguments)
        # With `recompute: Layers` a later layer may refuse what earlier layers of the same micro-batch have used. Their
        # recomputation by the reference then differs by less than BOUND.
        return (self._reference if self._is_refused else self._fast)(*arguments)

    def _compare_call(self, arguments: Sequence[Any]) -> None:
        reason = ""
        try:
            difference = measure_difference(self._fast, self._reference, arguments)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch has no such kernel for this card, data type or size
            difference = KernelDifference(math.nan, math.nan)
            reason = first_line(error)
        self._is_refused = not difference.is_within_bound
        if self._is_refused:
            log.warning(
                "kernel_refused",
                kernel=self._name,
                output_difference=difference.output,
                gradient_difference=difference.gradient,
                bound=BOUND,
                reason=reason,
                remedy="the run continues with the reference; run the GPU kit (docs/gpu.md) and report its record",
            )
        elif not self._calls_to_compare:
            log.info(
                "kernel_accepted",
                kernel=self._name,
                output_difference=difference.output,
                gradient_difference=difference.gradient,
                bound=BOUND,
            )


def measure_difference(fast: Compute, reference: Compute, arguments: Sequence[Any]) -> KernelDifference:
    """Measure how far `fast` is from `reference`, in the output and in the gradients of its floating-point arguments.

    The gradients are those of half the output's squared norm. Works without gradients around it, too.
    """
    with torch.inference_mode(False), torch.enable_grad():
        expected, leaves = _run(reference, arguments)
        towards = expected.detach()
        expected_gradients = torch.autograd.grad(expected, leaves, towards)
        found, leaves = _run(fast, arguments)
        found_gradients = torch.autograd.grad(found, leaves, towards)
    pairs = zip(found_gradients, expected_gradients, strict=True)
    return KernelDifference(
        _compare(found.detach(), towards), max(_compare(gradient, wanted) for gradient, wanted in pairs)
    )


def _run(compute: Compute, arguments: Sequence[Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute with copies of the tensors. Returns the output, and the copies that have gradients."""
    copies = [
        argument.detach().clone().requires_grad_(argument.is_floating_point())
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in arguments
    ]
    leaves = [copy for copy in copies if isinstance(copy, torch.Tensor) and copy.requires_grad]
    return compute(*copies), leaves


def _is_empty(arguments: Sequence[Any]) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.numel() == 0 for argument in arguments)


def _compare(found: torch.Tensor, expected: torch.Tensor) -> float:
    size = expected.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((found.float() - expected.float()).abs().max() / size)
