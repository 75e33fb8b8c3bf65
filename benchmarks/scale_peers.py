"""The peers of `coordinator_scale.py`: replicas and a trainer with the real gRPC services, and the benchmark's clock.

    live --its turn comes--> finished --stream--> coordinator --stream--> the next request: a dispatch

One process has all replicas. Each is a real GenerationService with its own port, over an engine that computes nothing.
Rollouts finish roughly in stream order, across replicas: those of at most two later steps, drawn at random, finish
before a rollout, so that replicas take turns. A rollout's payload is made when it finishes. The trainer is a real
TrainerService that counts steps. An update makes every call but moves no weights.

A load is closed or open. Closed: at most `outstanding` seats are free at any time, at most four steps of rollouts are
finished and untrained, and the next rollout finishes as soon as both allow it. That is the rate at which the
coordinator can receive, store, batch and train. Open: rollouts finish at a fixed rate, and the dispatch latency is the
time from a free seat to the request that fills it. Seats that were free during an update do not count, because no
replica may get work then.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from specrl.coordinator.schedule.scheduler import SlotId
from specrl.generation.engine import LoadTiming
from specrl.generation.service import GenerationService
from specrl.records import (
    NO_DRAFTER,
    Batch,
    FinishReason,
    GenerationStatus,
    Peer,
    Role,
    Rollout,
    RolloutRequest,
    SpeculationCounters,
    StreamPlace,
    TensorMeta,
    TrainerStatus,
    TrainMetrics,
    VersionSpan,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
    WeightOwner,
)
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.membership import stay_registered
from specrl.rpc.server import start_server
from specrl.spec import RunSpec, digest_spec
from specrl.trainer.service import TrainerService

CHECKSUMS = (1,)
GROUP = 16
VOCAB = 150_000


@dataclass
class Payload:
    """The payload of every rollout: token ids [T] int32, log-probabilities [T] float32, text."""

    token_ids_T: np.ndarray
    logprobs_T: np.ndarray
    text: str

    @classmethod
    def of(cls, tokens: int) -> Payload:
        random = np.random.default_rng(0)
        token_ids_T = random.integers(0, VOCAB, tokens).astype(np.int32)
        return cls(token_ids_T, -random.random(tokens).astype(np.float32), "word" * tokens)


@dataclass
class Live:
    """A rollout in progress: where its stream gets it from."""

    request: RolloutRequest
    stream: asyncio.Queue[Rollout]
    engine: IdleEngine


@dataclass
class Floor:
    """All replicas, and what is measured on them.

    rollouts_per_step: twice as many later rollouts may finish before one. filled: seats that were filled after one was
    freed. latencies_s: of dispatches that no update interrupted.
    """

    payload: Payload
    rollouts_per_step: int
    engines: list[IdleEngine] = field(default_factory=list)
    started: int = 0
    finished: int = 0
    filled: int = 0
    updates: int = 0
    latencies_s: list[float] = field(default_factory=list)
    was_filled: asyncio.Event = field(default_factory=asyncio.Event)
    _order: list[tuple[float, int, Live]] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 - not for security

    @property
    def live(self) -> int:
        return len(self._order)

    def start(self, item: Live) -> None:
        """Add a rollout that is in progress."""
        self.started += 1
        slot = SlotId.from_name(item.request.rollout_id)
        assert slot is not None, "all rollouts are of the stream"
        place = slot.step * self.rollouts_per_step + slot.index * GROUP + slot.sample
        late = self._random.uniform(0, 2 * self.rollouts_per_step)
        heapq.heappush(self._order, (place + late, self.started, item))
        self.was_filled.set()

    async def fill(self, seats: int) -> None:
        """Wait until so many rollouts are live."""
        while self.live < seats:
            self.was_filled.clear()
            await self.was_filled.wait()

    async def finish_one(self) -> None:
        """Finish the next rollout, once its replica computes."""
        while not self._order or not self._order[0][2].engine.is_running:  # noqa: ASYNC110 - no event covers both conditions
            await asyncio.sleep(0.001)
        item = heapq.heappop(self._order)[2]
        item.engine.finish(item)
        self.finished += 1

    async def saturate(self, backend: CountingBackend, steps: int, outstanding: int) -> None:
        """Finish rollouts as fast as the coordinator takes them, until so many more steps are trained."""
        last = backend.step + steps
        while backend.step < last:
            untrained = self.finished - backend.trained
            if self.finished - self.filled >= outstanding or untrained >= 4 * backend.rollouts_per_step:
                await asyncio.sleep(0.001)
                continue
            await self.finish_one()
            await asyncio.sleep(0)

    async def pace(self, count: int, per_second: float) -> None:
        """Finish `count` rollouts at a fixed rate. A delay is not made up for."""
        for _ in range(count):
            due = time.monotonic() + 1 / per_second
            await self.finish_one()
            await asyncio.sleep(max(0.0, due - time.monotonic()))


class IdleEngine:
    """Implements Engine without computing. The floor finishes its rollouts."""

    def __init__(self, name: str, floor: Floor) -> None:
        self.name = name
        self._floor = floor
        self.live = 0
        self.is_running = True
        self._freed: deque[tuple[float, int]] = deque()
        self._version = -1
        self._staged = -1

    def finish(self, item: Live) -> None:
        """Give a rollout to its stream. Its seat is free from now on."""
        payload = self._floor.payload
        self.live -= 1
        tokens = len(payload.token_ids_T)
        self._freed.append((time.monotonic(), self._floor.updates))
        item.stream.put_nowait(
            Rollout(
                rollout_id=item.request.rollout_id,
                group_id=item.request.group_id,
                sample_index=item.request.sample_index,
                token_ids_T=payload.token_ids_T,
                sampler_logprobs_T=payload.logprobs_T,
                versions=(VersionSpan(self._version, 0, tokens),),
                finish_reason=FinishReason.LENGTH,
                replica_id=self.name,
                text=payload.text,
                seconds=1.0,
            )
        )

    def _note_arrival(self) -> None:
        if self._freed:
            freed_s, updates = self._freed.popleft()
            self._floor.filled += 1
            if updates == self._floor.updates:
                self._floor.latencies_s.append(time.monotonic() - freed_s)

    async def start(self) -> None: ...

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        stream: asyncio.Queue[Rollout] = asyncio.Queue()
        for request in requests:
            self._note_arrival()
            self.live += 1
            self._floor.start(Live(request, stream, self))
        for _ in requests:
            yield await stream.get()

    async def pause(self) -> float:
        self.is_running = False
        return 0.0

    async def resume(self) -> None:
        self.is_running = True

    async def receive_weights(
        self, group: WeightGroup, manifest: WeightManifest, policy_version: int
    ) -> WeightChecksums:
        self._staged = policy_version
        return WeightChecksums(policy_version, CHECKSUMS)

    async def load_weights(self, sent: WeightChecksums) -> LoadTiming:
        self._floor.updates += 1
        self._version = self._staged
        return LoadTiming(0.0, 0.0, 0.0)

    async def discard_weights(self) -> None: ...

    async def get_status(self) -> GenerationStatus:
        return GenerationStatus(
            self.name, self._version, not self.is_running, self.live, SpeculationCounters(), NO_DRAFTER
        )

    async def close(self) -> None: ...


class CountingBackend:
    """Implements TrainerBackend without a model. `trained`: rollouts of all steps."""

    nccl_transport = weight_transport = ""  # there is no group

    def __init__(self, rollouts_per_step: int) -> None:
        self.rollouts_per_step = rollouts_per_step
        self.step = self.trained = 0

    def load_model(self, checkpoint: Path | None) -> None: ...

    def close(self) -> None: ...

    def get_status(self) -> TrainerStatus:
        return TrainerStatus(self.step, self.step, True, 1)

    def train_step(self, batch: Batch) -> TrainMetrics:
        assert batch.step == self.step + 1, "steps are trained in order"
        self.step = batch.step
        self.trained = self.trained + len(batch.rollouts)
        return TrainMetrics.for_empty_batch(0.0)

    def describe_weights(self) -> WeightManifest:
        return WeightManifest((TensorMeta("policy", WeightOwner.POLICY, "float32", (1,)),), 1 << 20)

    def open_weight_group(self, group: WeightGroup) -> int:
        return 1

    def broadcast_weights(self, group_id: str) -> WeightChecksums:
        return WeightChecksums(self.step, CHECKSUMS, NO_DRAFTER)

    def save_checkpoint(self, directory: Path, stream: StreamPlace | None = None) -> Future[None]:
        saved: Future[None] = Future()
        saved.set_result(None)
        return saved


@dataclass
class Used:
    """CPU seconds of processes so far, and their peak memory.

    The first process is the coordinator, and `writer` is its thread that calls the store. A second one is the store's
    server.
    """

    processes: list[psutil.Process]
    writer: int
    peak_bytes: int = 0

    @property
    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)

    @property
    def durable_s(self) -> float:
        """CPU seconds of durable writes: of the thread that makes them, and of the store's server."""
        coordinator, *server = self.processes
        written = sum(t.user_time + t.system_time for t in coordinator.threads() if t.id == self.writer)
        return written + sum(sum(process.cpu_times()[:2]) for process in server)

    async def watch(self) -> None:
        """Sample the memory until cancelled."""
        while True:
            now = sum(process.memory_full_info().pss for process in self.processes)
            self.peak_bytes = max(self.peak_bytes, now)
            await asyncio.sleep(1.0)


