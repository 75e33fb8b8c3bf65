"""A whole run in one event loop: real loop, store, gRPC and weight broadcast; stand-in engine and trainer.

Peers can be killed and started again at any moment, as processes would be; `Run.restart_coordinator` abandons a loop
without any clean-up and starts another one on the same store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from tests.run_files import CONFIG
from tests.stand_ins.engine import TableEngine, TableShape
from tests.stand_ins.trainer_backend import StandInBackend

from specrl.coordinator.context import Grader
from specrl.coordinator.ledger import SqliteStore, Store
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.replica_session import TurnSettings
from specrl.coordinator.members.service import CoordinatorService
from specrl.coordinator.run_spans import RunSpans
from specrl.coordinator.wiring import wire_coordinator
from specrl.generation.service import GenerationService
from specrl.launcher.processes.ports import find_free_port
from specrl.models.policy_config import PolicyConfig, parse_policy_config
from specrl.records import Batch, Peer, Prompt, Reward, Role, wire
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.membership import stay_registered
from specrl.rpc.server import ServerOptions, start_server
from specrl.spec import RunSpec, digest_spec, parse_spec
from specrl.telemetry.spans import Recorder, SpanSink
from specrl.trainer.service import TrainerService

VOCAB = 32


def a_spec(folder: Path, **schedule: int | str) -> RunSpec:
    """Six steps of 3 prompts x 4 rollouts on two replicas. Arguments change the schedule."""
    return parse_spec(
        {
            "name": "small",
            "model": {"path": str(folder), "dtype": "float32", "maxLength": 128},
            "prompts": {"source": {"generated": {"family": "ledger", "count": 64}}, "maxTokens": 64},
            "rewards": {"exact": {}},
            "generation": {
                "replicas": 2,
                "sampling": {"maxTokens": 24},
                "maxLiveRollouts": 8,
                "speculation": {"eagle3": {"numDraftTokens": 3}},
            },
            "trainer": {
                "optimizer": {"learningRate": "1e-3"},
                "drafter": {"initialisation": {"prompts": 4, "maxPrompts": 4, "epochs": 1}},
            },
            "schedule": {"steps": 6, "promptsPerStep": 3, "groupSize": 4, "maxPolicyLag": 1} | schedule,
            "weights": {"timeoutS": 5, "attempts": 3},
            "checkpoint": {"everySteps": 2},
            "validation": {
                "source": {"generated": {"family": "ledger", "count": 4, "seed": 9}},
                "everySteps": 3,
                "limit": 4,
            },
            "telemetry": {"heartbeatS": 1},
        }
    )


def a_policy() -> PolicyConfig:
    """Make the config of a dense policy with the vocabulary of the stand-ins."""
    return parse_policy_config(CONFIG | {"vocab_size": VOCAB}, Path("policy"))


class TableStream:
    """Prompts whose text is their position in the stream."""

    def prompt(self, position: int) -> Prompt:
        return Prompt(f"p{position}", position, (2 + position % (VOCAB - 2), 5), str(position), "3")

    def __len__(self) -> int:
        return 7

    def identity(self) -> str:
        return "positions"


@dataclass
class LengthGrader:
    """Rewards short completions. fails: whether a call, by its number, stays ungraded."""

    fails: Callable[[int], bool] = lambda _: False
    calls: int = 0

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        self.calls += 1
        await asyncio.sleep(0)
        if self.fails(self.calls):
            return Reward(None, "the verifier hung")
        words = text.split()
        is_odd = len(words) % 2 == 1
        return Reward(float(is_odd), extracted=f"{len(words)} words", reason="odd" if is_odd else "even")


@dataclass
class Replica:
    """A replica. `kill` ends it as a killed process ends: without leaving."""

    engine: TableEngine
    service: GenerationService
    server: grpc.aio.Server
    membership: asyncio.Task[None]

    async def kill(self) -> None:
        self.membership.cancel()
        self.engine.die()
        self.service.close()
        await self.server.stop(None)


@dataclass
class Trainer:
    """A trainer. batches: those that it trained, in order."""

    service: TrainerService
    backend: RecordingBackend
    server: grpc.aio.Server
    membership: asyncio.Task[None]

    async def kill(self) -> None:
        self.membership.cancel()
        await self.server.stop(None)
        self.backend.close()


class RecordingBackend(StandInBackend):
    """Records what it trained, and the policy of every version [V, V]."""

    def __init__(self, trained: list[Batch]) -> None:
        super().__init__(VOCAB, seed=1)
        self.trained = trained
        self.tables: dict[int, np.ndarray] = {}

    def load_model(self, checkpoint: Path | None) -> None:
        super().load_model(checkpoint)
        self.tables[self.get_status().step] = self.policy_VV

    def train_step(self, batch: Batch):  # type: ignore[no-untyped-def]
        metrics = super().train_step(batch)
        self.trained.append(batch)
        self.tables[batch.step] = self.policy_VV
        time.sleep(0.02)  # long enough for generation to run ahead, and for a kill to hit it
        return metrics


@dataclass
class Run:
    """One run with all of its members. Use as `async with Run(folder, spec) as run`."""

    folder: Path
    spec: RunSpec
    grader: Grader = field(default_factory=LengthGrader)
    make_engine: Callable[[str], TableEngine] = lambda name: TableEngine(
        name, seed=7, shape=TableShape(VOCAB, 128, 0.001)
    )
    make_backend: Callable[[list[Batch]], RecordingBackend] = RecordingBackend
    make_service: Callable[..., GenerationService] = GenerationService
    open_store: Callable[[Path], Store] = lambda folder: SqliteStore(folder / "store.db")
    trained: list[Batch] = field(default_factory=list)
    replicas: dict[str, Replica] = field(default_factory=dict)
    trainer: Trainer | None = None
    turns: TurnSettings | None = None
    sinks: Sequence[SpanSink] = ()
    peer_sinks: Callable[[str], Sequence[SpanSink]] = lambda _: ()
    is_observed: bool = True
    clock: Callable[[], float] = time.monotonic
    started: Sequence[str] = ("gen-0", "gen-1")
    """Replicas that are there from the start."""

    async def __aenter__(self) -> Run:
        self.port = find_free_port()
        self.client = CoordinatorClient(f"127.0.0.1:{self.port}")
        await self.start_coordinator()
        for name in self.started:
            await self.start_replica(name)
        await self.start_trainer()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill_coordinator()
        for replica in self.replicas.values():
            await replica.kill()
        if self.trainer is not None:
            await self.trainer.kill()
        await self.client.close()

    async def start_coordinator(self) -> None:
        self.store = await asyncio.to_thread(self.open_store, self.folder)
        self.link = StoreLink(self.spec.name, self.store)
        self.registry = Registry(digest_spec(self.spec), self.spec.telemetry.heartbeat_s, time.monotonic)
        timeline, recorder = self._make_recorder()
        self.loop = wire_coordinator(
            self.spec,
            self.folder,
            self.link,
            self.registry,
            TableStream(),
            self.grader,
            validation_prompts=[TableStream().prompt(1000 + place) for place in range(4)],
            turns=self.turns,
            policy=a_policy(),
            spans=RunSpans(recorder, run_id=self.folder.name),
            clock=self.clock,
        )
        self.context = self.loop.context
        self.observer = self._make_observer(timeline)
        service = CoordinatorService(self.registry, self.spec.name, self.spec.telemetry.heartbeat_s)
        self.server, _ = await start_server(service.add_to, "127.0.0.1", self.port)
        self.running = asyncio.create_task(self.loop.run())
        self.expiring = asyncio.create_task(self._expire(self.registry))

    def _make_recorder(self) -> tuple[Any, Recorder]:
        """The timeline, None if the run is not observed, and a recorder of spans."""
        if not self.is_observed:
            return None, Recorder(*self.sinks)
        from specrl.coordinator.observe.timeline import Timeline

        timeline = Timeline()
        recorder = Recorder(timeline, *self.sinks)
        timeline.set_recorder(recorder)
        return timeline, recorder

    def _make_observer(self, timeline: Any) -> Any:
        if not self.is_observed:
            return None
        from specrl.coordinator.observe.observer import RunObserver

        return RunObserver(self.context, self.loop, timeline=timeline)

    async def kill_coordinator(self) -> None:
        self.expiring.cancel()
        self.running.cancel()
        await asyncio.gather(self.running, self.expiring, return_exceptions=True)
        await self.server.stop(None)
        await self.link.close()

    async def restart_coordinator(self) -> None:
        await self.kill_coordinator()
        await self.start_coordinator()

    async def start_replica(self, name: str) -> None:
        engine = self.make_engine(name)
        await engine.start()
        recorder = Recorder(*self.peer_sinks(name))
        service = self.make_service(engine, self.spec.weights, float(self.spec.generation.reattach_s), recorder)
        server, port = await start_server(service.add_to, "127.0.0.1", 0, ServerOptions(recorder=recorder, lane=name))
        peer = Peer(name, Role.GENERATION, f"127.0.0.1:{port}", digest_spec(self.spec))
        staying = stay_registered(self.client, peer, engine.get_status, service.list_held)
        membership = asyncio.create_task(staying)
        self.replicas[name] = Replica(engine, service, server, membership)

    async def restart_replica(self, name: str) -> None:
        await self.replicas[name].kill()
        await self.start_replica(name)

    async def start_trainer(self) -> None:
        backend = self.make_backend(self.trained)
        service = TrainerService(backend, self.spec, self.folder, "127.0.0.1")
        await service.load_model()
        border = ServerOptions(recorder=Recorder(*self.peer_sinks("trainer")), lane="trainer")
        server, port = await start_server(service.add_to, "127.0.0.1", 0, border)
        peer = Peer("trainer", Role.TRAINER, f"127.0.0.1:{port}", digest_spec(self.spec))
        membership = asyncio.create_task(stay_registered(self.client, peer))
        self.trainer = Trainer(service, backend, server, membership)

    async def restart_trainer(self) -> None:
        assert self.trainer is not None
        await self.trainer.kill()
        await self.start_trainer()

    async def until(self, is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until a condition holds. Raises the loop's error if the loop fails first."""
        async with asyncio.timeout(timeout_s):
            while not is_so():
                if self.running.done() and not self.running.cancelled() and self.running.exception():
                    raise self.running.exception()  # type: ignore[misc]
                await asyncio.sleep(0.002)

    async def finish(self, timeout_s: float = 60.0) -> None:
        """Wait for the end of the run."""
        await self.until(lambda: self.running.done() and not self.running.cancelled(), timeout_s)
        self.running.result()

    @staticmethod
    async def _expire(registry: Registry) -> None:
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(0.2)
                registry.expire_silent_peers()


def same_batch(first: Batch, second: Batch) -> bool:
    """Whether two batches are equal bit by bit."""
    return wire.batch_to_bytes(first) == wire.batch_to_bytes(second)
