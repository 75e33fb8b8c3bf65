"""The three gRPC services as their processes configure them, behind real sockets, over stand-in engine and backend.

A world knows a legal request of each of its methods, shows its state, and can prove that it still does its work.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from tests.integration.border.messages import Call, methods
from tests.integration.coordinator.small_run import VOCAB, a_spec
from tests.integration.trainer.runs import a_batch
from tests.stand_ins.engine import TableEngine
from tests.stand_ins.trainer_backend import StandInBackend

from specrl.api.v1 import coordinator_pb2, generation_pb2, rollout_pb2, trainer_pb2, weights_pb2
from specrl.coordinator.members.registry import PeerClients, Registry
from specrl.coordinator.members.service import CoordinatorService
from specrl.errors import ERRORS_BY_NAME
from specrl.generation.service import GenerationService
from specrl.records import Peer, Role, wire
from specrl.rpc.clients import CoordinatorClient, GenerationClient, TrainerClient
from specrl.rpc.limits import message_limits
from specrl.rpc.server import ERROR_CLASS_KEY, ServerOptions, start_server
from specrl.spec import RunSpec, digest_spec, parse_spec
from specrl.telemetry import metrics
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.service import TrainerService

PATIENCE_S = 240.0  # a busy machine is slow, not wrong
"""A call that has not been answered by then hangs."""


def a_border_spec(folder: Path) -> RunSpec:
    """A small run whose collectives give up after a second."""
    fields = a_spec(folder).model_dump(mode="json", by_alias=True, exclude_none=True)
    return parse_spec(fields | {"weights": {"timeoutS": 1, "attempts": 1}})


class World(ABC):
    """One served service. `async with`."""

    service: ServiceDescriptor

    @abstractmethod
    async def start(self) -> tuple[grpc.aio.Server, int]: ...

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    def legal(self) -> dict[str, Message]:
        """A request that each method answers at the start, by its short name."""

    @abstractmethod
    def state(self) -> Any:
        """What a refused call must leave as it was."""

    @abstractmethod
    async def work(self) -> None:
        """Do what the service is for; fails when it cannot."""

    async def __aenter__(self) -> World:
        self.server, self.port = await self.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close(None)
        await self.stop()
        await self.server.stop(None)

    async def play(self, calls: list[Call]) -> list[str]:
        """Make the calls in order. Returns how each was answered: OK, or the class of the error.

        Asserts what holds for every call: it is answered, in words, by an error that the client knows, which is
        counted; and that a refusal changed nothing.
        """
        answers = []
        for method, request in calls:
            before = self.state()
            answer = await self.call(method, request)
            answers.append(answer)
            if answer != "OK":
                assert self.state() == before, f"{method} refused a request and changed its state"
        await self.work()
        return answers

    async def call(self, method: str, request: bytes) -> str:
        """One call with these bytes. Returns OK or the error's class."""
        shape = next(m for m in self.service.methods if method.endswith(f"/{m.name}"))
        counted = {name: _counted(method, name) for name in (*ERRORS_BY_NAME, "Unexpected")}
        try:
            if shape.client_streaming and shape.server_streaming:
                async for _ in self.channel.stream_stream(method)(iter([request]), timeout=PATIENCE_S):
                    pass
            elif shape.client_streaming:
                await self.channel.stream_unary(method)(iter([request]), timeout=PATIENCE_S)
            else:
                await self.channel.unary_unary(method)(request, timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            refusal = error
        else:
            assert counted == {name: _counted(method, name) for name in counted}
            return "OK"
        pairs: Any = refusal.trailing_metadata() or ()  # iterates over pairs, whatever its stubs say
        name = str(next((value for key, value in pairs if key == ERROR_CLASS_KEY), ""))
        words = f"{refusal.code()} {refusal.details()!r}"
        assert name in ERRORS_BY_NAME, f"{method} must refuse with an error of ours, got {words}"
        assert refusal.code() is getattr(grpc.StatusCode, ERRORS_BY_NAME[name].grpc_status)
        assert len((refusal.details() or "").split()) > 4, f"{method} must refuse in words, got {words}"
        assert _counted(method, name) == counted[name] + 1
        return name


def _counted(method: str, name: str) -> float:
    return metrics.CALLS_REFUSED.labels(method, name)._value.get()


class CoordinatorWorld(World):
    """A registry that knows one replica and a trainer."""

    service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]

    def __init__(self, folder: Path) -> None:
        self.spec = a_border_spec(folder)
        self.count = 0

    async def start(self) -> tuple[grpc.aio.Server, int]:
        limits = message_limits(self.spec)
        self.registry = Registry(digest_spec(self.spec), 1.0, lambda: 0.0, clients=PeerClients(limits))
        found = await start_server(
            CoordinatorService(self.registry, "small", 1.0).add_to, "127.0.0.1", 0, ServerOptions(limits.coordinator)
        )
        self.client = CoordinatorClient(f"127.0.0.1:{found[1]}")
        for name, role in (("gen-0", Role.GENERATION), ("trainer", Role.TRAINER)):
            await self.client.register_peer(Peer(name, role, "127.0.0.1:1", digest_spec(self.spec), f"{name}-first"))
        return found

    async def stop(self) -> None:
        await self.client.close()

    def legal(self) -> dict[str, Message]:
        status = generation_pb2.GenerationStatus(
            replica_id="gen-0",
            policy_version=3,
            speculation=generation_pb2.SpeculationCounters(drafts=5, draft_tokens=15, accepted_per_position=[4, 2, 1]),
            drafting=generation_pb2.Drafting(state="drafting", predicted_gain=1.2, measured_gain=1.1),
        )
        return {
            "Register": coordinator_pb2.RegisterRequest(
                role=coordinator_pb2.ROLE_GENERATION,
                peer_id="gen-9",
                incarnation="nine",
                address="127.0.0.1:9",
                spec_digest=digest_spec(self.spec),
                generation=status,
                held_rollouts=[coordinator_pb2.HeldRollout(rollout_id="1-0-0-0", policy_version=3)],
            ),
            "Heartbeat": coordinator_pb2.HeartbeatRequest(
                peer_id="gen-0", incarnation="gen-0-first", generation=status
            ),
            "Leave": coordinator_pb2.LeaveRequest(peer_id="gen-9", incarnation="nine", drain_s=0.5),
            "Dismiss": coordinator_pb2.DismissRequest(replica_id="gen-0"),
            "FindDraftCosts": coordinator_pb2.FindDraftCostsRequest(key="0" * 24),
            "KeepDraftCosts": coordinator_pb2.KeepDraftCostsRequest(key="0" * 24, costs='{"nodes": [1]}'),
        }

    def state(self) -> Any:
        replicas = {
            name: (replica.peer, replica.state, replica.status) for name, replica in self.registry.replicas.items()
        }
        trainer = self.registry.trainer
        return replicas, trainer.peer if trainer is not None else None

    async def work(self) -> None:
        self.count += 1
        peer = Peer(f"probe-{self.count}", Role.GENERATION, "127.0.0.1:1", digest_spec(self.spec))
        await self.client.register_peer(peer)
        assert (await self.client.send_heartbeat(peer.peer_id, peer.incarnation, None)).is_known
        await self.client.leave_run(peer.peer_id, peer.incarnation)
        assert not (await self.client.send_heartbeat(peer.peer_id, peer.incarnation, None)).is_known


