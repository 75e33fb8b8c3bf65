"""Makes vLLM use its own RMSNorm kernels on CPUs. vLLM 0.32 ships them, but registers them for GPUs only.

Without them CPUs compute the norm from a dozen PyTorch operations. A small model, such as a drafter, spends much of its
time between such operations, so the kernels make draft passes cheaper.

The kernels are registered in vLLM's registry of implementations (`vllm.ir`) and put first in the platform's order of
preference.

Called by `plugin.register` in each vLLM process. Without the plugin vLLM works as usual.
"""

from __future__ import annotations

from typing import Any

import torch

from specrl.errors import EngineFailed

PROVIDER = "vllm_c_cpu"
OPERATIONS = ("rms_norm", "fused_add_rms_norm")
LANES = 32  # a row must be a multiple of this: whole vectors of the kernel, in any dtype


def is_supported() -> bool:
    """Whether this is vLLM's CPU build. Raises EngineFailed if that lacks the kernels."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    current_platform.import_kernels()
    missing = [name for name in OPERATIONS if not hasattr(torch.ops._C, name)]
    if missing:
        raise EngineFailed(
            f"vLLM's CPU build must have the operators {' and '.join(OPERATIONS)} in torch.ops._C, got no "
            f"{', no '.join(missing)}; install vLLM again, in a version that specrl supports"
        )
    return True


def _rms_norm_fits(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    is_plain = weight is not None and weight.dtype == x.dtype and variance_size is None
    return is_plain and x.shape[-1] % LANES == 0


def _fused_add_rms_norm_fits(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    is_whole = x.is_contiguous() and x_residual.is_contiguous()
    return is_whole and _rms_norm_fits(x, weight, epsilon, variance_size)


def register_kernels() -> None:
    """Register the kernels and make vLLM prefer them. Idempotent; does nothing on GPUs."""
    from vllm import ir

    if not is_supported() or PROVIDER in ir.ops.rms_norm.impls:
        return

    @ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_rms_norm_fits)
    def rms_norm(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype)
        torch.ops._C.rms_norm(output, x.contiguous(), weight, epsilon)
        return output

    @ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_fused_add_rms_norm_fits, inplace=True)
    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

    _prefer_kernels()


def _prefer_kernels() -> None:
    """Put the kernels first in the platform's default order. An order that a user configures still overrides it."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    default = platform.get_default_ir_op_priority

    def with_kernels(_cls: Any, vllm_config: Any) -> Any:
        found = default(vllm_config)
        for name in OPERATIONS:
            getattr(found, name).insert(0, PROVIDER)
        return found

    platform.get_default_ir_op_priority = classmethod(with_kernels)
