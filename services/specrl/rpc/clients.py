"""Typed clients: records in, records out, SpecrlErrors when a call fails. The only place that retries.

Every call has a deadline. A call is repeated only where repeating is harmless (`_ask`): status questions, registration,
idempotent steps of an update. A training step or a generation stream is repeated by the coordinator's own logic,
which knows what has been lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from specrl.api.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)
from specrl.errors import (
    BY_NAME,
    DeadlineExceeded,
    MessageTooLarge,
    PeerUnavailable,
    RecordInvalid,
    SpecrlError,
    VersionConflict,
)
from specrl.records import (
    Acknowledgement,
    Batch,
    DrafterMetrics,
    GenerationStatus,
    HeldRollout,
    Peer,
    Registration,
    Rollout,
    RolloutRequest,
    StreamPlace,
    TrainerStatus,
    TrainMetrics,
    TrainRollout,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
    wire,
)
from specrl.rpc.limits import CONTROL_BYTES, LARGEST_BYTES
from specrl.rpc.server import ERROR_CLASS_KEY, TRACEPARENT, channel_options, check_size
from specrl.rpc.tls import COORDINATOR, GENERATION, TRAINER, Identity
from specrl.telemetry import metrics
from specrl.telemetry.spans import present

STATUS_DEADLINE_S = 20.0
ATTEMPTS = 3
BACKOFF_S = 0.2

log = structlog.get_logger(__name__)


def translate(error: grpc.aio.AioRpcError, peer: str) -> SpecrlError:
    """The SpecrlError that the peer raised; PeerUnavailable or DeadlineExceeded when it could not say."""
    trailing = error.trailing_metadata() or ()
    name = next((value for key, value in trailing if key == ERROR_CLASS_KEY), "")
    details = error.details() or error.code().name
    if name in BY_NAME:
        return BY_NAME[name](details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"a call to {peer} must answer within its deadline, got none; it is taken for lost")
    # Without a name INTERNAL is no peer's: grpc.aio says so when it could not send a message (grpc/grpc#36066).
    is_unsent = error.code() is grpc.StatusCode.INTERNAL and not name
    if is_unsent or error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return PeerUnavailable(f"{peer} must be reachable, got {details!r}; it is taken for lost until it registers")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return MessageTooLarge(
            f"a message to or from {peer} must be of its run's size, got {details!r}; use one run file everywhere"
        )
    return SpecrlError(f"a call to {peer} failed with {error.code().name}: {details}")


def _unreadable(peer: str) -> RecordInvalid:
    return RecordInvalid(
        f"an answer of {peer} must be the protobuf message of its call, got other bytes; use the same version of specrl"
    )


def _metadata() -> tuple[tuple[str, str], ...]:
    """Tells the peer which span its work is part of, where spans are recorded."""
    span = present()
    return () if span is None else ((TRACEPARENT, span.traceparent),)


@dataclass(frozen=True)
class UpdateTiming:
    """Seconds of a replica's commit. It computes no token during the last three."""

    verify_s: float
    pause_s: float
    load_s: float
    resume_s: float


@dataclass(frozen=True)
class _Service[Stub]:
    """What is called: the role that serves it, and its methods over a channel."""

    role: str
    over: Callable[[grpc.aio.Channel], Stub]


