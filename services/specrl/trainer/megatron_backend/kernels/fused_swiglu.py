"""SwiGLU as one compiled function, in dense layers and in experts.

Megatron's unfused code runs four kernels and keeps five numbers for each of an MLP's inner columns until the backward
pass. `megatron.core.fusions.fused_bias_swiglu` (0.19.2) keeps three. On CUDA torch.compile compiles it. On CPUs, where
the shim cannot be compiled, it runs as plain functions.

Megatron calls it from `MLP.forward` if `bias_activation_fusion` is set. `install_guard` puts a guard between the two.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import mlp
from torch.nn import functional

from specrl.trainer.megatron_backend.kernels.choice import Kernel
from specrl.trainer.megatron_backend.kernels.guard import GuardedKernel


def install_guard(calls: int) -> None:
    """Compare Megatron's fused SwiGLU with the reference before it is used. calls: as of GuardedKernel. Idempotent."""
    if not isinstance(mlp.bias_swiglu_impl, GuardedKernel):
        name = Kernel.FUSED_SWIGLU
        mlp.bias_swiglu_impl = GuardedKernel(name, mlp.bias_swiglu_impl, compute_swiglu, calls)
        mlp.weighted_bias_swiglu_impl = GuardedKernel(
            name, mlp.weighted_bias_swiglu_impl, compute_weighted_swiglu, calls
        )


def compute_swiglu(x: torch.Tensor, _bias: None, *_settings: bool) -> torch.Tensor:
    """Compute SwiGLU of [..., 2 I] as `MLP.forward` does without fusion. No policy has a bias there."""
    gate, linear = x.chunk(2, dim=-1)
    return functional.silu(gate) * linear


def compute_weighted_swiglu(x: torch.Tensor, bias: None, weights: torch.Tensor, *settings: bool) -> torch.Tensor:
    """The same for tokens of an expert, times the weights [..., 1] that its router gave them."""
    return (compute_swiglu(x, bias, *settings) * weights).to(x.dtype)
