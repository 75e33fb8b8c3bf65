"""The parts that need vLLM: steps by draft length, acceptance, the canary in bf16, and leaving out the drafter."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from benchmarks import trainer
from benchmarks.gpu.part import Figures, PartSkipped, Size, find_bad_rate

from specrl.generation.draft_lengths.decoding_step import OFF
from specrl.records import RolloutRequest, Sampling, TrainRollout
from specrl.spec import RunSpec

if TYPE_CHECKING:
    from specrl.generation.vllm_backend.engine import VllmEngine

STEP_NAMES = {OFF: "stepOffMs", 0: "step0Ms", 1: "step1Ms", 2: "step2Ms", 3: "step3Ms"}
"""Milliseconds of a step, by draft length."""
LONGEST_DRAFT = max(STEP_NAMES)


def measure_generation(size: Size) -> Figures:
    """Generate with each draft length of an untrained EAGLE-3 head, then score the rollouts in the trainer."""
    return _run_with_vllm(_measure_generation, size)


def measure_eager_steps(size: Size) -> Figures:
    """Generate without CUDA graphs, for comparison with `measure_generation`, which has them on a GPU (B1)."""
    return _run_with_vllm(_measure_eager_steps, size)


def measure_draft_lengths(size: Size) -> Figures:
    """Switch n-gram drafts on, off and on again. On a GPU this is vLLM's second model runner, which we patch (B2)."""
    return _run_with_vllm(_measure_draft_lengths, size)