class _Client[Stub]:
    """A channel to one peer, with deadline, translation and (where harmless) repetition."""

    def __init__(
        self, service: _Service[Stub], address: str, peer: str, limit_bytes: int, identity: Identity | None
    ) -> None:
        """limit_bytes: of every message, in and out (`limits.py`). identity: of this process; None without TLS."""
        self.address = address
        self.peer = f"{peer} at {address}"
        self._service, self._limit_bytes, self._identity = service, limit_bytes, identity
        self._channels: list[grpc.aio.Channel] = []
        metrics.RPC_RETRIES.labels(service.role)
        self._connect()

    def _connect(self) -> None:
        """Open a channel that shows the present certificate. Calls under way go on over the one before."""
        options: list[tuple[str, Any]] = [*channel_options(self._limit_bytes)]
        if self._identity is None:
            channel = grpc.aio.insecure_channel(self.address, options=options)
        else:
            self._stamp = self._identity.stamp()
            options.append(("grpc.ssl_target_name_override", self._identity.name(self._service.role)))
            channel = grpc.aio.secure_channel(self.address, self._identity.channel_credentials(), options=options)
        self._channels.append(channel)
        self._methods = self._service.over(channel)

    @property
    def _stub(self) -> Stub:
        """The peer's methods."""
        if self._identity is not None and self._identity.stamp() != self._stamp:
            self._connect()
        return self._methods

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every channel; calls under way fail with PeerUnavailable."""
        for channel in self._channels:
            await channel.close(None)

    async def _call[T](self, call: Callable[..., Awaitable[T]], request: Any, deadline_s: float) -> T:
        check_size(f"a request to {self.peer}", request.ByteSize(), self._limit_bytes)
        try:
            return await call(request, timeout=deadline_s, metadata=_metadata())
        except DecodeError as error:
            raise _unreadable(self.peer) from error
        except grpc.aio.AioRpcError as error:
            raise translate(error, self.peer) from error

    async def _ask[T](
        self, call: Callable[..., Awaitable[T]], request: Any, deadline_s: float = STATUS_DEADLINE_S
    ) -> T:
        """`_call`, repeated with doubling pauses while the error is retryable. Only for calls that may run twice.

        Without jitter: the coordinator alone asks so, and each peer once at a time.
        """
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._call(call, request, deadline_s)
            except SpecrlError as error:
                if not error.retryable:
                    raise
                metrics.RPC_RETRIES.labels(self._service.role).inc()
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        return await self._call(call, request, deadline_s)


def _generation_stub(channel: grpc.aio.Channel) -> generation_pb2_grpc.GenerationServiceAsyncStub:
    """The generated stub, whose rollouts come as bytes: they are read once, and passed on as they are."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    untyped: Any = channel  # the generated stub's types have messages where these calls have bytes
    stub.Generate = untyped.stream_stream(
        "/specrl.api.v1.GenerationService/Generate",
        request_serializer=generation_pb2.GenerateRequest.SerializeToString,
    )
    return stub


def _trainer_stub(channel: grpc.aio.Channel) -> trainer_pb2_grpc.TrainerServiceAsyncStub:
    """The generated stub, which is given a batch's parts as bytes."""
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)
    untyped: Any = channel
    stub.TrainParts = untyped.stream_unary(
        "/specrl.api.v1.TrainerService/TrainParts", response_deserializer=trainer_pb2.TrainStepReply.FromString
    )
    return stub


@dataclass(frozen=True)
class Terms:
    """How rollouts are generated.

    admit_together: the engine takes all of a request before it computes any. min_policy_version: the replica refuses to
    serve an older one. outlives_call: what is unfinished when the call breaks goes on for a while, to be resumed.
    resumes: what the replica holds of these is taken, the rest begun.
    """

    admit_together: bool
    min_policy_version: int
    outlives_call: bool = False
    resumes: bool = False


class GenerationCall:
    """One Generate call: ask at any time, take rollouts as they finish.

    It has no deadline of its own: a dead replica breaks the call or its heartbeat.
    """

    def __init__(self, peer: str, limit_bytes: int, method: Callable[[], Any]) -> None:
        """method: `Generate` over the present channel; it is called when rollouts are first waited for."""
        self._peer, self._limit_bytes, self._method = peer, limit_bytes, method
        self._asked: asyncio.Queue[generation_pb2.GenerateRequest | None] = asyncio.Queue()
        self._missing: dict[str, tuple[str, int]] = {}  # group and sample of what has not come back, by rollout id

    def ask(self, requests: Sequence[RolloutRequest], terms: Terms) -> None:
        """Send for rollouts. Raises MessageTooLarge."""
        message = generation_pb2.GenerateRequest(
            requests=[wire.request_to_wire(item) for item in requests],
            admit_together=terms.admit_together,
            min_policy_version=terms.min_policy_version,
            outlives_call=terms.outlives_call,
            resumes=terms.resumes,
        )
        check_size(f"a request to {self._peer}", message.ByteSize(), self._limit_bytes)
        self._missing |= {item.rollout_id: (item.group_id, item.sample_index) for item in requests}
        self._asked.put_nowait(message)

    def end(self) -> None:
        """Nothing more is asked for: the last rollout ends the call."""
        self._asked.put_nowait(None)

    async def rollouts(self) -> AsyncGenerator[Rollout]:
        """Yield each rollout when it finishes, until the call ends.

        Closing the iterator aborts what is unfinished, unless it outlives the call. Raises PeerUnavailable when the
        call breaks, RecordInvalid for a rollout that was not asked for or has come already: another is missing then.
        """
        call = self._method()(self._requests(), metadata=_metadata())
        try:
            async for data in call:
                rollout = wire.rollout_from_bytes(data)
                place = rollout.group_id, rollout.sample_index
                if self._missing.pop(rollout.rollout_id, None) != place:
                    raise RecordInvalid(
                        f"a rollout of {self._peer} must be one that it was asked for and has not sent yet, got "
                        f"{rollout.rollout_id[:64]!r} as sample {place[1]} of {place[0][:64]!r}; the replica is at "
                        "fault, and asked anew"
                    )
                yield rollout
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise PeerUnavailable(f"a call to {self._peer} must go on, got cancelled; it is made anew") from error
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._peer) from error
        finally:
            call.cancel()
            self.end()  # gRPC's task that waits for requests does not end with a call that has failed

    async def _requests(self) -> AsyncGenerator[generation_pb2.GenerateRequest]:
        while (message := await self._asked.get()) is not None:
            yield message


