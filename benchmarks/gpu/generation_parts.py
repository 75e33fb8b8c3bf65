"""The part that needs vLLM: milliseconds of a step by draft length, acceptance, and the canary's quantiles in bf16."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import trainer
from benchmarks.gpu.part import Figures, PartSkipped, Size, find_bad_rate

LENGTHS = (1, 2, 3)


def measure_generation(size: Size) -> Figures:
    """Generate with each draft length of an untrained EAGLE-3 head, then score the rollouts in the trainer."""
    if find_spec("vllm") is None:
        raise PartSkipped("vLLM is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(_measure(size, Path(scratch)))


async def _measure(size: Size, scratch: Path) -> Figures:
    # Imported here, so that the other parts run without vLLM.
    from benchmarks.speculation import costs_of, since

    from specrl.drafting.eagle3.head import write_untrained_head
    from specrl.generation.compare import parse_mechanism, replace_speculation
    from specrl.generation.vllm_backend import draft_length_client
    from specrl.generation.vllm_backend.engine import VllmEngine
    from specrl.records import RolloutRequest, Sampling, TrainRollout
    from specrl.spec.generation import Eagle3
    from specrl.trainer.megatron_backend.backend import MegatronBackend

    longest = size.choose(512, 64, 16)
    live = size.choose(64, 4, 2)
    words = size.choose(151_936, 4096, 256)
    policy = trainer.make_policy(scratch / "policy", size.choose(1024, 256, 128), size.choose(24, 4, 2), words)
    arguments = argparse.Namespace(
        dtype="bfloat16", longest=longest, micro_batch_tokens=size.choose(16384, 2048, 512), threads=1, rollouts=4
    )
    plain = trainer.a_spec(policy, arguments)
    write_untrained_head(scratch / "head", policy, Eagle3(), seed=1)
    spec = replace_speculation(plain, parse_mechanism("eagle3", str(scratch / "head")), str(policy))
    engine = VllmEngine(spec, "gpu-check")
    found: Figures = {}
    rollouts: list[TrainRollout] = []
    await engine.start()
    try:
        for k in LENGTHS:
            await draft_length_client.fix_length(engine._llm, k)
            before = await costs_of(engine)
            prompts = [(4 + number, 5, 6) for number in range(live)]
            requests = [
                RolloutRequest(f"{k}-{number}", "g", number, prompt, Sampling(longest, seed=number))
                for number, prompt in enumerate(prompts)
            ]
            stream = engine.generate(requests, admit_together=False)
            rollouts += [TrainRollout(prompts[rollout.sample_index], rollout, 0.0) async for rollout in stream]
            steps = since(before, await costs_of(engine)).values()
            count = sum(number for number, _ in steps)
            found[f"step{k}Ms"] = 1000 * sum(seconds for _, seconds in steps) / max(1, count)
        counters = (await engine.get_status()).speculation
        found["accepted"] = list(counters.accepted_per_position)
        found["drafts"] = counters.drafts
    finally:
        await engine.close()
    found["draftPassMs"] = (found[f"step{LENGTHS[-1]}Ms"] - found["step1Ms"]) / (LENGTHS[-1] - 1)
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
    bad = find_bad_rate(figures, *(f"step{k}Ms" for k in LENGTHS))
    if bad is None and not figures["canaryMax"] <= 1.0:
        return f"canaryMax must be at most 1 nat, got {figures['canaryMax']}"
    return bad
