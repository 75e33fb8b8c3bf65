"""Parts that need torch and Megatron-Core, but no vLLM: the policy's step, its memory, its optimizer, attention."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks import trainer
from benchmarks.gpu.part import Figures, Size, find_bad_rate
from torch.nn.attention import SDPBackend, sdpa_kernel

from specrl.drafting.budget import estimate_policy_flops
from specrl.models import read_served_models
from specrl.records import TrainRollout
from specrl.spec.trainer import Kernels
from specrl.trainer.megatron_backend.backend import MegatronBackend
from specrl.trainer.memory.estimate import estimate_rank_memory

MEMORY_BOUND = 0.15
"""Largest share by which memory may differ from what preflight counts, as in test_rank_memory.py."""
OTHER_STEPS = 3
"""Steps with other numbers of rollouts, after which memory is fragmented if the allocator lets it be."""
ATTENTION_BOUND = 0.05
"""Largest difference of two attention kernels in bf16, whose outputs are means of values of order 1."""


@contextmanager
def open_backend(size: Size, kernels: Kernels = Kernels.AUTO) -> Iterator[tuple[MegatronBackend, list[TrainRollout]]]:
    """Open a trainer with a random policy in bf16, and make a batch. On a GPU the policy has 0.5 B parameters."""
    hidden = size.choose(1024, 256, 128)
    layers = size.choose(24, 4, 1)
    longest = size.choose(4096, 256, 64)
    arguments = argparse.Namespace(
        dtype="bfloat16",
        longest=longest,
        micro_batch_tokens=size.choose(16384, 2048, 512),
        threads=1,
        rollouts=size.choose(64, 8, 4),
    )
    with tempfile.TemporaryDirectory() as scratch:
        words = size.choose(151_936, 4096, 256)
        policy = trainer.make_policy(Path(scratch) / "policy", hidden, layers, words)
        rollouts = trainer.a_batch(arguments.rollouts, longest, words)
        spec = trainer.a_spec(policy, arguments)
        spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"kernels": kernels})})
        backend = MegatronBackend(spec)
        try:
            backend.load_model(None)
            yield backend, rollouts
        finally:
            backend.close()


def measure_step(size: Size) -> Figures:
    """Measure seconds of a step, packed and padded, and the packed step's model FLOPs utilisation (MFU)."""
    with open_backend(size) as (backend, rollouts):
        found = {}
        for name, batch in (("packed", rollouts), ("padded", trainer.as_long_as_the_longest(rollouts))):
            contender = trainer.Specrl(backend, batch)
            contender.step()  # warms up
            found[name] = median(_time_step(contender) for _ in range(size.choose(3, 2, 1)))
        dtype = torch.bfloat16
        peak = trainer.peak_flops(dtype, backend.groups.device)
        flops = sum(
            estimate_policy_flops(backend.config, len(item.prompt_token_ids), item.rollout.total_length)
            for item in rollouts
        )
        return {
            "parameters": backend.config.num_parameters,
            "packedS": found["packed"],
            "paddedS": found["padded"],
            "speedup": found["padded"] / found["packed"],
            "peakTflops": peak / 1e12,
            "mfu": flops / found["packed"] / peak,
        }


def _time_step(contender: trainer.Specrl) -> float:
    started = trainer.now()
    contender.step()
    return trainer.now() - started


def find_step_fault(figures: Mapping[str, Any]) -> str | None:
    """No step uses more than the machine has; a fifth above it is the error of the measured peak."""
    bad = find_bad_rate(figures, "packedS", "paddedS", "mfu")
    return bad or (f"mfu must be at most 1.2, got {figures['mfu']}" if figures["mfu"] > 1.2 else None)


