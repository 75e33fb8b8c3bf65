"""Measures the memory and the time that a drafter adds to a trainer's step, for a policy with a large vocabulary.

    python -m benchmarks.drafter_memory --out runs/drafter-memory                     # 32 768 words, two tensor ranks
    python -m benchmarks.drafter_memory --out runs/drafter-memory --tensor 1 --steps 8
    python -m benchmarks.drafter_memory --out runs/wide-memory --tensor 1 --steps 1 --words 151936 --hidden 64 \\
        --dtype bfloat16 --rollouts 16 --micro-batch-tokens 2048                      # Qwen3's vocabulary

Three cases, one after another, each in processes of its own: without drafter, with an EAGLE-3 head that drafts the
whole vocabulary, and with one that drafts 4096 words. The policy is a random Qwen3. Printed for each: the most bytes of
live tensors in a step, over the ranks, and the CPU seconds of a step at rank 0, which other programs on the machine
hardly change. Memory is measured in the second step, which has all moments. Time is measured in later steps, because
counting tensors slows a step down.

With PYTHONPATH it measures another tree, so that two versions can be compared on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from benchmarks.trainer import make_policy
from rich.console import Console
from rich.table import Table
from tests.live_tensors import LiveTensors

from specrl.records import Batch, FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec import RunSpec, parse_spec
from specrl.trainer.megatron_backend import MegatronBackend

CASES: dict[str, dict[str, Any]] = {
    "without": {"none": {}},
    "whole vocabulary": {"eagle3": {}},
    "4096 words": {"eagle3": {"draftVocabSize": 4096}},
}
GROUP = 4
PROMPT = 16  # tokens
COMPLETION = 112


def make_spec(arguments: argparse.Namespace) -> RunSpec:
    """Make a run whose drafter learns within its default budget."""
    return parse_spec(
        {
            "name": "benchmark",
            "model": {"path": str(arguments.out / "policy"), "dtype": arguments.dtype, "maxLength": 512},
            "prompts": {"source": {"generated": {"family": "addition", "count": 10}}, "maxTokens": 64},
            "rewards": {"exact": {}},
            "generation": {"sampling": {"maxTokens": COMPLETION}, "speculation": CASES[arguments.case]},
            "trainer": {
                "parallelism": {"tensor": arguments.tensor},
                "optimizer": {"learningRate": "1e-6"},
                "microBatchTokens": arguments.micro_batch_tokens,
            },
            "schedule": {"steps": 1000, "promptsPerStep": arguments.rollouts // GROUP, "groupSize": GROUP},
        }
    )


def make_batch(step: int, rollouts: int, words: int) -> Batch:
    """Make rollouts of random tokens, equally long."""
    generator = np.random.default_rng([0, step])

    def make_rollout(index: int) -> TrainRollout:
        sampled = Rollout(
            rollout_id=f"r{index}",
            group_id=f"g{index // GROUP}",
            sample_index=index % GROUP,
            token_ids_T=generator.integers(4, words, COMPLETION).astype(np.int32),
            sampler_logprobs_T=np.full(COMPLETION, -np.log(words), dtype=np.float32),
            versions=(VersionSpan(step - 1, 0, COMPLETION),),
            finish_reason=FinishReason.LENGTH,
            replica_id="gen-0",
            text="",
            seconds=0.0,
        )
        prompt = tuple(int(token) for token in generator.integers(4, words, PROMPT))
        return TrainRollout(prompt, sampled, float(generator.normal()))

    return Batch(step, tuple(make_rollout(index) for index in range(rollouts)))


def measure_rank(arguments: argparse.Namespace) -> None:
    """Run one rank of one case: two steps, whose tensors are counted, then timed steps. Writes its figures."""
    rollouts = arguments.rollouts
    words = arguments.words
    with LiveTensors() as live:
        backend = MegatronBackend(make_spec(arguments))
        backend.load_model(None)
        loaded = live.most
        backend.train_step(make_batch(1, rollouts, words))
        live.most = live.now  # from now on there are moments
        backend.train_step(make_batch(2, rollouts, words))
    seconds = []
    for step in range(3, 3 + arguments.steps):
        started = time.process_time()
        backend.train_step(make_batch(step, rollouts, words))
        seconds.append(time.process_time() - started)
    figures = {"loaded": loaded, "most": live.most, "seconds": seconds}
    rank = os.environ["RANK"]
    (arguments.out / f"{arguments.case}-{rank}.json").write_text(json.dumps(figures))
    backend.close()


def measure_case(arguments: argparse.Namespace, case: str) -> list[dict[str, Any]]:
    """Run all ranks of a case. Returns the figures of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(arguments.tensor):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.tensor)}
        environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.drafter_memory", *sys.argv[1:], "--case", case]
        processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a rank of the case {case} failed")
    return [json.loads((arguments.out / f"{case}-{rank}.json").read_text()) for rank in range(arguments.tensor)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--words", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rollouts", type=int, default=8, help=f"of a step, {PROMPT + COMPLETION} tokens each")
    parser.add_argument("--micro-batch-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        measure_rank(arguments)
        return
    if not (arguments.out / "policy").exists():
        make_policy(arguments.out / "policy", arguments.hidden, 4, arguments.words, head_dim=32)
    table = Table(title=f"{arguments.words} words, {arguments.hidden} wide, {arguments.tensor} tensor ranks")
    for column in ("drafter", "while loading, MiB", "in a step, MiB", "step, CPU s", "range"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for case in CASES:
        ranks = measure_case(arguments, case)
        seconds = ranks[0]["seconds"]
        table.add_row(
            case,
            f"{max(item['loaded'] for item in ranks) / 2**20:.0f}",
            f"{max(item['most'] for item in ranks) / 2**20:.0f}",
            f"{median(seconds):.2f}",
            f"{min(seconds):.2f}-{max(seconds):.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