class GenerationWorld(World):
    """A replica that serves its first version."""

    service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]

    def __init__(self, folder: Path) -> None:
        self.spec = a_border_spec(folder)

    async def start(self) -> tuple[grpc.aio.Server, int]:
        self.engine = TableEngine()
        await self.engine.start()
        self.servicer = GenerationService(self.engine, self.spec.weights, float(self.spec.generation.reattach_s))
        limit = message_limits(self.spec).generation
        found = await start_server(self.servicer.add_to, "127.0.0.1", 0, ServerOptions(limit))
        self.client = GenerationClient(f"127.0.0.1:{found[1]}", "gen-0", limit)
        return found

    async def stop(self) -> None:
        self.servicer.close()
        await self.client.close()

    def legal(self) -> dict[str, Message]:
        group = weights_pb2.WeightGroup(
            group_id="1-abc", address="127.0.0.1", port=9, rank=1, world_size=2, timeout_s=0.1, transport="gloo"
        )
        tensor = weights_pb2.TensorMeta(
            name="table", owner=weights_pb2.WEIGHT_OWNER_POLICY, dtype="float32", shape=[32, 32]
        )
        return {
            "Generate": generation_pb2.GenerateRequest(
                requests=[
                    generation_pb2.RolloutRequest(
                        rollout_id=f"r{place}",
                        group_id="g",
                        sample_index=place,
                        prompt_token_ids=[3, 4],
                        sampling=rollout_pb2.Sampling(temperature=1, top_p=1, max_tokens=4, seed=place),
                    )
                    for place in range(2)
                ],
                admit_together=True,
                min_policy_version=-1,
            ),
            "ReceiveWeights": generation_pb2.ReceiveWeightsRequest(
                policy_version=1,
                group=group,
                manifest=weights_pb2.WeightManifest(tensors=[tensor], bucket_bytes=1 << 20),
            ),
            "CommitUpdate": generation_pb2.CommitUpdateRequest(
                sent=weights_pb2.WeightChecksums(policy_version=1, checksums=[7])
            ),
            "GetGenerationStatus": generation_pb2.GetGenerationStatusRequest(),
        }

    def state(self) -> Any:
        engine = self.engine
        return (
            engine.table_VV.tobytes(),
            engine._policy_version,
            engine._drafter_version,
            engine._is_running.is_set(),
            engine._live,
        )

    async def work(self) -> None:
        (request,) = [wire.request_from_wire(item) for item in self.legal()["Generate"].requests[:1]]  # type: ignore[attr-defined]
        (rollout,) = [rollout async for rollout in self.client.generate_rollouts([request], True, -1)]
        rollout.check(4)
        assert (await self.client.get_status()).policy_version == self.engine._policy_version == -1


