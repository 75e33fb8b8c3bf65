"""Fast kernels of the policy: which are chosen, and that one which differs from its reference is never used.

CPUs have no fast kernel. Megatron's fused SwiGLU runs there uncompiled, and a stand-in of torch's variable-length
attention computes what torch documents. So a trainer can use both here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from tests.integration.trainer.runs import a_batch, a_spec
from tests.integration.trainer.worker import keep
from tests.tiny_models import Shape, make_policy

from specrl.records import TrainMetrics
from specrl.spec.trainer import Kernels
from specrl.trainer.megatron_backend import MegatronBackend
from specrl.trainer.megatron_backend.kernels import choice, fused_swiglu
from specrl.trainer.megatron_backend.kernels.choice import Kernel, choose_kernels
from specrl.trainer.megatron_backend.kernels.guard import BOUND, Compute, GuardedKernel, measure_difference
from specrl.trainer.megatron_backend.kernels.varlen_attention import attend_in_one_call
from specrl.trainer.megatron_backend.model.attention import attend_one_by_one

mlp = fused_swiglu.mlp  # Megatron's module, whose functions the guards replace
FUSED = {name: getattr(mlp, name) for name in ("bias_swiglu_impl", "weighted_bias_swiglu_impl")}

VOCAB = 264
LAYERS = 2
FAMILIES = ("qwen3", "qwen3_moe")
ENDS = torch.tensor([0, 1, 6, 20], dtype=torch.int32)


class WrongGradient(torch.autograd.Function):
    """Returns its argument. Its gradient is a tenth too large."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 1.1 * gradient


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def differ_in_the_output(x: torch.Tensor) -> torch.Tensor:
    return 2 * x + 0.1 * x.detach()


def differ_in_the_gradient(x: torch.Tensor) -> torch.Tensor:
    return 2 * WrongGradient.apply(x)


def return_nan(x: torch.Tensor) -> torch.Tensor:
    return x * float("nan")


