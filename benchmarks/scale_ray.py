"""The flow of `coordinator_scale.py` through Ray. That benchmark runs it in an interpreter with ray, numpy and psutil.

Ray is used as in NeMo-RL (algorithms/async_utils.py: ReplayBuffer, AsyncTrajectoryCollector) and verl
(fully_async_policy: Rollouter, MessageQueue):

    Rollouter (async actor) --generate.remote--> Replica (async actor, a process each), its seats kept filled
    Rollouter --a group of 16, put_sample.remote--> Queue (async actor with a deque)
    trainer (this process) --get_samples.remote--> Queue, a step's groups at a time

Payloads are numpy arrays, which Ray passes without a copy where it can; verl's are lists. Rollouts are neither checked
nor stored. Replicas take turns and measure latencies like those of `scale_peers.py`. CPU time and memory are those of
all Ray processes but replicas and trainer.

Prints one line of JSON: rollouts, seconds, cpu_s, peak_bytes, latencies_ms.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import psutil
import ray

OBJECT_STORE_BYTES = 2 << 30


@ray.remote
class Replica:
    """Holds requests, and finishes the oldest when its load allows."""

    def __init__(self, tokens: int) -> None:
        random = np.random.default_rng(0)
        self._payload = {
            "token_ids": random.integers(0, 150_000, tokens).astype(np.int32),
            "logprobs": -random.random(tokens).astype(np.float32),
            "text": "word" * tokens,
        }
        self._live: deque[tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]] = deque()
        self._freed: deque[float] = deque()
        self._filled = asyncio.Event()
        self.latencies_ms: list[float] = []

    def pid(self) -> int:
        return os.getpid()

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._freed:
            self.latencies_ms.append(1000 * (time.monotonic() - self._freed.popleft()))
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._live.append((request, future))
        self._filled.set()
        return await future

    async def _finish_one(self) -> None:
        while not self._live:
            self._filled.clear()
            await self._filled.wait()
        request, future = self._live.popleft()
        self._freed.append(time.monotonic())
        future.set_result(self._payload | {"rollout_id": request["rollout_id"], "replica": os.getpid()})

    async def saturate(self, count: int, outstanding: int) -> None:
        """Finish `count` rollouts, at most `outstanding` ahead of the requests that fill their seats."""
        for _ in range(count):
            while len(self._freed) >= outstanding:
                self._filled.clear()
                await self._filled.wait()
            await self._finish_one()
            await asyncio.sleep(0)

    async def pace(self, count: int, per_second: float) -> list[float]:
        """Finish `count` rollouts at a fixed rate. Returns the latencies meanwhile."""
        self.latencies_ms.clear()
        for _ in range(count):
            due = time.monotonic() + 1 / per_second
            await self._finish_one()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        return self.latencies_ms


@ray.remote
class Queue:
    """The queue of groups between rollouter and trainer."""

    def __init__(self) -> None:
        self._samples: deque[Any] = deque()
        self._more = asyncio.Condition()

    async def put_sample(self, sample: list[dict[str, Any]]) -> None:
        async with self._more:
            self._samples.append(sample)
            self._more.notify_all()

    async def get_samples(self, count: int) -> list[Any]:
        async with self._more:
            await self._more.wait_for(lambda: len(self._samples) >= count)
            return [self._samples.popleft() for _ in range(count)]


@ray.remote
class Rollouter:
    """Keeps all seats of all replicas filled, and puts complete groups into the queue."""

    def __init__(self, replicas: list[Any], queue: Any, load: dict[str, Any]) -> None:
        self._replicas = replicas
        self._queue = queue
        self._load = load
        self._prompt = list(range(load["prompt_tokens"]))
        self._groups: dict[int, list[dict[str, Any]]] = {}
        self._places = itertools.count()
        self._seats: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for replica in self._replicas:
            for _ in range(self._load["live"]):
                self._seats.append(asyncio.create_task(self._keep_filled(replica)))

    async def _keep_filled(self, replica: Any) -> None:
        while True:
            place = next(self._places)
            request = {"rollout_id": str(place), "prompt_token_ids": self._prompt, "seed": place}
            rollout = await replica.generate.remote(request)
            number = place // self._load["group"]
            group = self._groups.setdefault(number, [])
            group.append(rollout)
            if len(group) == self._load["group"]:
                del self._groups[number]
                await self._queue.put_sample.remote(group)


class Used:
    """CPU seconds and memory of Ray's processes but `excluded`."""

    def __init__(self, excluded: set[int]) -> None:
        self._processes = [p for p in psutil.Process().children(recursive=True) if p.pid not in excluded]
        self.peak_bytes = 0

    @property
    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes if process.is_running())

    def look(self) -> None:
        """Record the memory. Pages that processes share count once."""
        now = sum(process.memory_full_info().pss for process in self._processes if process.is_running())
        self.peak_bytes = max(self.peak_bytes, now)


def train(queue: Any, load: dict[str, Any], work: list[Any], used: Used) -> list[Any]:
    """Take steps from the queue until `work` is done. Returns its results."""
    step = queue.get_samples.remote(load["prompts_per_step"])
    pending = work
    while pending:
        ready, _ = ray.wait([step, *pending], num_returns=1)
        if ready[0] == step:
            for group in ray.get(step):
                assert len(group) == load["group"]
            used.look()
            step = queue.get_samples.remote(load["prompts_per_step"])
        pending = [item for item in pending if item not in ready]
    return ray.get(work)


def main() -> None:
    """Measure one row."""
    load = json.loads(sys.argv[1])
    count = load["replicas"]
    ray.init(
        num_cpus=count + 4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level="ERROR",
    )
    concurrency = load["live"] + 8
    replicas = [Replica.options(max_concurrency=concurrency).remote(load["tokens"]) for _ in range(count)]
    queue = Queue.options(max_concurrency=32).remote()
    rollouter = Rollouter.options(max_concurrency=32).remote(replicas, queue, load)
    ray.get(rollouter.start.remote())
    used = Used({*ray.get([replica.pid.remote() for replica in replicas])})
    each = load["rollouts"] // count
    free = max(1, load["outstanding"] // count)
    train(queue, load, [replica.saturate.remote(each // 4, free) for replica in replicas], used)
    began = time.monotonic()
    cpu_s = used.cpu_s
    train(queue, load, [replica.saturate.remote(each, free) for replica in replicas], used)
    seconds = time.monotonic() - began
    cpu_s = used.cpu_s - cpu_s
    rate = load["paced_share"] * each / seconds
    latencies = train(queue, load, [replica.pace.remote(each // 2, rate) for replica in replicas], used)
    found = {
        "rollouts": each * count,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "peak_bytes": used.peak_bytes,
        "latencies_ms": [latency for some in latencies for latency in some],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
