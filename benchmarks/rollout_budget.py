"""Measures the cost of each part of a rollout's way through the coordinator, beside the whole.

    python -m benchmarks.rollout_budget
    python -m benchmarks.rollout_budget --ray-python RAY/bin/python   # an interpreter with ray, numpy and psutil

Each part does with a rollout of 8192 tokens what the coordinator does, alone in a process, and is measured in CPU time
of that process. The whole is a row of `coordinator_scale.py` with 8 replicas. The parts leave unexplained the
scheduler, the tasks of the event loop, the observer, and what the parts cost each other in caches.

Printed: each part as a share of the whole. With Ray: the cost of its flow, and how much faster than Ray a coordinator
would be that only forwards rollouts from one gRPC call to another.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from benchmarks.coordinator_scale import Load, has_ray, measure, measure_ray, quieten
from benchmarks.scale_peers import Payload
from rich.console import Console
from rich.table import Table

from specrl.coordinator.ledger import SqliteStore, StoredRollout
from specrl.records import Batch, FinishReason, GradedRollout, Reward, Rollout, TrainRollout, VersionSpan, wire

TOKENS = 8192
PROMPT_TOKENS = 256
GROUP = 16
TOGETHER = 8
ROUNDS = 60
"""Rollouts in a group."""


def a_message() -> bytes:
    """Make what a replica sends for one rollout."""
    payload = Payload.of(TOKENS)
    versions = (VersionSpan(3, 0, TOKENS),)
    ids_T = payload.token_ids_T
    names = ("000001-00000-000-0", "000001-00000", 0)
    rollout = Rollout(*names, ids_T, payload.logprobs_T, versions, FinishReason.LENGTH, "gen-000", payload.text, 1.0)
    return wire.rollout_to_bytes(rollout)


def read_and_check(message: bytes) -> None:
    """Parse a message into a checked record."""
    wire.rollout_from_bytes(message).check(TOKENS, range(3, 4))


def of_cpu(work: Callable[[], object]) -> float:
    """CPU seconds per rollout of `work`, over `ROUNDS` groups."""
    work()
    began = time.process_time()
    for _ in range(ROUNDS):
        work()
    return (time.process_time() - began) / (ROUNDS * GROUP)


async def of_cpu_async(work: Callable[[], Awaitable[object]]) -> float:
    """The same for work that is awaited."""
    await work()
    began = time.process_time()
    for _ in range(ROUNDS):
        await work()
    return (time.process_time() - began) / (ROUNDS * GROUP)


# -- the other side of a wire -----------------------------------------------------------------------------------------


async def answer() -> None:
    """Serve calls that send a rollout or take a part of a batch. Prints the port."""
    message = a_message()

    async def one_each(requests: Any, _context: Any) -> Any:
        async for _ in requests:
            yield message

    async def take(requests: Any, _context: Any) -> bytes:
        async for _ in requests:
            pass
        return b""

    methods = {
        "stream": grpc.stream_stream_rpc_method_handler(one_each),
        "take": grpc.stream_unary_rpc_method_handler(take),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("budget", methods),))
    sys.stdout.write(f"{server.add_insecure_port('127.0.0.1:0')}\n")
    sys.stdout.flush()
    await server.start()
    await server.wait_for_termination()


async def over_the_wire(port: int, batch: Batch) -> dict[str, float]:
    """CPU seconds per rollout on this side of the wire."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = bytes(PROMPT_TOKENS * 3)
        take: Any = channel.stream_unary("/budget/take")

        stream: Any = channel.stream_stream("/budget/stream")()

        async def messages() -> None:
            for _ in range(GROUP):
                await stream.write(request)
            for _ in range(GROUP):
                await stream.read()

        async def send() -> None:
            sending = take()
            for part in wire.encode_train_parts(batch):
                await sending.write(part)
            await sending.done_writing()
            await sending

        found = {
            "gRPC: its request and its message": await of_cpu_async(messages),
            "gRPC: its part of a batch": await of_cpu_async(send),
        }
        await stream.done_writing()
        return found


# -- the table ---------------------------------------------------------------------------------------------------------


def in_the_store(message: bytes) -> dict[str, float]:
    """CPU seconds per rollout in SQLite: eight in each transaction, and steps of 8 groups are deleted one at a time."""
    graded = wire.graded_to_bytes(GradedRollout(wire.rollout_from_bytes(message), Reward(1.0)))
    spent = {"SQLite: write it": 0.0, "SQLite: forget it": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "store.db")
        for step in range(1, 9):
            began = time.process_time()
            for index in range(8):
                for first in range(0, GROUP, TOGETHER):
                    samples = range(first, first + TOGETHER)
                    store.put_rollouts([StoredRollout(step, index, sample, 0, graded) for sample in samples])
            store.put_batch(step, b"outline", list(range(8)))
            store.finish_step(step, {"step": step})
            spent["SQLite: write it"] += time.process_time() - began
            began = time.process_time()
            store.forget_batches(step - 2)
            spent["SQLite: forget it"] += time.process_time() - began
        store.close()
    count = 8 * 8 * GROUP
    return {
        "SQLite: write it": spent["SQLite: write it"] / count,
        "SQLite: forget it": spent["SQLite: forget it"] / (count * 6 / 8),
    }


def main() -> None:
    """Measure all parts and the whole, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray-python", type=Path, help="an interpreter that has Ray")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        asyncio.run(answer())
        return
    if arguments.ray_python is not None and not has_ray(arguments.ray_python):
        parser.error(f"--ray-python must import ray, numpy and psutil, got {arguments.ray_python}; install them there")
    quieten()
    message = a_message()
    rollout = wire.rollout_from_bytes(message)
    batch = Batch(4, (TrainRollout(tuple(range(2, 2 + PROMPT_TOKENS)), rollout, 0.5),) * GROUP, (0,))
    parts = {"read its message, check it": of_cpu(lambda: [read_and_check(message) for _ in range(GROUP)])}
    with subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--answer"], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        try:
            on_the_wire = asyncio.run(over_the_wire(int(other.stdout.readline()), batch))
        finally:
            other.kill()
    parts |= on_the_wire | in_the_store(message)
    load = Load(8, 16, 2000, TOKENS, 8, 64)
    row = measure(load, "sqlite")
    whole = row.cpu_s / row.rollouts
    table = Table("part", "of the whole")
    for name, cpu_s in parts.items():
        table.add_row(name, f"{cpu_s / whole:.2f}")
    table.add_row("the coordinator: all of a rollout", "1.00")
    table.add_row("  of it on the thread of the store", f"{row.durable_s / row.cpu_s:.2f}")
    limit = ""
    if arguments.ray_python is not None:
        ray = 1 / measure_ray(load, arguments.ray_python).per_core
        table.add_row("Ray: all of a rollout, not checked and not kept", f"{ray / whole:.2f}")
        limit = f"; gRPC's parts alone are {ray / sum(on_the_wire.values()):.1f}x as fast as Ray's whole"
    console = Console(width=100)
    console.print(table)
    console.print(f"the whole took {1000 * whole:.2f} ms here{limit}")


if __name__ == "__main__":
    main()