class Peers:
    """Replicas and trainer of a run, registered with its coordinator. Use as `async with Peers(...) as peers`."""

    def __init__(self, spec: RunSpec, folder: Path, address: str, tokens: int) -> None:
        self._spec = spec
        self._folder = folder
        self._client = CoordinatorClient(address)
        self.backend = CountingBackend(spec.schedule.prompts_per_step * spec.schedule.group_size)
        self.floor = Floor(Payload.of(tokens), self.backend.rollouts_per_step)
        self._servers: list[Any] = []
        self._memberships: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Peers:
        for number in range(self._spec.generation.replicas):
            engine = IdleEngine(f"gen-{number:03d}", self.floor)
            self.floor.engines.append(engine)
            service = GenerationService(engine, self._spec.weights, float(self._spec.generation.reattach_s))
            await self._join(service, engine.name, Role.GENERATION, engine)
        trainer = TrainerService(self.backend, self._spec, self._folder, "127.0.0.1")  # type: ignore[arg-type]
        await trainer.load_model()
        await self._join(trainer, "trainer", Role.TRAINER, None)
        return self

    async def __aexit__(self, *_: object) -> None:
        for membership in self._memberships:
            membership.cancel()
        await asyncio.gather(*self._memberships, return_exceptions=True)
        await asyncio.gather(*(server.stop(None) for server in self._servers))
        await self._client.close()

    async def _join(self, service: Any, name: str, role: Role, engine: IdleEngine | None) -> None:
        server, port = await start_server(service.add_to, "127.0.0.1", 0)
        self._servers.append(server)
        peer = Peer(name, role, f"127.0.0.1:{port}", digest_spec(self._spec))
        staying = stay_registered(self._client, peer, engine.get_status if engine is not None else None)
        self._memberships.append(asyncio.create_task(staying))
