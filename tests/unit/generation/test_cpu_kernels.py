"""vLLM's RMSNorm kernels on CPUs equal its PyTorch implementation, and are used only where they fit."""

from __future__ import annotations

import pytest
import torch
from tests.requirements import CPU_KERNELS

from specrl.generation.vllm_backend.extensions import cpu_kernels

pytestmark = pytest.mark.needs(CPU_KERNELS)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
EPSILON = 1e-6


@pytest.fixture(scope="module", autouse=True)
def ops():
    """vLLM's operations. The kernels are registered twice, as if the plugin were loaded again."""
    from vllm import ir

    cpu_kernels.register_kernels()
    cpu_kernels.register_kernels()
    return ir.ops


def case(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual, weight."""
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
    return x, residual, torch.randn(shape[-1], generator=generator).to(dtype)


def test_the_platform_prefers_the_kernels_and_keeps_its_own_as_a_fallback(ops):
    from vllm.platforms import current_platform

    found = current_platform.get_default_ir_op_priority(None)
    assert found.rms_norm == [cpu_kernels.PROVIDER, "native"]
    assert found.fused_add_rms_norm == [cpu_kernels.PROVIDER, "native"]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 32), (37, 192), (5, 4, 64)])
def test_the_norm_equals_vllms_native_norm(ops, dtype, shape):
    x, _, weight = case(dtype, *shape)
    expected = ops.rms_norm.impls["native"].impl_fn(x, weight, EPSILON)
    got = ops.rms_norm.impls[cpu_kernels.PROVIDER].impl_fn(x, weight, EPSILON)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_norm_of_a_view_into_larger_rows_is_right(ops):
    """Queries and keys are normalised as views into the rows of one projection."""
    rows, _, _ = case(torch.float32, 6, 256)
    x = rows[:, 64:192].view(6, 2, 64)
    weight = case(torch.float32, 64)[2]
    expected = ops.rms_norm.impls["native"].impl_fn(x, weight, EPSILON)
    got = ops.rms_norm.impls[cpu_kernels.PROVIDER].impl_fn(x, weight, EPSILON)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_norm_after_an_addition_equals_vllms_native_norm(ops, dtype):
    x, residual, weight = case(dtype, 37, 192)
    expected = ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPSILON)
    got = ops.fused_add_rms_norm.impls[cpu_kernels.PROVIDER].func_impl_fn(x, residual, weight, EPSILON)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_native_norm_takes_rows_that_the_kernel_does_not_support(ops):
    norm = ops.rms_norm.impls[cpu_kernels.PROVIDER]
    x, _, weight = case(torch.float32, 4, 64)
    assert norm.supports_args(x, weight, EPSILON)
    assert not norm.supports_args(x[:, :40], weight[:40], EPSILON)
    assert not norm.supports_args(x, None, EPSILON)
    assert not norm.supports_args(x, weight.bfloat16(), EPSILON)
    assert not norm.supports_args(x, weight, EPSILON, 32)
    fused = ops.fused_add_rms_norm.impls[cpu_kernels.PROVIDER]
    assert not fused.supports_args(x.t(), x.t(), case(torch.float32, 4)[2], EPSILON)
    assert not fused.supports_args(x[:, :32], x[:, :32], weight[:32], EPSILON)