class GenerationClient(_Client["generation_pb2_grpc.GenerationServiceAsyncStub"]):
    """One replica."""

    def __init__(
        self,
        address: str,
        replica_id: str = "replica",
        limit_bytes: int = LARGEST_BYTES,
        identity: Identity | None = None,
    ) -> None:
        service = _Service(GENERATION, _generation_stub)
        super().__init__(service, address, replica_id, limit_bytes, identity)

    def converse(self) -> GenerationCall:
        """A call over which rollouts are asked for as seats become free."""
        return GenerationCall(self.peer, self._limit_bytes, lambda: cast(Any, self._stub.Generate))

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        admit_together: bool,
        min_policy_version: int,
        *,
        outlives_call: bool = False,
        resumes: bool = False,
    ) -> AsyncGenerator[Rollout]:
        """Yield these rollouts as they finish, over a call of their own; see `GenerationCall`."""
        call = self.converse()
        call.ask(requests, Terms(admit_together, min_policy_version, outlives_call, resumes))
        call.end()
        async with aclosing(call.rollouts()) as rollouts:
            async for rollout in rollouts:
                yield rollout

    async def receive_weights(
        self, policy_version: int, group: WeightGroup, manifest: WeightManifest | None
    ) -> tuple[WeightChecksums, float]:
        """Take part in one broadcast. Returns the checksums of what arrived, and the seconds that it took.

        manifest: None for that of the last transfer that succeeded here; it may be megabytes. Raises RecordInvalid when
        there was none.
        """
        request = generation_pb2.ReceiveWeightsRequest(
            policy_version=policy_version,
            group=wire.weight_group_to_wire(group),
            manifest=wire.manifest_to_wire(manifest) if manifest is not None else None,
        )
        reply = await self._call(self._stub.ReceiveWeights, request, 2 * group.timeout_s + STATUS_DEADLINE_S)
        return wire.checksums_from_wire(reply.received), reply.broadcast_seconds

    async def commit_update(self, sent: WeightChecksums, deadline_s: float) -> UpdateTiming:
        """Verify, pause, load, resume. Raises ChecksumMismatch when what arrived is not what was sent.

        Raises VersionConflict when the replica says that it serves another policy or drafter version than was sent.
        """
        request = generation_pb2.CommitUpdateRequest(sent=wire.checksums_to_wire(sent))
        reply = await self._call(self._stub.CommitUpdate, request, deadline_s)
        served = (reply.policy_version, wire.drafter_version_from_wire(reply))
        if served != (sent.policy_version, sent.drafter_version):
            raise VersionConflict(
                f"{self.peer} must serve policy version {sent.policy_version} with the drafter of version "
                f"{sent.drafter_version}, got {served[0]} with {served[1]}; the transfer is repeated"
            )
        return UpdateTiming(reply.verify_seconds, reply.pause_seconds, reply.load_seconds, reply.resume_seconds)

    async def probe(self, deadline_s: float) -> GenerationStatus:
        """`status`, asked once. Raises PeerUnavailable or DeadlineExceeded."""
        request = generation_pb2.GetGenerationStatusRequest()
        return wire.generation_status_from_wire(await self._call(self._stub.GetGenerationStatus, request, deadline_s))

    async def status(self) -> GenerationStatus:
        """Versions and counters of the replica."""
        reply = await self._ask(self._stub.GetGenerationStatus, generation_pb2.GetGenerationStatusRequest())
        return wire.generation_status_from_wire(reply)