def measure_memory(size: Size) -> Figures:
    """Compare the bytes of live tensors after a step with what preflight counts; on CUDA, compare the peak, too.

    Then steps of other lengths, and what the allocator has taken from the card beyond its own peak (A20). With fast
    kernels, a step needs less than preflight counts.
    """
    is_cuda = torch.cuda.is_available()
    with open_backend(size, Kernels.REFERENCE) as (backend, rollouts):
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        trainer.Specrl(backend, rollouts).step()
        gc.collect()
        estimate = estimate_rank_memory(backend.spec, read_served_models(backend.spec))
        figures = {
            "restMib": _count_live_bytes() / 2**20,
            "restEstimateMib": estimate.state / 2**20,
            "peakMib": torch.cuda.max_memory_allocated() / 2**20 if is_cuda else None,
            "peakEstimateMib": estimate.most / 2**20,
        }
        for count in range(1, OTHER_STEPS + 1):  # fewer and fewer rollouts, so that micro-batches have other sizes
            trainer.Specrl(backend, rollouts[count:]).step()
        return figures | {
            "reservedMib": torch.cuda.max_memory_reserved() / 2**20 if is_cuda else None,
            "allocatedMib": torch.cuda.max_memory_allocated() / 2**20 if is_cuda else None,
        }


def _count_live_bytes() -> int:
    """Count the bytes of all tensors' storages in this process."""
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type != "meta":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def find_memory_fault(figures: Mapping[str, Any]) -> str | None:
    """The memory at rest, and on CUDA the peak, must be what preflight counts; little may be reserved beyond it."""
    bad = find_bad_rate(figures, "restMib", "restEstimateMib", "peakEstimateMib")
    for name in ("rest", "peak"):
        found = figures[f"{name}Mib"]
        if bad is None and found is not None and abs(found / figures[f"{name}EstimateMib"] - 1) > MEMORY_BOUND:
            bad = f"{name}Mib must be within {MEMORY_BOUND:.0%} of {name}EstimateMib, got {figures}"
    reserved = figures["reservedMib"]
    if bad is None and reserved is not None and reserved / figures["allocatedMib"] - 1 > MEMORY_BOUND:
        bad = f"reservedMib must be at most {MEMORY_BOUND:.0%} above allocatedMib, got {figures}"
    return bad


def measure_optimizer(size: Size) -> Figures:
    """Measure seconds of an optimizer step alone: gradient check, norm, clip and AdamW."""
    with open_backend(size) as (backend, rollouts):
        trainer.Specrl(backend, rollouts).step()  # makes the moments
        policy = backend.models.policy
        seconds = []
        for _ in range(size.choose(5, 3, 1)):
            policy.zero_gradients()
            started = trainer.now()
            norm = policy.update_weights(0.0)
            seconds.append(trainer.now() - started)
        return {"seconds": median(seconds), "parameters": backend.config.num_parameters, "normOfZeros": norm}


def find_optimizer_fault(figures: Mapping[str, Any]) -> str | None:
    """Gradients of zero have the norm 0; None would be a skipped update."""
    bad = find_bad_rate(figures, "seconds")
    return bad or (None if figures["normOfZeros"] == 0 else f"normOfZeros must be 0, got {figures['normOfZeros']}")


def measure_attention(size: Size) -> Figures:
    """Compare each attention kernel of torch with its plain arithmetic: largest difference, and seconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = (1, size.choose(16, 4, 2), size.choose(4096, 512, 64), 64)
    query, key, value = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))

    def attend(kernel: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(kernel):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    expected = attend(SDPBackend.MATH)
    found: Figures = {"mathS": time_call(lambda: attend(SDPBackend.MATH))}
    worst = 0.0
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        name = kernel.name.partition("_")[0].lower()
        try:
            difference = float((attend(kernel) - expected).abs().max())
        except RuntimeError as error:  # torch has no such kernel for this device
            found[f"{name}Missing"] = str(error).splitlines()[0]
            continue
        found |= {f"{name}Difference": difference, f"{name}S": time_call(lambda kernel=kernel: attend(kernel))}
        worst = max(worst, difference)
    return {**found, "worstDifference": worst}


def time_call(call: Callable[[], object]) -> float:
    """Return the seconds of the second call, with the card's work finished."""
    call()
    started = trainer.now()
    call()
    return trainer.now() - started


def find_attention_fault(figures: Mapping[str, Any]) -> str | None:
    """Every kernel must agree with plain arithmetic."""
    bad = find_bad_rate(figures, "mathS")
    if bad is None and not figures["worstDifference"] <= ATTENTION_BOUND:
        return f"worstDifference must be at most {ATTENTION_BOUND}, got {figures['worstDifference']}"
    return bad
