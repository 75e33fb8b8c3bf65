"""Measures rollout speed by kind of speculation, draft length and live batch, and specrl's overhead over plain vLLM.

    python benchmarks/rollout_speed.py --run runs/demo-1                # the demo's policy with its trained drafter

A policy of 24 layers, for which a one-layer drafter is cheap:

    python examples/demo/make_policy.py --layers 24 --out runs/deep-policy
    specrl drafter init -f examples/demo/run.yaml --set "model.path=$PWD/runs/deep-policy" --out runs/deep-drafter \\
        --runs runs/deep
    python benchmarks/rollout_speed.py --run runs/deep/demo-1 --batches 1,8 \\
        --mechanisms none,ngram:3,eagle3:1,eagle3:3,eagle3:5

All engines (by default none, and ngram and eagle3 at k = 1, 3, 5) start first, in one process, and are measured
alternately on the same prompts and seeds. Speed is tokens per second relative to `none` in the same turn: median and
range. The overhead compares, on the `none` engine, the path of a rollout in a run (gRPC client, service, Engine, wire)
with direct calls of `AsyncLLM.generate`, again alternately.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

from specrl.generation.compare import (
    build_request,
    check_batches,
    close_engines,
    compare_engines,
    format_table,
    show_on_bar,
    start_engines,
)
from specrl.generation.engine import Engine
from specrl.generation.service import GenerationService
from specrl.prompts import load_prompts
from specrl.records import RolloutRequest
from specrl.rpc.clients import GenerationClient
from specrl.rpc.server import start_server
from specrl.spec import RunSpec, load_spec

MECHANISMS = ["none", *(f"{kind}:{k}" for kind in ("ngram", "eagle3") for k in (1, 3, 5))]


async def measure(arguments: argparse.Namespace, console: Console) -> None:
    """Start all engines, measure, print, and write the rows if asked."""
    run: Path = arguments.run
    spec = load_spec(run / "run.yaml")
    check_batches(spec, arguments.batches)
    policy = run / "export" / "policy"
    drafter = run / "export" / "drafter"
    if drafter.is_dir() and not policy.is_dir():  # a run that only initialised a drafter exports no policy
        policy = Path(spec.model.path)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        progress = show_on_bar(bar)
        engines = await start_engines(spec, arguments.mechanisms, str(policy), str(drafter), progress)
        try:
            rows = await compare_engines(engines, spec, arguments.batches, arguments.turns, progress)
            ratios = await overhead(engines[arguments.mechanisms[0]], spec, arguments.turns)
        finally:
            await close_engines(engines)
    layers = json.loads((policy / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    console.print(f"policy of {layers} layers, sampling of the run file, {arguments.turns} turns")
    console.print(format_table(rows))
    console.print(
        f"specrl against a plain vLLM loop, {spec.generation.max_live_rollouts} live: {median(ratios):.3f}x tokens "
        f"per second (range {min(ratios):.3f}-{max(ratios):.3f})"
    )
    if arguments.json:
        result = {"layers": layers, "rows": [row.to_json() for row in rows], "overPlainVllm": sorted(ratios)}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


async def overhead(engine: Engine, spec: RunSpec, turns: int) -> list[float]:
    """Measure tokens per second through specrl over those of a plain loop, per turn, all requests at once."""
    prompts = load_prompts(spec)
    batch = spec.generation.max_live_rollouts
    server, port = await start_server(GenerationService(engine, spec.weights, 0.0).add_to, "127.0.0.1", 0)
    ratios: list[float] = []
    async with GenerationClient(f"127.0.0.1:{port}") as client:
        for turn in range(turns + 1):
            requests = [
                build_request(spec, prompts.prompt(place).token_ids, f"overhead-{turn}-{place}", 7919 * turn + place)
                for place in range(2 * batch)
            ]
            # The order alternates, so that a machine that slows down or speeds up favours neither.
            order = [plain, through_specrl] if turn % 2 else [through_specrl, plain]
            speeds = {path: await path(engine, client, requests) for path in order}
            if turn > 0:  # the first turn warms up
                ratios.append(speeds[through_specrl] / speeds[plain])
    await server.stop(None)
    return ratios


async def through_specrl(_engine: Engine, client: GenerationClient, requests: Sequence[RolloutRequest]) -> float:
    """Tokens per second as the coordinator receives them."""
    began = time.perf_counter()
    tokens = 0
    async for rollout in client.generate_rollouts(requests, admit_together=False, min_policy_version=-1):
        tokens += rollout.total_length
    return tokens / (time.perf_counter() - began)


async def plain(engine: Engine, _client: GenerationClient, requests: Sequence[RolloutRequest]) -> float:
    """Tokens per second of `AsyncLLM.generate`, final outputs only, as a user of vLLM would call it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engine._llm  # type: ignore[attr-defined]  # the very engine, so that nothing else differs

    async def one(request: RolloutRequest) -> int:
        sampling = SamplingParams(
            temperature=request.sampling.temperature,
            max_tokens=request.sampling.max_tokens,
            seed=request.sampling.seed,
            stop=list(request.sampling.stop),
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
        async for output in llm.generate(prompt, sampling, f"plain-{request.rollout_id}"):
            last = output
        return len(last.outputs[0].token_ids)

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(request) for request in requests)))
    return tokens / (time.perf_counter() - began)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run with an EAGLE-3 drafter")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument(
        "--mechanisms", type=lambda text: text.split(","), default=MECHANISMS, help="the first is the reference: none"
    )
    parser.add_argument("--turns", type=int, default=3, help="measured turns of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    asyncio.run(measure(parser.parse_args(), Console()))


if __name__ == "__main__":
    main()