class TrainerClient(_Client["trainer_pb2_grpc.TrainerServiceAsyncStub"]):
    """The trainer's rank 0."""

    def __init__(self, address: str, limit_bytes: int = LARGEST_BYTES, identity: Identity | None = None) -> None:
        service = _Service(TRAINER, _trainer_stub)
        super().__init__(service, address, "trainer", limit_bytes, identity)

    async def train_step(self, batch: Batch, deadline_s: float) -> TrainMetrics:
        """Train the batch's step, once: the trainer remembers the last step's answer."""
        call: Any = cast(Any, self._stub.TrainParts)(timeout=deadline_s, metadata=_metadata())
        try:
            for part in wire.train_step_parts(batch):
                check_size(f"a request to {self.peer}", len(part), self._limit_bytes)
                if call.done():  # refused before it was sent
                    break
                await call.write(part)
            else:
                await call.done_writing()
            reply = await call
        except DecodeError as error:
            raise _unreadable(self.peer) from error
        except grpc.aio.AioRpcError as error:
            raise translate(error, self.peer) from error
        finally:
            call.cancel()
        return wire.train_metrics_from_wire(reply.metrics)

    async def train_drafter(
        self, rollouts: Sequence[TrainRollout], epochs: int, deadline_s: float
    ) -> list[DrafterMetrics]:
        """Initialise the drafter on rollouts of the present policy."""
        request = trainer_pb2.TrainDrafterRequest(
            rollouts=[wire.train_rollout_to_wire(item) for item in rollouts], epochs=epochs
        )
        reply = await self._call(self._stub.TrainDrafter, request, deadline_s)
        return [wire.drafter_metrics_from_wire(item) for item in reply.epochs]

    async def evaluate_drafter(self, rollouts: Sequence[TrainRollout], deadline_s: float) -> DrafterMetrics:
        """Loss and acceptance of the drafter on rollouts of the present policy. Nothing is trained."""
        request = trainer_pb2.EvaluateDrafterRequest(rollouts=[wire.train_rollout_to_wire(item) for item in rollouts])
        reply = await self._call(self._stub.EvaluateDrafter, request, deadline_s)
        return wire.drafter_metrics_from_wire(reply.metrics)

    async def score(self, rollouts: Sequence[TrainRollout], deadline_s: float) -> list[list[float]]:
        """Log-probabilities of the rollouts' tokens under the present policy."""
        request = trainer_pb2.ScoreRequest(rollouts=[wire.train_rollout_to_wire(item) for item in rollouts])
        reply = await self._call(self._stub.Score, request, deadline_s)
        return [list(item.logprobs) for item in reply.rollouts]

    async def describe_weights(self) -> WeightManifest:
        """What a broadcast consists of."""
        reply = await self._ask(self._stub.DescribeWeights, trainer_pb2.DescribeWeightsRequest(), 60.0)
        return wire.manifest_from_wire(reply)

    async def open_weight_group(self, group: WeightGroup) -> tuple[str, int]:
        """Listen for a new weight group; returns (address, port)."""
        request = trainer_pb2.OpenWeightGroupRequest(
            group_id=group.group_id,
            world_size=group.world_size,
            timeout_s=group.timeout_s,
            transport=group.transport,
        )
        reply = await self._ask(self._stub.OpenWeightGroup, request, group.timeout_s + STATUS_DEADLINE_S)
        return reply.address, reply.port

    async def broadcast_weights(self, group_id: str, deadline_s: float) -> tuple[WeightChecksums, int, float]:
        """Send the present version. Returns (checksums, bytes, seconds)."""
        request = trainer_pb2.BroadcastWeightsRequest(group_id=group_id)
        reply = await self._call(self._stub.BroadcastWeights, request, deadline_s)
        return wire.checksums_from_wire(reply.sent), reply.size_bytes, reply.seconds

    async def write_weights(self, anew: bool, deadline_s: float) -> tuple[WeightChecksums, str, int]:
        """Have the present version in a folder, or `anew` in another. Returns (checksums, folder, bytes)."""
        reply = await self._call(self._stub.WriteWeights, trainer_pb2.WriteWeightsRequest(anew=anew), deadline_s)
        return wire.checksums_from_wire(reply.written), reply.folder, reply.size_bytes

    async def save_checkpoint(
        self, step: int, deadline_s: float, stream: StreamPlace | None = None, *, in_background: bool = False
    ) -> tuple[str, float]:
        """Write a checkpoint of `step`, the present one unless it has been begun before. Returns (path, seconds).

        stream: where the data stand with that step. in_background: only until the next step may be trained.
        """
        place = wire.stream_place_to_wire(stream) if stream is not None else None
        request = trainer_pb2.SaveCheckpointRequest(step=step, in_background=in_background, stream=place)
        reply = await self._ask(self._stub.SaveCheckpoint, request, deadline_s)
        return reply.path, reply.seconds

    async def export_model(self, directory: str, deadline_s: float) -> tuple[str, str]:
        """Write Hugging Face folders. Returns (policy path, drafter path or empty)."""
        request = trainer_pb2.ExportModelRequest(directory=directory)
        reply = await self._ask(self._stub.ExportModel, request, deadline_s)
        return reply.policy_path, reply.drafter_path

    async def status(self) -> TrainerStatus:
        """Step, checkpoint, drafter state."""
        reply = await self._ask(self._stub.GetTrainerStatus, trainer_pb2.GetTrainerStatusRequest())
        return wire.trainer_status_from_wire(reply)