def _run_with_vllm(measure: Callable[[Size, Path], Coroutine[Any, Any, Figures]], size: Size) -> Figures:
    if find_spec("vllm") is None:
        raise PartSkipped("vLLM is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(measure(size, Path(scratch)))


def _make_plain_spec(size: Size, scratch: Path) -> RunSpec:
    """Write a policy and return a run of it without speculation."""
    words = size.choose(151_936, 4096, 256)
    policy = trainer.make_policy(scratch / "policy", size.choose(1024, 256, 128), size.choose(24, 4, 2), words)
    arguments = argparse.Namespace(
        dtype="bfloat16",
        longest=size.choose(512, 64, 16),
        micro_batch_tokens=size.choose(16384, 2048, 512),
        threads=1,
        rollouts=4,
    )
    return trainer.a_spec(policy, arguments)


async def _generate(engine: VllmEngine, size: Size, k: int) -> tuple[list[TrainRollout], float]:
    """Generate one batch with drafts of k tokens; returns the rollouts and the milliseconds of a step."""
    from benchmarks.speculation import costs_of, since

    from specrl.generation.vllm_backend import draft_length_client

    await draft_length_client.fix_length(engine._llm, k)
    before = await costs_of(engine)
    prompts = [(4 + number, 5, 6) for number in range(size.choose(64, 4, 2))]
    sampling = [Sampling(size.choose(512, 64, 16), seed=number) for number in range(len(prompts))]
    requests = [
        RolloutRequest(f"{k}-{number}", "g", number, prompt, sampling[number]) for number, prompt in enumerate(prompts)
    ]
    stream = engine.generate(requests, admit_together=False)
    rollouts = [TrainRollout(prompts[rollout.sample_index], rollout, 0.0) async for rollout in stream]
    steps = since(before, await costs_of(engine)).values()
    count = sum(number for number, _ in steps)
    return rollouts, 1000 * sum(seconds for _, seconds in steps) / max(1, count)


async def _measure_recompute(engine: VllmEngine, size: Size) -> float:
    """Return the tokens per second at which contexts are computed, as again after an update (B7)."""
    from specrl.generation.vllm_backend import draft_length_client

    await draft_length_client.fix_length(engine._llm, OFF)
    length = size.choose(256, 32, 8)
    prompts = [(4 + number, *range(5, 4 + length)) for number in range(size.choose(64, 4, 2))]
    requests = [
        RolloutRequest(f"context-{number}", "g", number, prompt, Sampling(1, seed=number))
        for number, prompt in enumerate(prompts)
    ]
    started = time.perf_counter()
    rollouts = [rollout async for rollout in engine.generate(requests, admit_together=True)]
    return len(rollouts) * length / (time.perf_counter() - started)


async def _measure_draft_lengths(size: Size, scratch: Path) -> Figures:
    # Imported here, so that the other parts run without vLLM.
    from specrl.generation.compare import parse_mechanism, replace_speculation
    from specrl.generation.vllm_backend.engine import VllmEngine

    plain = _make_plain_spec(size, scratch)
    spec = replace_speculation(plain, parse_mechanism("ngram", None), plain.model.path)
    engine = VllmEngine(spec, "gpu-check")
    found: Figures = {}
    await engine.start()
    try:
        for name, k in (("first", LONGEST_DRAFT), ("off", OFF), ("last", LONGEST_DRAFT)):
            before = (await engine.get_status()).speculation.drafts
            _, found[f"{name}StepMs"] = await _generate(engine, size, k)
            found[f"{name}Drafts"] = (await engine.get_status()).speculation.drafts - before
    finally:
        await engine.close()
    return found


def find_draft_lengths_fault(figures: Mapping[str, Any]) -> str | None:
    """No draft may be made while drafts are off."""
    if figures["offDrafts"]:
        return f"offDrafts must be 0, got {figures['offDrafts']}"
    return find_bad_rate(figures, "firstStepMs", "offStepMs", "lastStepMs")


def _add_untrained_head(plain: RunSpec, scratch: Path, **generation: Any) -> RunSpec:
    """Write an untrained EAGLE-3 head and return the run with it. generation: other fields of that section."""
    from specrl.drafting.eagle3.head import write_untrained_head
    from specrl.generation.compare import parse_mechanism, replace_speculation
    from specrl.spec.generation import Eagle3

    policy = Path(plain.model.path)
    write_untrained_head(scratch / "head", policy, Eagle3(), seed=1)
    fields = parse_mechanism("eagle3", str(scratch / "head")) | generation
    return replace_speculation(plain, fields, str(policy))


async def _measure_eager_steps(size: Size, scratch: Path) -> Figures:
    # Imported here, so that the other parts run without vLLM.
    from specrl.generation.vllm_backend.engine import VllmEngine

    engine = VllmEngine(_add_untrained_head(_make_plain_spec(size, scratch), scratch, eager=True), "gpu-check")
    found: Figures = {}
    await engine.start()
    try:
        for k in (OFF, LONGEST_DRAFT):
            _, found[STEP_NAMES[k]] = await _generate(engine, size, k)
    finally:
        await engine.close()
    return found


def find_eager_steps_fault(figures: Mapping[str, Any]) -> str | None:
    """Both steps must have been measured."""
    return find_bad_rate(figures, STEP_NAMES[OFF], STEP_NAMES[LONGEST_DRAFT])


async def _measure_generation(size: Size, scratch: Path) -> Figures:
    # Imported here, so that the other parts run without vLLM.
    from specrl.generation.vllm_backend.engine import VllmEngine
    from specrl.trainer.megatron_backend.backend import MegatronBackend

    plain = _make_plain_spec(size, scratch)
    engine = VllmEngine(_add_untrained_head(plain, scratch), "gpu-check")
    found: Figures = {}
    rollouts: list[TrainRollout] = []
    await engine.start()
    try:
        for k, name in STEP_NAMES.items():
            generated, found[name] = await _generate(engine, size, k)
            rollouts += generated
        found["recomputeTokensPerS"] = await _measure_recompute(engine, size)
        counters = (await engine.get_status()).speculation
        found["accepted"] = list(counters.accepted_per_position)
        found["drafts"] = counters.drafts
    finally:
        await engine.close()
    found["draftPassMs"] = (found[STEP_NAMES[LONGEST_DRAFT]] - found["step1Ms"]) / (LONGEST_DRAFT - 1)
    backend = MegatronBackend(plain)
    try:
        backend.load_model(None)
        scored = backend.score_rollouts(rollouts)
    finally:
        backend.close()
    pairs = zip(scored, rollouts, strict=True)
    difference_T = np.concatenate([np.abs(own_T - item.rollout.sampler_logprobs_T) for own_T, item in pairs])
    quantiles = np.quantile(difference_T, [0.5, 0.9, 0.99, 1.0])
    return found | dict(zip(("canaryP50", "canaryP90", "canaryP99", "canaryMax"), map(float, quantiles), strict=True))


def find_generation_fault(figures: Mapping[str, Any]) -> str | None:
    """Steps must have been measured, and sampler and trainer must agree as the canary demands: within a nat."""
    bad = find_bad_rate(figures, *STEP_NAMES.values(), "recomputeTokensPerS")
    if bad is None and not figures["canaryMax"] <= 1.0:
        return f"canaryMax must be at most 1 nat, got {figures['canaryMax']}"
    return bad