class TrainerWorld(World):
    """A trainer at step 0, with a drafter."""

    service = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = a_border_spec(folder)

    async def start(self) -> tuple[grpc.aio.Server, int]:
        self.backend = StandInBackend(VOCAB)
        self.servicer = TrainerService(self.backend, self.spec, self.folder, "127.0.0.1")
        await self.servicer.load_model()
        limit = message_limits(self.spec).trainer
        found = await start_server(self.servicer.add_to, "127.0.0.1", 0, ServerOptions(limit))
        self.client = TrainerClient(f"127.0.0.1:{found[1]}", limit)
        return found

    async def stop(self) -> None:
        await self.client.close()
        await self.servicer.close()

    def legal(self) -> dict[str, Message]:
        batch = wire.batch_to_wire(a_batch(1, VOCAB, rollouts=2))
        return {
            "TrainParts": trainer_pb2.TrainPartsRequest(batch=batch, rollouts_total=len(batch.rollouts)),
            "TrainDrafter": trainer_pb2.TrainDrafterRequest(
                rollouts=batch.rollouts,
                epochs=[trainer_pb2.DrafterEpoch(rollouts=2, first_rate=1, last_rate=0.5)],
                held_out=batch.rollouts,
            ),
            "Score": trainer_pb2.ScoreRequest(rollouts=batch.rollouts),
            "DescribeWeights": trainer_pb2.DescribeWeightsRequest(),
            "OpenWeightGroup": trainer_pb2.OpenWeightGroupRequest(
                group_id="1-abc", world_size=2, timeout_s=0.1, transport="gloo"
            ),
            "BroadcastWeights": trainer_pb2.BroadcastWeightsRequest(group_id="1-abc"),
            "WriteWeights": trainer_pb2.WriteWeightsRequest(must_rewrite=True),
            "SaveCheckpoint": trainer_pb2.SaveCheckpointRequest(step=0),
            "ExportModel": trainer_pb2.ExportModelRequest(directory=str(self.folder / "export")),
            "GetTrainerStatus": trainer_pb2.GetTrainerStatusRequest(),
        }

    def state(self) -> Any:
        backend = self.backend
        kept = [step for step, _ in checkpoints.list_complete(self.folder)]
        return backend.get_status(), backend.policy_VV.tobytes(), backend.drafter_VV.tobytes(), kept

    async def work(self) -> None:
        status = await self.client.get_status()
        batch = a_batch(status.step + 1, VOCAB, rollouts=2)
        assert len(await self.client.score_rollouts(batch.rollouts, PATIENCE_S)) == 2
        assert (await self.client.train_step(batch, PATIENCE_S)).tokens > 0
        assert (await self.client.get_status()).step == status.step + 1


WORLDS: list[type[World]] = [CoordinatorWorld, GenerationWorld, TrainerWorld]


def full_names(world: World) -> dict[str, Message]:
    """Legal requests by full method name; every method of the service must have one."""
    found = {f"/{world.service.full_name}/{name}": request for name, request in world.legal().items()}
    unknown = methods(world.service).keys() ^ found.keys()
    assert not unknown, f"every method needs a legal request to be fuzzed from: {sorted(unknown)}"
    return found


def run(world: World, runner: asyncio.Runner, calls: list[Call]) -> list[str]:
    """`World.play` on a loop that stands still in between."""
    return runner.run(world.play(calls))