class CoordinatorClient(_Client["coordinator_pb2_grpc.CoordinatorServiceAsyncStub"]):
    """The coordinator, as its peers see it."""

    def __init__(self, address: str, identity: Identity | None = None) -> None:
        service = _Service(COORDINATOR, coordinator_pb2_grpc.CoordinatorServiceStub)
        super().__init__(service, address, "coordinator", CONTROL_BYTES, identity)

    async def register(
        self, peer: Peer, generation: GenerationStatus | None = None, held: Sequence[HeldRollout] = ()
    ) -> Registration:
        """Announce a peer, and what a replica holds. Raises RunInvalid when it runs another run file."""
        request = coordinator_pb2.RegisterRequest(
            role=wire.role_to_wire(peer.role),
            peer_id=peer.peer_id,
            incarnation=peer.incarnation,
            address=peer.address,
            spec_digest=peer.spec_digest,
            generation=wire.generation_status_to_wire(generation) if generation is not None else None,
            held=[wire.held_to_wire(item) for item in held],
            metrics_port=peer.metrics_port,
        )
        reply = await self._call(self._stub.Register, request, STATUS_DEADLINE_S)
        return Registration(reply.run, reply.heartbeat_interval_s)

    async def heartbeat(self, peer_id: str, incarnation: str, generation: GenerationStatus | None) -> Acknowledgement:
        """Say that the peer lives. What its steps cost is left out: that is asked for, once a step."""
        status = wire.generation_status_to_wire(replace(generation, step_costs=())) if generation is not None else None
        request = coordinator_pb2.HeartbeatRequest(peer_id=peer_id, incarnation=incarnation, generation=status)
        reply = await self._call(self._stub.Heartbeat, request, STATUS_DEADLINE_S)
        return Acknowledgement(reply.is_known, reply.must_leave)

    async def leave(self, peer_id: str, incarnation: str, drain_s: float = 0.0) -> None:
        """Say goodbye. With `drain_s` a replica gets no new rollouts, and so long at most to finish what it has."""
        request = coordinator_pb2.LeaveRequest(peer_id=peer_id, incarnation=incarnation, drain_s=drain_s)
        await self._call(self._stub.Leave, request, drain_s + STATUS_DEADLINE_S)

    async def dismiss(self, replica_id: str) -> None:
        """Have a replica drain and end. Raises VersionConflict when there is none of this name."""
        await self._call(self._stub.Dismiss, coordinator_pb2.DismissRequest(replica_id=replica_id), STATUS_DEADLINE_S)
