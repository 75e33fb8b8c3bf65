"""The repairs of CPU sampling work, and replace only a wrong kernel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specrl.errors import EngineFailed
from specrl.generation.vllm_backend.extensions import cpu_repair


def _as_shipped(output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, old: int, new: int, **_: Any) -> None:
    """The kernel of vLLM 0.32.0: it fills a converted copy, and changes the caller's tensor only if it is int64."""
    cpu_repair.expand_values(output if output.dtype == torch.int64 else output.to(torch.int64), values, ends, old, new)


def _a_module(kernel: Any) -> Any:
    return SimpleNamespace(_expand_kernel_impl=kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_value_is_repeated_for_the_tokens_of_its_request(dtype: torch.dtype) -> None:
    output = torch.empty(6, dtype=dtype)
    cpu_repair.expand_values(output, torch.tensor([5, 0, 7, 3], dtype=dtype), torch.tensor([2, 2, 5, 6]), 0, 1)
    assert output.tolist() == [5, 5, 7, 7, 7, 3]


def test_a_value_to_replace_is_repeated_as_its_replacement() -> None:
    output = torch.empty(3)
    cpu_repair.expand_values(output, torch.tensor([0.0, 0.7]), torch.tensor([2, 3]), 0, 1)
    assert output.tolist() == pytest.approx([1, 1, 0.7])


def test_a_wrong_kernel_is_replaced_once() -> None:
    module = _a_module(_as_shipped)
    assert cpu_repair.repair_kernels(module)
    assert module._expand_kernel_impl is cpu_repair.expand_values
    assert not cpu_repair.repair_kernels(module)


def test_a_correct_kernel_is_left_alone() -> None:
    def mended(*arguments: Any, **keywords: Any) -> None:
        cpu_repair.expand_values(*arguments, **keywords)

    module = _a_module(mended)
    assert not cpu_repair.repair_kernels(module)
    assert module._expand_kernel_impl is mended


def test_a_missing_kernel_is_an_error() -> None:
    with pytest.raises(EngineFailed, match=r"_expand_kernel_impl on a CPU, got no such kernel; .*55005"):
        cpu_repair.repair_kernels(SimpleNamespace())


def test_a_kernel_that_ignores_integers_is_wrong() -> None:
    def only_floats(output: torch.Tensor, *inputs: Any, **keywords: Any) -> None:
        if output.dtype.is_floating_point:
            cpu_repair.expand_values(output, *inputs, **keywords)

    assert cpu_repair.is_kernel_wrong(only_floats)
    assert not cpu_repair.is_kernel_wrong(cpu_repair.expand_values)


def test_top_k_accepts_logits_without_rows(vllm_imported: None) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    cpu_repair.accept_empty_top_k()
    repaired = topk_topp_sampler.apply_top_k_only
    cpu_repair.accept_empty_top_k()
    assert topk_topp_sampler.apply_top_k_only is repaired
    assert repaired(torch.empty(0, 5), torch.empty(0, dtype=torch.int32)).shape == (0, 5)
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert repaired(logits, torch.tensor([2])).tolist() == [[float("-inf"), 3.0, 2.0]]


@pytest.mark.parametrize(("nodes", "is_bound"), [(1, False), (2, True), (0, True)])
def test_memory_is_bound_only_where_there_is_more_than_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, is_bound: bool
) -> None:
    """On a machine with one node the binding changed nothing, and every replica's log had a warning of it."""
    for number in range(nodes):
        (tmp_path / f"node{number}").mkdir()
    bound: list[list[int]] = []
    operators = SimpleNamespace(init_cpu_memory_env=bound.append)
    monkeypatch.setattr(torch.ops, "_C", operators)
    cpu_repair.skip_needless_binding(tmp_path)
    operators.init_cpu_memory_env([0])
    assert bound == ([[0]] if is_bound else [])