def fail_to_run(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no kernel image is available\nfor this card")


def run_out_of_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


class CountedCalls:
    """Counts the calls of a function."""

    def __init__(self, compute: Compute) -> None:
        self.count = 0
        self._compute = compute

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.count += 1
        return self._compute(*arguments)


def test_kernel_that_agrees_is_compared_in_the_first_micro_batch_alone() -> None:
    reference = CountedCalls(double)
    kernel = GuardedKernel("k", double, reference, LAYERS)
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            x = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
            kernel(x).sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [2.0] * 4
    assert reference.count == LAYERS
    assert [(it["event"], it["output_difference"], it["gradient_difference"]) for it in logs] == [
        ("kernel_accepted", 0.0, 0.0)
    ]


@pytest.mark.parametrize(
    ("fast", "output", "gradient"),
    [
        (differ_in_the_output, pytest.approx(0.05, abs=0.01), 0.0),
        (differ_in_the_gradient, 0.0, pytest.approx(0.1, abs=0.01)),
        (return_nan, pytest.approx(float("nan"), nan_ok=True), pytest.approx(float("nan"), nan_ok=True)),
    ],
)
def test_kernel_that_differs_is_never_used_and_the_numbers_are_logged(
    fast: Compute, output: float, gradient: float
) -> None:
    counted = CountedCalls(fast)
    kernel = GuardedKernel("k", counted, double, LAYERS)
    x = torch.arange(1, 5, dtype=torch.bfloat16)
    with structlog.testing.capture_logs() as logs:
        found = [kernel(x).tolist() for _ in range(3)]
    assert found == [[2.0, 4.0, 6.0, 8.0]] * 3
    assert counted.count == 1, "it is not even compared again"
    (entry,) = logs
    assert (entry["event"], entry["log_level"], entry["bound"]) == ("kernel_refused", "warning", BOUND)
    assert (entry["output_difference"], entry["gradient_difference"]) == (output, gradient)


def test_kernel_that_cannot_run_here_is_never_used() -> None:
    kernel = GuardedKernel("k", fail_to_run, double, LAYERS)
    with structlog.testing.capture_logs() as logs:
        assert kernel(torch.ones(2)).tolist() == [2.0, 2.0]
    assert [(it["event"], it["reason"]) for it in logs] == [("kernel_refused", "no kernel image is available")]


def test_lack_of_memory_is_no_difference() -> None:
    """It must reach the trainer, which says what to change."""
    with pytest.raises(torch.OutOfMemoryError):
        GuardedKernel("k", run_out_of_memory, double, LAYERS)(torch.ones(2))


def test_calls_without_numbers_count_for_nothing() -> None:
    """An expert may have no tokens in the first micro-batch."""
    counted = CountedCalls(differ_in_the_output)
    kernel = GuardedKernel("k", counted, double, LAYERS)
    with structlog.testing.capture_logs() as logs:
        for _ in range(LAYERS):
            assert kernel(torch.ones(0, 4)).shape == (0, 4)
        assert (counted.count, logs) == (0, [])
        kernel(torch.ones(4))
    assert [it["event"] for it in logs] == ["kernel_refused"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_in_passes_without_gradients_too(mode: type[torch.no_grad]) -> None:
    with mode(), structlog.testing.capture_logs() as logs:
        GuardedKernel("k", differ_in_the_gradient, double, LAYERS)(torch.ones(2))
    assert [it["event"] for it in logs] == ["kernel_refused"]


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records as if the kit had found all kernels right on this CPU."""
    file = tmp_path / "records.json"
    passed = [{"kernel": kernel, "device": "cpu", "torch": torch.__version__, "record": "r"} for kernel in Kernel]
    file.write_text(json.dumps({"passed": passed}), encoding="utf-8")
    monkeypatch.setattr(choice, "RECORDS", file)
    return file


def test_auto_takes_kernels_that_passed_on_such_a_card_with_this_torch(records: Path) -> None:
    assert choose_kernels(Kernels.AUTO, torch.bfloat16) == set(Kernel)
    assert choose_kernels(Kernels.REFERENCE, torch.bfloat16) == frozenset()
    assert choose_kernels(Kernels.AUTO, torch.float32) == frozenset(), "the kit compares bfloat16"


@pytest.mark.parametrize("other", [{"device": "NVIDIA H100"}, {"torch": "2.14.0"}, {"kernel": "of a later version"}])
def test_record_of_another_card_torch_or_kernel_counts_for_nothing(records: Path, other: dict[str, str]) -> None:
    passed = [record | other for record in json.loads(records.read_text(encoding="utf-8"))["passed"]]
    records.write_text(json.dumps({"passed": passed}), encoding="utf-8")
    assert choose_kernels(Kernels.AUTO, torch.bfloat16) == frozenset()


def attend_plainly(
    query_QND: torch.Tensor,
    key_KGD: torch.Tensor,
    value_KGD: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    *longest: int,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch documents of `varlen_attn`, in plain arithmetic: one masked softmax over all tokens."""
    assert (cu_seq_q.dtype, longest, window_size, enable_gqa) == (torch.int32, (14, 14), (-1, 0), True)
    assert torch.equal(cu_seq_q, cu_seq_k)
    shared = query_QND.shape[1] // key_KGD.shape[1]
    key, value = (x.repeat_interleave(shared, 1).float() for x in (key_KGD, value_KGD))
    positions = torch.arange(len(query_QND))
    sequences = torch.bucketize(positions, cu_seq_q[1:], right=True)
    sees = (sequences[:, None] == sequences) & (positions[:, None] >= positions)
    scores = torch.einsum("qnd,knd->nqk", query_QND.float(), key) * (scale or query_QND.shape[-1] ** -0.5)
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return torch.einsum("nqk,knd->qnd", weights, value).to(query_QND.dtype)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_all_sequences_in_one_call_are_what_each_is_alone(monkeypatch: pytest.MonkeyPatch, scale: float | None) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_plainly)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(20, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2))
    difference = measure_difference(attend_in_one_call, attend_one_by_one, (query, key, value, ENDS, scale))
    assert difference.is_within_bound

    def shift_an_end(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
        shifted = ENDS + torch.tensor([0, 0, 1, 0], dtype=torch.int32)
        return attend_one_by_one(query, key, value, shifted, others[-1])

    difference = measure_difference(attend_in_one_call, shift_an_end, (query, key, value, ENDS, scale))
    assert not difference.is_within_bound, "one token in the wrong sequence is found"


@pytest.mark.parametrize(
    ("fast", "reference", "weights"),
    [
        (FUSED["bias_swiglu_impl"], fused_swiglu.compute_swiglu, ()),
        (FUSED["weighted_bias_swiglu_impl"], fused_swiglu.compute_weighted_swiglu, (torch.rand(6, 1),)),
    ],
)
def test_megatrons_fused_swiglu_is_the_reference(
    fast: Compute, reference: Compute, weights: Sequence[torch.Tensor]
) -> None:
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    arguments = (x, None, *weights, False)
    assert measure_difference(fast, reference, arguments).is_within_bound

    def swap_halves(x: torch.Tensor, *others: Any) -> torch.Tensor:
        return reference(x.roll(8, -1), *others)

    assert not measure_difference(fast, swap_halves, arguments).is_within_bound


@pytest.fixture(autouse=True)
def _without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fused in FUSED.items():
        monkeypatch.setattr(mlp, name, fused)


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return make_policy(folder, shape=Shape(layers=LAYERS, vocab=VOCAB, family=request.param), sharpness=4.0)


def train(policy: Path, file: Path, kernels: Kernels) -> tuple[TrainMetrics, list[tuple[str, str]]]:
    """Train one step and save all weights. Returns its figures, and what was logged of kernels."""
    spec = a_spec(policy, dtype="bfloat16", speculation={"none": {}}, recompute="Layers")
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"kernels": kernels})})
    with structlog.testing.capture_logs() as logs, closing(MegatronBackend(spec)) as backend:
        backend.load_model(None)
        metrics = backend.train_step(a_batch(1, VOCAB))
        keep(file, backend)
    return metrics, [(it["event"], it["kernel"]) for it in logs if it["event"].startswith("kernel_")]


def test_trainer_refuses_what_differs_and_trains_as_without_it(
    policy: Path, tmp_path: Path, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two kernels, torch's attention cannot run on CPUs, and this SwiGLU is wrong."""
    expected, logged = train(policy, tmp_path / "expected", Kernels.REFERENCE)
    assert logged == []
    for name, fused in FUSED.items():
        monkeypatch.setattr(mlp, name, lambda *arguments, fused=fused: 1.1 * fused(*arguments))
    found, logged = train(policy, tmp_path / "found", Kernels.AUTO)
    assert sorted(logged) == [("kernel_refused", "fusedSwiglu"), ("kernel_refused", "varlenAttention")]
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()


def test_trainer_uses_what_agrees(policy: Path, tmp_path: Path, records: Path) -> None:
    expected, _ = train(policy, tmp_path / "expected", Kernels.REFERENCE)
    found, logged = train(policy, tmp_path / "found", Kernels.AUTO)
    assert ("kernel_accepted", "fusedSwiglu") in logged
    assert (found.loss, found.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=0.01)
    assert (tmp_path / "found").read_bytes() != (tmp_path / "expected").read_bytes(), "it rounds otherwise"
