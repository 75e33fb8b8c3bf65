"""Measures a weight update: bytes per second against this machine's limits, and how long generation pauses.

    python benchmarks/weight_sync.py                                     # 64 and 256 MiB to 1, 2, 4, 8, 16 processes
    python benchmarks/weight_sync.py --mib 1024 --replicas 1,4 --turns 7 --json weight_sync.json
    python benchmarks/weight_sync.py --policy FOLDER                     # adds a real vLLM replica of that model
    python benchmarks/weight_sync.py --ray-python /path/to/a/python      # adds Ray's object store

Each way moves the same bytes from this process to all receivers at once, checksums included, in turns. Receivers are
processes. Limits measured in the same run: a memory copy by one thread, and one TCP stream over loopback, which a Gloo
transfer to one receiver cannot exceed. `one bucket at a time` is the collective without double buffering. Ray: one
`put`, one `get` in each actor, which shares the memory, and the same checksums. vLLM's own transfer engines (0.32:
NCCL, CUDA IPC and RDMA) need GPUs, so they have no row on a machine without one.

With a replica, tokens are generated before and during updates. `stands still` is the pause that a rollout sees. If the
pause began before the transfer, it would be the sum of both columns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file

from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.records import RolloutRequest, Sampling, TensorMeta, WeightGroup, WeightManifest, WeightOwner
from specrl.spec import parse_spec
from specrl.weights import files
from specrl.weights.group import BroadcastGroup, open_rendezvous_store
from specrl.weights.stream import receive_version, send_version

TENSOR_BYTES = 4 << 20
BUCKET_BYTES = 64 << 20  # default of the run file
TIMEOUT_S = 300.0
RAY = Path(__file__).with_name("weight_sync_ray.py")

Turn = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Seconds of every turn of one way to move `size_bytes` to each of `receivers`."""

    way: str
    size_bytes: int
    receivers: int
    seconds: list[float]

    def rate(self, seconds: float) -> float:
        """GB/s per receiver."""
        return self.size_bytes / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="64,256", help="sizes of the version, in MiB")
    parser.add_argument("--replicas", default="1,2,4,8,16", help="receiving processes")
    parser.add_argument("--turns", type=int, default=5, help="measured turns, after one that warms up")
    parser.add_argument("--policy", type=Path, help="Hugging Face folder of a model for a real replica")
    parser.add_argument("--ray-python", default=sys.executable, help="a Python that has ray; default: this one")
    parser.add_argument("--json", type=Path, help="write every turn here")
    arguments = parser.parse_args()
    console = Console()
    rows = list[Row]()
    replica = asyncio.run(replica_rows(arguments.policy, arguments.turns)) if arguments.policy else {}
    if replica:
        show_replica(console, replica)
    sizes = [int(mib) << 20 for mib in arguments.mib.split(",")]
    counts = [int(count) for count in arguments.replicas.split(",")]
    has_ray = can_run_ray(arguments.ray_python, console)
    try:
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("transfers", total=len(sizes) * len(counts))
            for size in sizes:
                rows += [memory_copy(size, arguments.turns), loopback(size, arguments.turns)]
                for count in counts:
                    rows += transfers(size, count, arguments.turns)
                    rows += [ray(arguments.ray_python, size, count, arguments.turns)] if has_ray else []
                    bar.advance(task)
    finally:  # Ctrl-C shows what has been measured
        show(console, rows)
        if arguments.json:
            result = {"rows": [asdict(row) for row in rows], "replica": replica}
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def some_tensors(size_bytes: int) -> tuple[WeightManifest, list[tuple[str, torch.Tensor]]]:
    """Make bfloat16 tensors of 4 MiB each, and their manifest."""
    count = max(1, size_bytes // TENSOR_BYTES)
    values = torch.randint(0, 255, (count, TENSOR_BYTES), dtype=torch.uint8).view(torch.bfloat16)
    tensors = [(f"t{number}", values[number]) for number in range(count)]
    metas = tuple(TensorMeta(name, WeightOwner.POLICY, "bfloat16", tuple(t.shape)) for name, t in tensors)
    return WeightManifest(metas, BUCKET_BYTES), tensors


# -- limits ----------------------------------------------------------------------------------------------------------


def measured(way: str, size_bytes: int, receivers: int, turns: int, turn: Turn) -> Row:
    """Run one turn to warm up, then time the others."""
    seconds = []
    for number in range(turns + 1):
        began = time.perf_counter()
        turn()
        if number > 0:
            seconds.append(time.perf_counter() - began)
    return Row(way, size_bytes, receivers, seconds)


def memory_copy(size_bytes: int, turns: int) -> Row:
    """Copy by one thread, into allocated memory."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros(size_bytes, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    row = measured("copy in memory", size_bytes, 1, turns, lambda: target.copy_(source))
    torch.set_num_threads(threads)
    return row


def loopback(size_bytes: int, turns: int) -> Row:
    """One TCP stream to another process, which reads and drops it."""
    data = memoryview(bytearray(size_bytes))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        started([(_drain_socket, (server.getsockname()[1],))]),
        server.accept()[0] as connection,
    ):

        def turn() -> None:
            connection.sendall(size_bytes.to_bytes(8, "big"))
            connection.sendall(data)
            connection.recv(1)

        return measured("TCP over loopback", size_bytes, 1, turns, turn)


def _drain_socket(port: int) -> None:
    buffer = memoryview(bytearray(1 << 20))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while header := connection.recv(8):
            left = int.from_bytes(header, "big")
            while left:
                left -= connection.recv_into(buffer[: min(left, len(buffer))])
            connection.sendall(b"k")


# -- ways to move a version ------------------------------------------------------------------------------------------


def transfers(size_bytes: int, count: int, turns: int) -> list[Row]:
    """specrl's own ways: a collective with and without double buffering, and files."""
    return [
        collective("collective", size_bytes, count, turns),
        collective("one bucket at a time", size_bytes, count, turns),
        by_files(size_bytes, count, turns),
    ]


class OneAtATime:
    """A group whose broadcasts block until they are done."""

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group
        self.device = group.device

    def start_broadcast(self, buffer: torch.Tensor) -> Turn:
        """Wait for the broadcast."""
        self._group.start_broadcast(buffer)()
        return lambda: None


def _way(way: str, group: BroadcastGroup) -> Any:
    return OneAtATime(group) if way == "one bucket at a time" else group


def collective(way: str, size_bytes: int, count: int, turns: int) -> Row:
    """Broadcast from this process to `count` others, as the trainer does to its replicas."""
    manifest, tensors = some_tensors(size_bytes)
    store = open_rendezvous_store(count + 1, TIMEOUT_S, "127.0.0.1")
    group = WeightGroup("bench", "127.0.0.1", store.port, 0, count + 1, TIMEOUT_S, "gloo")
    done = multiprocessing.get_context("spawn").Queue()
    members = [replace(group, rank=rank) for rank in range(1, count + 1)]
    receivers = [(_receive, (way, member, manifest, turns + 1, done)) for member in members]
    with started(receivers):
        joined = BroadcastGroup(group, store)

        def turn() -> None:
            sums = send_version(_way(way, joined), manifest, tensors)
            check([done.get(timeout=TIMEOUT_S) for _ in range(count)], sums)

        return measured(way, size_bytes, count, turns, turn)


def _receive(way: str, group: WeightGroup, manifest: WeightManifest, turns: int, done: Any) -> None:
    torch.set_num_threads(1)
    joined = BroadcastGroup(group)
    for _ in range(turns):
        done.put(receive_version(_way(way, joined), manifest).checksums)


def by_files(size_bytes: int, count: int, turns: int) -> Row:
    """Write in this process and read in `count` others, through the page cache of one machine."""
    manifest, tensors = some_tensors(size_bytes)
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    numbers = iter(range(turns + 1))
    orders = [context.Queue() for _ in range(count)]
    receivers = [(_read, (order, manifest, turns + 1, done)) for order in orders]
    with tempfile.TemporaryDirectory() as directory, started(receivers):

        def turn() -> None:
            folder = Path(directory) / f"version-{next(numbers)}"
            sums = files.write_version(folder, manifest, tensors)
            for order in orders:
                order.put(str(folder))
            check([done.get(timeout=TIMEOUT_S) for _ in range(count)], sums)

        return measured("files", size_bytes, count, turns, turn)


def _read(order: Any, manifest: WeightManifest, turns: int, done: Any) -> None:
    torch.set_num_threads(1)
    for _ in range(turns):
        done.put(files.read_version(Path(order.get(timeout=TIMEOUT_S)), manifest).checksums)


def check(received: Sequence[tuple[int, ...]], sent: tuple[int, ...]) -> None:
    """Exit unless every receiver has every bit."""
    if any(sums != sent for sums in received):
        raise SystemExit("received bytes must equal those sent, got other checksums; the figures would mean nothing")


def can_run_ray(python: str, console: Console) -> bool:
    """Whether that interpreter has what Ray's rows need. Prints what is missing."""
    if subprocess.run([python, "-c", "import ray, xxhash"], capture_output=True, check=False).returncode == 0:
        return True
    words = f"no rows for Ray: {python} lacks ray or xxhash; see --ray-python, and the extra specrl[benchmark]"
    console.print(words, markup=False, style="dim")
    return False


def ray(python: str, size_bytes: int, count: int, turns: int) -> Row:
    """Measure Ray's object store, in its own process."""
    command = [python, str(RAY), str(size_bytes), str(count), str(turns)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    return Row("Ray object store", size_bytes, count, json.loads(found.stdout.splitlines()[-1]))


@contextmanager
def started(work: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[None]:
    """Processes that end by themselves, or when this block fails."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=arguments, daemon=True) for target, arguments in work]
    for process in processes:
        process.start()
    try:
        yield
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()


# -- a real replica --------------------------------------------------------------------------------------------------


async def replica_rows(policy: Path, turns: int) -> dict[str, list[float]]:
    """Seconds of transfer and of the pause, and tokens per second without and during transfers, by turn."""
    generation = {"sampling": {"maxTokens": 384}, "speculation": {"none": {}}, "maxLiveRollouts": 8}
    spec = parse_spec(
        {
            "name": "weight-sync",
            "model": {"path": str(policy), "dtype": "float32", "maxLength": 512},
            "prompts": {"source": {"generated": {"family": "ledger", "count": 8}}, "maxTokens": 64},
            "rewards": {"exact": {}},
            "generation": generation,
            "trainer": {"optimizer": {"learningRate": "1e-3"}},
            "schedule": {"steps": 1, "promptsPerStep": 1, "groupSize": 2},
        }
    )
    tensors = sorted(load_file(policy / "model.safetensors").items())
    metas = [TensorMeta(n, WeightOwner.POLICY, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors]
    manifest = WeightManifest(tuple(metas), BUCKET_BYTES)
    found: dict[str, list[float]] = {"transfer": [], "standsStill": [], "tokensPerS": [], "tokensPerSDuring": []}
    engine = VllmEngine(spec, "gen-0")
    await engine.start()
    store = open_rendezvous_store(2, TIMEOUT_S, "127.0.0.1")
    group = WeightGroup("bench", "127.0.0.1", store.port, 1, 2, TIMEOUT_S, "gloo")
    sender: list[BroadcastGroup] = []

    def broadcast() -> tuple[int, ...]:
        if not sender:
            sender.append(BroadcastGroup(replace(group, rank=0), store))
        return send_version(sender[0], manifest, tensors)

    async def tokens() -> int:
        return (await engine.get_status()).speculation.generated_tokens

    for turn in range(turns + 1):
        requests = [RolloutRequest(f"{turn}-{n}", "g", n, (3 + n, 5), Sampling(384, seed=n)) for n in range(8)]
        running = asyncio.create_task(_exhaust(engine, requests))
        while await tokens() == 0:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        first = await tokens()
        began = time.perf_counter()
        await asyncio.sleep(0.5)
        second = await tokens()
        between = time.perf_counter()
        received, sums = await asyncio.gather(
            engine.receive_weights(group, manifest, turn), asyncio.to_thread(broadcast)
        )
        third = await tokens()
        arrived = time.perf_counter()
        check([received.checksums], sums)
        timing = await engine.load_weights(received)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if turn > 0:
            found["transfer"].append(arrived - between)
            found["standsStill"].append(timing.pause_s + timing.load_s + timing.resume_s)
            found["tokensPerS"].append((second - first) / (between - began))
            found["tokensPerSDuring"].append((third - second) / (arrived - between))
    await engine.close()
    return found


async def _exhaust(engine: VllmEngine, requests: list[RolloutRequest]) -> None:
    async for _ in engine.generate(requests, False):
        pass


# -- tables ----------------------------------------------------------------------------------------------------------


def show(console: Console, rows: list[Row]) -> None:
    """Make the table of GB/s per receiver: median and range, and relative to the limits measured with the same size."""
    table = Table(title="bytes of one version to all receivers, checksums included")
    for name in ("MiB", "receivers", "way", "GB/s each", "range", "of a copy", "of loopback", "s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        limits = {limit.way: limit for limit in rows if limit.size_bytes == row.size_bytes}
        rate = row.rate(median(row.seconds))
        shares = [
            f"{rate / limits[way].rate(median(limits[way].seconds)):.2f}"
            for way in ("copy in memory", "TCP over loopback")
        ]
        spread = f"{row.rate(max(row.seconds)):.2f}-{row.rate(min(row.seconds)):.2f}"
        table.add_row(
            *(str(row.size_bytes >> 20), str(row.receivers), row.way, f"{rate:.2f}", spread, *shares),
            f"{median(row.seconds):.3f}",
        )
    console.print(table)


def show_replica(console: Console, found: dict[str, list[float]]) -> None:
    """Print what a rollout of a real replica sees of an update."""
    shares = [still / (still + move) for still, move in zip(found["standsStill"], found["transfer"], strict=True)]
    during = [now / before for now, before in zip(found["tokensPerSDuring"], found["tokensPerS"], strict=True)]
    console.print(
        f"vLLM replica: transfer {median(found['transfer']):.3f} s, generation stands still "
        f"{median(found['standsStill']):.3f} s: {median(shares):.2f} of the update (range {min(shares):.2f}-"
        f"{max(shares):.2f}); tokens per second during the transfer {median(during):.2f} of those without one (range "
        f"{min(during):.2f}-{max(during):.2f})"
    )


if __name__ == "__main__":
    main()
