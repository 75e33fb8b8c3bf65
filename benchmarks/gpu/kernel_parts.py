"""Parts that compare each fast kernel of the trainer with its reference. Passing on a GPU lets `Auto` use it there.

On CPUs the same comparison runs with what a CPU has: variable-length attention is missing there, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from benchmarks.gpu.part import Figures, PartSkipped, Size, find_bad_rate
from benchmarks.gpu.trainer_parts import time_call

from specrl.errors import first_line
from specrl.trainer.megatron_backend.kernels import fused_swiglu
from specrl.trainer.megatron_backend.kernels.choice import name_device
from specrl.trainer.megatron_backend.kernels.guard import BOUND, Compute, measure_difference
from specrl.trainer.megatron_backend.kernels.varlen_attention import attend_in_one_call
from specrl.trainer.megatron_backend.model.attention import attend_one_by_one


def measure_varlen_attention(size: Size) -> Figures:
    """Compare both ways of attention on packed sequences of log-normal lengths, with grouped queries."""
    device = _find_device()
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(size.choose(64, 8, 4), generator=generator)
    lengths = (size.choose(200, 40, 8) * spread.exp()).clamp(1, size.choose(4096, 256, 32)).int()
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    heads = {"query": 16, "key": 8, "value": 8}
    arguments = [
        torch.randn(int(ends[-1]), count, 128, generator=generator).bfloat16().to(device) for count in heads.values()
    ]
    return _compare_kernel(attend_in_one_call, attend_one_by_one, [*arguments, ends, None])


def measure_fused_swiglu(size: Size) -> Figures:
    """Compare SwiGLU of a dense layer, and of experts with their routers' weights."""
    device = _find_device()
    tokens = size.choose(16384, 1024, 64)
    width = size.choose(3072, 256, 64)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 2 * width, generator=generator).bfloat16().to(device)
    weights = torch.rand(tokens, 1, generator=generator).to(device)
    plain = fused_swiglu.mlp.bias_swiglu_impl
    weighted = fused_swiglu.mlp.weighted_bias_swiglu_impl
    of_experts = _compare_kernel(weighted, fused_swiglu.compute_weighted_swiglu, [x, None, weights, False])
    found = _compare_kernel(plain, fused_swiglu.compute_swiglu, [x, None, False])
    return found | {f"{name}OfExperts": of_experts[name] for name in ("outputDifference", "gradientDifference")}


def _find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _compare_kernel(fast: Compute, reference: Compute, arguments: Sequence[Any]) -> Figures:
    """Measure differences, and seconds of forward and backward. On a GPU the figures name card and torch."""
    found: Figures = {"bound": BOUND}
    if torch.cuda.is_available():
        found |= {"kernelDevice": name_device(), "kernelTorch": torch.__version__}
    try:
        difference = measure_difference(fast, reference, arguments)
    except (ImportError, TypeError) as error:
        raise PartSkipped(f"torch {torch.__version__} lacks this kernel: {first_line(error)}") from error
    except NotImplementedError as error:
        if torch.cuda.is_available():
            raise
        return {**found, "missingOnCpus": first_line(error)}
    found |= {"outputDifference": difference.output, "gradientDifference": difference.gradient}
    leaves = [it.requires_grad_() for it in arguments if isinstance(it, torch.Tensor) and it.is_floating_point()]
    for name, compute in (("fastS", fast), ("referenceS", reference)):
        found[name] = time_call(lambda compute=compute: torch.autograd.grad(compute(*arguments).sum(), leaves))
    return found


def find_kernel_fault(figures: Mapping[str, Any]) -> str | None:
    """Each difference must be within the bound."""
    for name, value in figures.items():
        if "Difference" in name and not value <= BOUND:
            return f"{name} must be at most {BOUND}, got {value}"
    return None if "missingOnCpus" in figures else find_bad_rate(figures, "fastS", "referenceS")
