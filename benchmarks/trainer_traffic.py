"""Measures the bytes that each rank of a trainer sends and receives for a snapshot and for a batch.

    python benchmarks/trainer_traffic.py --out runs/trainer-traffic               # 4 and 8 local ranks
    python benchmarks/trainer_traffic.py --out runs/trainer-traffic --layouts data=4 tensor=2,pipeline=2

The policy is a random Qwen3. Bytes are those that TCP counts for the sockets of a rank's process, so they contain what
Gloo adds. A snapshot is of weights and moments, after one step; the first also plans who sends what, so the second is
shown, too. A batch is what rank 0 sends to the other ranks for a step, and what these pass on: no rank trains on it
here.

With PYTHONPATH it measures another tree, so that two versions can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from google.protobuf.empty_pb2 import Empty
from rich.console import Console
from rich.table import Table
from trainer import make_policy

from specrl.api.v1 import trainer_pb2
from specrl.records import Batch, FinishReason, Rollout, TrainMetrics, TrainRollout, VersionSpan, wire
from specrl.spec import RunSpec, parse_spec
from specrl.trainer.calls import RankCalls
from specrl.trainer.megatron_backend import MegatronBackend
from specrl.trainer.megatron_backend.checkpoint import take_snapshot
from specrl.trainer.ranks import AllRanks, ControlGroup, follow_rank_0

LAYOUTS = ("data=4", "tensor=4", "tensor=2,data=2", "pipeline=2,data=2", "data=8", "tensor=2,pipeline=2,data=2")
ROLLOUTS = 16
PROMPT = 16  # tokens
COMPLETION = 112
BYTES_SENT = 120  # offsets in struct tcp_info of linux/tcp.h: tcpi_bytes_acked, then tcpi_bytes_received


def count_traffic() -> tuple[int, int]:
    """Count the bytes that this process has sent and received over its open TCP connections."""
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # not a TCP socket
            continue
        one, other = struct.unpack_from("QQ", info, BYTES_SENT)
        sent += one
        received += other
    return sent, received


def measure_traffic(work: Callable[[], object]) -> list[int]:
    """Run `work` on every rank. Returns the bytes that this one has sent and received for it."""
    dist.barrier()
    before = count_traffic()
    work()
    # What a rank has sent counts once it is acknowledged, so wait for the others, which adds some hundred bytes.
    dist.barrier()
    return [after - count for after, count in zip(count_traffic(), before, strict=True)]


def make_spec(policy: Path, parallelism: dict[str, int]) -> RunSpec:
    """Make a run without drafter."""
    return parse_spec(
        {
            "name": "benchmark",
            "model": {"path": str(policy), "dtype": "float32", "maxLength": 512},
            "prompts": {"source": {"generated": {"family": "addition", "count": 10}}, "maxTokens": 64},
            "rewards": {"exact": {}},
            "generation": {"sampling": {"maxTokens": COMPLETION}, "speculation": {"none": {}}},
            "schedule": {"promptsPerStep": 4, "groupSize": 4, "steps": 10},
            "trainer": {"parallelism": parallelism, "optimizer": {"learningRate": "1e-6"}, "microBatchTokens": 512},
        }
    )


def make_batch(step: int, vocab: int) -> Batch:
    """Make a batch with four characters of text for each token, about as many as English has."""
    rng = np.random.default_rng(step)
    items = []
    for number in range(ROLLOUTS):
        rollout = Rollout(
            rollout_id=f"{step}-{number}",
            group_id=f"group-{number // 4}",
            sample_index=number % 4,
            token_ids_T=rng.integers(0, vocab, COMPLETION).astype(np.int32),
            sampler_logprobs_T=np.full(COMPLETION, -1.0, np.float32),
            versions=(VersionSpan(step - 1, 0, COMPLETION),),
            finish_reason=FinishReason.LENGTH,
            replica_id="gen-0",
            text="word" * COMPLETION,
            seconds=1.0,
        )
        items.append(TrainRollout(tuple(range(PROMPT)), rollout, advantage=1.0 - 2.0 * (number % 2), reward=0.0))
    return Batch(step, tuple(items))


class NoTraining:
    """A backend that trains on nothing, so that only the call itself is measured."""

    def check_rollouts(self, rollouts: Sequence[TrainRollout], *, is_step: bool) -> None:
        """Accept all rollouts."""

    def train_step(self, batch: Batch) -> TrainMetrics:
        """Check that the batch has come, and return no figures."""
        assert len(batch.rollouts) == ROLLOUTS
        return TrainMetrics.for_empty_batch(0.0)

    def close(self) -> None:
        """Nothing to close."""


def measure_rank(policy: Path, parallelism: dict[str, int], out: Path) -> None:
    """Measure one rank, and write what it sends and receives."""
    spec = make_spec(policy, parallelism)
    backend = MegatronBackend(spec)
    backend.load_model(None)
    batch = make_batch(1, backend.config.vocab_size)
    backend.train_step(batch)
    models = backend.models
    found = {name: measure_traffic(lambda: take_snapshot(models, models.state)) for name in ("first", "second")}
    control = ControlGroup()
    backend_of_calls: Any = NoTraining()
    calls = RankCalls(backend_of_calls, spec, out.parent, "127.0.0.1")

    def send_batch() -> None:
        if control.rank > 0:
            follow_rank_0(calls, control)
            return
        ranks = AllRanks(calls, control)
        (request,) = [trainer_pb2.TrainPartsRequest.FromString(part) for part in wire.encode_train_parts(batch)]
        ranks.run_call(RankCalls.TrainParts, request)
        ranks.run_call(RankCalls.Close, Empty())

    found["batch"] = measure_traffic(send_batch)
    (out / f"{control.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_layout(policy: Path, layout: str, out: Path) -> list[dict[str, list[int]]]:
    """Measure the ranks of a layout, each in a process of its own. Returns what each rank has found."""
    parallelism = {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
    world = int(np.prod(list(parallelism.values())))
    folder = out / layout
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--policy", str(policy), "--layouts", layout, "--out", str(folder)]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)}) for rank in range(world)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"a rank of {layout} failed; its error is above")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def main() -> None:
    """Measure every layout and print one row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--policy", type=Path, help=argparse.SUPPRESS)  # of one rank's process
    args = parser.parse_args()
    if "RANK" in os.environ:
        (layout,) = args.layouts
        parallelism = {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
        measure_rank(args.policy, parallelism, args.out)
        return
    policy = make_policy(args.out / "policy", hidden=256, layers=4, head_dim=32)
    table = Table(
        "layout", "bytes", "first snapshot", "second snapshot", "batch", title="most of a rank, mean of ranks"
    )
    for layout in args.layouts:
        found = measure_layout(policy, layout, args.out)
        for place, name in enumerate(("sent", "received")):
            by_kind = [[rank[kind][place] for rank in found] for kind in ("first", "second", "batch")]
            table.add_row(layout, name, *(f"{max(row):,} {round(sum(row) / len(row)):,}" for row in by_kind))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
