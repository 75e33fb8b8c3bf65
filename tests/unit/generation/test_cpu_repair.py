"""The repair is applied where the kernel is wrong, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specrl.errors import EngineFailed
from specrl.generation.vllm_backend import cpu_repair


def _as_shipped(output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, old: int, new: int, **_: Any) -> None:
    """What vLLM 0.32.0 does: fills a converted copy, and leaves the caller's tensor alone unless it is int64."""
    cpu_repair.expand(output if output.dtype == torch.int64 else output.to(torch.int64), values, ends, old, new)


def _a_module(kernel: Any) -> Any:
    return SimpleNamespace(_expand_kernel_impl=kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_values_are_spread_over_the_tokens_of_their_request(dtype: torch.dtype) -> None:
    output = torch.empty(6, dtype=dtype)
    cpu_repair.expand(output, torch.tensor([5, 0, 7, 3], dtype=dtype), torch.tensor([2, 2, 5, 6]), 0, 1)
    assert output.tolist() == [5, 5, 7, 7, 7, 3]


def test_replaced_value_is_spread_as_its_replacement() -> None:
    output = torch.empty(3)
    cpu_repair.expand(output, torch.tensor([0.0, 0.7]), torch.tensor([2, 3]), 0, 1)
    assert output.tolist() == pytest.approx([1, 1, 0.7])


def test_wrong_kernel_is_replaced_once() -> None:
    module = _a_module(_as_shipped)
    assert cpu_repair.repair(module)
    assert module._expand_kernel_impl is cpu_repair.expand
    assert not cpu_repair.repair(module)


def test_right_kernel_is_left_alone() -> None:
    def mended(*arguments: Any, **keywords: Any) -> None:
        cpu_repair.expand(*arguments, **keywords)

    module = _a_module(mended)
    assert not cpu_repair.repair(module)
    assert module._expand_kernel_impl is mended


def test_kernel_that_is_gone_is_an_error() -> None:
    with pytest.raises(EngineFailed, match=r"_expand_kernel_impl on a CPU, got no such kernel; .*55005"):
        cpu_repair.repair(SimpleNamespace())


def test_kernel_that_ignores_integers_is_wrong() -> None:
    def only_floats(output: torch.Tensor, *inputs: Any, **keywords: Any) -> None:
        if output.dtype.is_floating_point:
            cpu_repair.expand(output, *inputs, **keywords)

    assert cpu_repair.is_wrong(only_floats)
    assert not cpu_repair.is_wrong(cpu_repair.expand)


def test_top_k_passes_when_no_request_has_a_draft(vllm_imported: None) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    cpu_repair.let_top_k_pass_without_drafts()
    repaired = topk_topp_sampler.apply_top_k_only
    cpu_repair.let_top_k_pass_without_drafts()
    assert topk_topp_sampler.apply_top_k_only is repaired
    assert repaired(torch.empty(0, 5), torch.empty(0, dtype=torch.int32)).shape == (0, 5)
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert repaired(logits, torch.tensor([2])).tolist() == [[float("-inf"), 3.0, 2.0]]
