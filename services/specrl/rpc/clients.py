"""Typed clients of the three services: records in, records out, and a SpecrlError if a call fails.

Every call but Generate has a deadline. Calls that may safely run twice are retried here (`_retry_call`): status
queries and idempotent operations of the trainer. `membership.py` repeats registrations. The coordinator itself repeats
a training step or a generation stream, because it knows which work was lost.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

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
    ERRORS_BY_NAME,
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
    DrafterEpoch,
    DrafterEpochMetrics,
    GenerationStatus,
    HeldRollout,
    Peer,
    Registration,
    Rollout,
    RolloutRequest,
    SentWeights,
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
from specrl.rpc.run_token import PROOF_KEY, RunToken
from specrl.rpc.server import ERROR_CLASS_KEY, TRACEPARENT, check_size, make_channel_options
from specrl.rpc.tls import COORDINATOR, GENERATION, TRAINER, Identity
from specrl.telemetry import metrics
from specrl.telemetry.spans import present_span

STATUS_DEADLINE_S = 20.0
"""Deadline of calls that compute nothing. Others add it to the time that their work may take."""

_WITHOUT_PROXY = ("grpc.enable_http_proxy", 0)
"""gRPC sends all connections through the proxy of `http_proxy` and `https_proxy`, loopback included. A run's processes
reach each other directly, as our HTTP clients do."""

ATTEMPTS = 3
BACKOFF_S = 0.2  # doubles: pauses of 0.4 and 0.8 s

log = structlog.get_logger(__name__)


def translate_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> SpecrlError:
    """Convert a gRPC error to the SpecrlError that the peer raised.

    Without a class name from the peer it is PeerUnavailable, DeadlineExceeded or MessageTooLarge, by its status.
    """
    trailing = error.trailing_metadata() or ()
    name = next((value for key, value in trailing if key == ERROR_CLASS_KEY), "")
    details = error.details() or error.code().name
    if name in ERRORS_BY_NAME:
        return ERRORS_BY_NAME[name](details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer} did not answer within the deadline of a call; treating it as lost")
    # INTERNAL without a class name does not come from a peer: grpc.aio reports it if it could not send a message
    # (grpc/grpc#36066).
    is_unsent = error.code() is grpc.StatusCode.INTERNAL and not name
    if is_unsent or error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return PeerUnavailable(f"no connection to {peer}: {details}; treating it as lost")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return MessageTooLarge(
            f"a message to or from {peer} exceeds gRPC's size limit: {details}; use one run file everywhere"
        )
    return SpecrlError(f"a call to {peer} failed with {error.code().name}: {details}")


def _make_reply_error(peer: str) -> RecordInvalid:
    return RecordInvalid(
        f"a reply of {peer} must be the protobuf message of its call, got other bytes; use the same version of specrl "
        "everywhere"
    )


def _span_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata with the present span, under which the peer records its own; empty if spans are not recorded."""
    span = present_span()
    return () if span is None else ((TRACEPARENT, span.traceparent),)


@dataclass(frozen=True)
class UpdateTiming:
    """Durations of a replica's commit, in seconds. It computes no token during the last three."""

    verify_s: float
    pause_s: float
    load_s: float
    resume_s: float


class _Client[Stub](ABC):
    """A client of one peer: deadlines, translated errors, and retries of calls that may run twice.

    role: the role whose certificate the peer must have.
    """

    role: ClassVar[str]

    def __init__(
        self, address: str, peer: str, limit_bytes: int, identity: Identity | None, token: RunToken | None = None
    ) -> None:
        """limit_bytes: largest message, in and out (`limits.py`). identity: of this process; None without TLS.

        token: of a run on one machine, which the peer asks for; None otherwise.
        """
        self.address = address
        self.peer = f"{peer} at {address}"
        self._limit_bytes = limit_bytes
        self._identity = identity
        self._token = token
        self._channels: list[grpc.aio.Channel] = []  # older ones stay open for the calls in progress over them
        metrics.RPC_RETRIES.labels(self.role)  # exports 0, so that alerts see the first increase
        self._open_channel()

    def _open_channel(self) -> None:
        """Open a channel with the current certificate. Calls in progress continue over the previous channel."""
        options: list[tuple[str, Any]] = [*make_channel_options(self._limit_bytes), _WITHOUT_PROXY]
        if self._identity is None:
            channel = grpc.aio.insecure_channel(self.address, options=options)
        else:
            self._stamp = self._identity.read_file_stamp()
            # Peers are found by address, but a certificate names its owner's role: see `tls`.
            options.append(("grpc.ssl_target_name_override", self._identity.name_for_role(self.role)))
            channel = grpc.aio.secure_channel(self.address, self._identity.make_channel_credentials(), options=options)
        self._channels.append(channel)
        self._newest_stub = self._make_stub(channel)

    @property
    def _stub(self) -> Stub:
        """The generated stub, over a new channel if the certificate files have changed."""
        if self._identity is not None and self._identity.read_file_stamp() != self._stamp:
            self._open_channel()
        return self._newest_stub

    @staticmethod
    @abstractmethod
    def _make_stub(channel: grpc.aio.Channel) -> Stub:
        """Make the generated stub of the service for a channel."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every channel. Calls in progress fail with PeerUnavailable."""
        for channel in self._channels:
            await channel.close(None)

    def _make_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of one call: the present span, and a proof of the run's token for the peer's port."""
        if self._token is None:
            return _span_metadata()
        return (*_span_metadata(), (PROOF_KEY, self._token.make_proof(int(self.address.rpartition(":")[2]))))

    async def _call_once[T](self, call: Callable[..., Awaitable[T]], request: Any, deadline_s: float) -> T:
        check_size(f"a request to {self.peer}", request.ByteSize(), self._limit_bytes)
        try:
            return await call(request, timeout=deadline_s, metadata=self._make_metadata())
        except DecodeError as error:
            raise _make_reply_error(self.peer) from error
        except grpc.aio.AioRpcError as error:
            raise translate_rpc_error(error, self.peer) from error

    async def _retry_call[T](
        self, call: Callable[..., Awaitable[T]], request: Any, deadline_s: float = STATUS_DEADLINE_S
    ) -> T:
        """Call up to ATTEMPTS times while the error is retryable. Only for calls that may run twice.

        Pauses double, without jitter: only the coordinator calls peers this way, each one once at a time.
        """
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._call_once(call, request, deadline_s)
            except SpecrlError as error:
                if not error.retryable:
                    raise
                metrics.RPC_RETRIES.labels(self.role).inc()
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        return await self._call_once(call, request, deadline_s)


@dataclass(frozen=True)
class GenerateOptions:
    """Options of a Generate request; generation.proto describes them.

    admit_together: the engine admits all rollouts of the request before it computes any. min_policy_version: the
    replica refuses to serve an older one. outlives_call: rollouts that are unfinished when the call breaks continue for
    a while, so that a later call can resume them. resumes: take the rollouts that the replica holds, and begin only the
    others.
    """

    admit_together: bool
    min_policy_version: int
    outlives_call: bool = False
    resumes: bool = False


class GenerationCall:
    """One Generate call: request rollouts at any time, and receive each one when it finishes.

    The call has no deadline. If the replica dies, the connection breaks, or the coordinator misses its heartbeats and
    cancels the call.
    """

    def __init__(self, peer: str, limit_bytes: int, method: Callable[[AsyncGenerator[Any]], Any]) -> None:
        """method: begins `Generate` over the current channel, given the requests; called by `receive_rollouts`."""
        self._peer = peer
        self._limit_bytes = limit_bytes
        self._method = method
        self._asked: asyncio.Queue[generation_pb2.GenerateRequest | None] = asyncio.Queue()
        self._missing: dict[str, tuple[str, int]] = {}  # (group, sample) of missing rollouts, by rollout id

    def request_rollouts(self, requests: Sequence[RolloutRequest], options: GenerateOptions) -> None:
        """Queue a request for rollouts. Does not wait. Raises MessageTooLarge."""
        message = generation_pb2.GenerateRequest(
            requests=[wire.request_to_wire(item) for item in requests],
            admit_together=options.admit_together,
            min_policy_version=options.min_policy_version,
            outlives_call=options.outlives_call,
            resumes=options.resumes,
        )
        check_size(f"a request to {self._peer}", message.ByteSize(), self._limit_bytes)
        self._missing |= {item.rollout_id: (item.group_id, item.sample_index) for item in requests}
        self._asked.put_nowait(message)

    def close_requests(self) -> None:
        """Close the request side: the call ends with the last rollout."""
        self._asked.put_nowait(None)

    async def receive_rollouts(self) -> AsyncGenerator[Rollout]:
        """Yield each rollout when it finishes, until the call ends.

        Closing the iterator cancels the call, which aborts unfinished rollouts unless they outlive it. Raises
        PeerUnavailable if the call breaks. Raises RecordInvalid for a rollout that was not requested or has arrived
        already, because another one is missing then.
        """
        call = self._method(self._stream_requests())
        try:
            async for data in call:
                rollout = wire.rollout_from_bytes(data)
                place = rollout.group_id, rollout.sample_index
                if self._missing.pop(rollout.rollout_id, None) != place:
                    raise RecordInvalid(
                        f"{self._peer} sent a rollout that was not requested or came before: "
                        f"{rollout.rollout_id[:64]!r} as sample {place[1]} of {place[0][:64]!r}; ending the call and "
                        "requesting its rollouts again"
                    )
                yield rollout
        except asyncio.CancelledError as error:
            # grpc.aio also raises CancelledError when the call, and not this task, was cancelled.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise PeerUnavailable(f"the call to {self._peer} was cancelled; calling again") from error
        except grpc.aio.AioRpcError as error:
            raise translate_rpc_error(error, self._peer) from error
        finally:
            call.cancel()
            self.close_requests()  # grpc.aio's task that reads requests would otherwise outlive a failed call

    async def _stream_requests(self) -> AsyncGenerator[generation_pb2.GenerateRequest]:
        # `request_rollouts` and `close_requests` wake it. The call bounds the wait: its `finally` closes the queue.
        while (message := await self._asked.get()) is not None:
            yield message


class GenerationClient(_Client["generation_pb2_grpc.GenerationServiceAsyncStub"]):
    """Client of one replica."""

    role = GENERATION

    def __init__(
        self,
        address: str,
        replica_id: str = "replica",
        limit_bytes: int = LARGEST_BYTES,
        identity: Identity | None = None,
        token: RunToken | None = None,
    ) -> None:
        super().__init__(address, replica_id, limit_bytes, identity, token)

    @staticmethod
    def _make_stub(channel: grpc.aio.Channel) -> generation_pb2_grpc.GenerationServiceAsyncStub:
        """Make a stub whose Generate yields rollouts as bytes. They are parsed once, and stored and sent on as such."""
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        untyped: Any = channel  # the types of the generated stub have messages in place of bytes
        stub.Generate = untyped.stream_stream(
            "/specrl.api.v1.GenerationService/Generate",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
        )
        return stub

    def _begin_generate(self, requests: AsyncGenerator[generation_pb2.GenerateRequest]) -> Any:
        return cast(Any, self._stub.Generate)(requests, metadata=self._make_metadata())

    def open_call(self) -> GenerationCall:
        """Open a call over which rollouts can be requested as seats become free."""
        return GenerationCall(self.peer, self._limit_bytes, self._begin_generate)

    async def generate_rollouts(
        self,
        requests: Sequence[RolloutRequest],
        admit_together: bool,
        min_policy_version: int,
        *,
        outlives_call: bool = False,
        resumes: bool = False,
    ) -> AsyncGenerator[Rollout]:
        """Request rollouts over a call of their own, and yield them as they finish; see `GenerationCall`."""
        call = self.open_call()
        call.request_rollouts(requests, GenerateOptions(admit_together, min_policy_version, outlives_call, resumes))
        call.close_requests()
        async with aclosing(call.receive_rollouts()) as rollouts:
            async for rollout in rollouts:
                yield rollout

    async def receive_weights(
        self, policy_version: int, group: WeightGroup, manifest: WeightManifest | None, deadline_s: float
    ) -> tuple[WeightChecksums, float]:
        """Have the replica stage one version's weights. Returns (checksums of what arrived, seconds).

        manifest: None to reuse that of the last transfer to this replica, because it may have megabytes. Raises
        RecordInvalid if there was none.
        """
        request = generation_pb2.ReceiveWeightsRequest(
            policy_version=policy_version,
            group=wire.weight_group_to_wire(group),
            manifest=wire.manifest_to_wire(manifest) if manifest is not None else None,
        )
        reply = await self._call_once(self._stub.ReceiveWeights, request, deadline_s)
        return wire.checksums_from_wire(reply.received), reply.broadcast_seconds

    async def commit_update(self, sent: WeightChecksums, deadline_s: float) -> UpdateTiming:
        """Have the replica verify the staged weights, pause, load and resume.

        Raises ChecksumMismatch if the staged weights differ from those sent. Raises VersionConflict if the replica then
        serves another policy or drafter version than was sent.
        """
        request = generation_pb2.CommitUpdateRequest(sent=wire.checksums_to_wire(sent))
        reply = await self._call_once(self._stub.CommitUpdate, request, deadline_s)
        served = (reply.policy_version, wire.drafter_version_from_wire(reply))
        if served != (sent.policy_version, sent.drafter_version):
            raise VersionConflict(
                f"{self.peer} serves policy version {served[0]} with drafter version {served[1]}, but was sent "
                f"{sent.policy_version} with {sent.drafter_version}; repeating the transfer"
            )
        return UpdateTiming(reply.verify_seconds, reply.pause_seconds, reply.load_seconds, reply.resume_seconds)

    async def probe_status(self, deadline_s: float) -> GenerationStatus:
        """Get the status without retries. Raises PeerUnavailable or DeadlineExceeded."""
        request = generation_pb2.GetGenerationStatusRequest()
        reply = await self._call_once(self._stub.GetGenerationStatus, request, deadline_s)
        return wire.generation_status_from_wire(reply)

    async def get_status(self) -> GenerationStatus:
        """Get versions and counters of the replica."""
        reply = await self._retry_call(self._stub.GetGenerationStatus, generation_pb2.GetGenerationStatusRequest())
        return wire.generation_status_from_wire(reply)


class TrainerClient(_Client["trainer_pb2_grpc.TrainerServiceAsyncStub"]):
    """Client of the trainer's rank 0."""

    role = TRAINER

    def __init__(
        self,
        address: str,
        limit_bytes: int = LARGEST_BYTES,
        identity: Identity | None = None,
        token: RunToken | None = None,
    ) -> None:
        super().__init__(address, "trainer", limit_bytes, identity, token)

    @staticmethod
    def _make_stub(channel: grpc.aio.Channel) -> trainer_pb2_grpc.TrainerServiceAsyncStub:
        """Make a stub whose TrainParts takes the parts of a batch as bytes, see `wire.encode_train_parts`."""
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        untyped: Any = channel
        stub.TrainParts = untyped.stream_unary(
            "/specrl.api.v1.TrainerService/TrainParts", response_deserializer=trainer_pb2.TrainPartsReply.FromString
        )
        return stub

    async def train_step(self, batch: Batch, deadline_s: float) -> TrainMetrics:
        """Train the step of a batch. Sending the last step again returns its recorded metrics."""
        call: Any = cast(Any, self._stub.TrainParts)(timeout=deadline_s, metadata=self._make_metadata())
        # Part by part, so that neither the whole batch is in memory twice nor the event loop is blocked while encoding
        # it.
        try:
            for part in wire.encode_train_parts(batch):
                check_size(f"a request to {self.peer}", len(part), self._limit_bytes)
                if call.done():  # the trainer refused an earlier part; `await call` raises why
                    break
                await call.write(part)
            else:
                await call.done_writing()
            reply = await call
        except DecodeError as error:
            raise _make_reply_error(self.peer) from error
        except grpc.aio.AioRpcError as error:
            raise translate_rpc_error(error, self.peer) from error
        finally:
            call.cancel()  # does nothing once the call has ended; otherwise the trainer must not wait for more parts
        return wire.train_metrics_from_wire(reply.metrics)

    async def train_drafter(
        self,
        rollouts: Sequence[TrainRollout],
        held_out: Sequence[TrainRollout],
        epochs: Sequence[DrafterEpoch],
        deadline_s: float,
    ) -> list[DrafterEpochMetrics]:
        """Initialise the drafter on rollouts of the present policy.

        epochs: all from the first; the trainer skips those that it has finished. Returns what it has finished, in
        order: at least these epochs.
        """
        request = trainer_pb2.TrainDrafterRequest(
            rollouts=[wire.train_rollout_to_wire(item) for item in rollouts],
            held_out=[wire.train_rollout_to_wire(item) for item in held_out],
            epochs=[wire.drafter_epoch_to_wire(item) for item in epochs],
        )
        reply = await self._call_once(self._stub.TrainDrafter, request, deadline_s)
        return [wire.drafter_epoch_metrics_from_wire(item) for item in reply.epochs]

    async def score_rollouts(self, rollouts: Sequence[TrainRollout], deadline_s: float) -> list[list[float]]:
        """Compute log-probabilities (nats) of every rollout's tokens under the present policy."""
        request = trainer_pb2.ScoreRequest(rollouts=[wire.train_rollout_to_wire(item) for item in rollouts])
        reply = await self._call_once(self._stub.Score, request, deadline_s)
        return [list(item.logprobs) for item in reply.rollouts]

    async def describe_weights(self) -> WeightManifest:
        """Get the tensors of a broadcast, in order."""
        reply = await self._retry_call(self._stub.DescribeWeights, trainer_pb2.DescribeWeightsRequest(), 60.0)
        return wire.manifest_from_wire(reply)

    async def open_weight_group(self, group: WeightGroup) -> tuple[str, int]:
        """Open the rendezvous store of a new weight group. Returns (address, port)."""
        request = trainer_pb2.OpenWeightGroupRequest(
            group_id=group.group_id,
            world_size=group.world_size,
            timeout_s=group.timeout_s,
            transport=group.transport,
        )
        reply = await self._retry_call(self._stub.OpenWeightGroup, request, group.timeout_s + STATUS_DEADLINE_S)
        return reply.address, reply.port

    async def broadcast_weights(self, group_id: str, deadline_s: float) -> SentWeights:
        """Broadcast the present version to a weight group."""
        request = trainer_pb2.BroadcastWeightsRequest(group_id=group_id)
        reply = await self._call_once(self._stub.BroadcastWeights, request, deadline_s)
        return SentWeights(
            wire.checksums_from_wire(reply.sent), reply.size_bytes, reply.weight_transport, reply.nccl_transport
        )

    async def write_weights(self, must_rewrite: bool, deadline_s: float) -> tuple[WeightChecksums, str, int]:
        """Have the present version written into a folder. Returns (checksums, folder, bytes).

        must_rewrite: write it into another folder even if it is written already, because a replica could not read it.
        """
        reply = await self._call_once(
            self._stub.WriteWeights, trainer_pb2.WriteWeightsRequest(must_rewrite=must_rewrite), deadline_s
        )
        return wire.checksums_from_wire(reply.written), reply.folder, reply.size_bytes

    async def save_checkpoint(
        self,
        step: int,
        deadline_s: float,
        stream: StreamPlace | None = None,
        *,
        in_background: bool = False,
        best_step: int = 0,
    ) -> str:
        """Write a checkpoint of `step`. Returns its path.

        step: the trainer's present step, or one whose checkpoint has begun. stream: the data position after that step.
        in_background: return once the next step may be trained; calling again then waits for the checkpoint.
        best_step: a step whose checkpoint must stay beside the newest; 0: none.
        """
        place = wire.stream_place_to_wire(stream) if stream is not None else None
        request = trainer_pb2.SaveCheckpointRequest(
            step=step, in_background=in_background, stream=place, best_step=best_step
        )
        reply = await self._retry_call(self._stub.SaveCheckpoint, request, deadline_s)
        return reply.path

    async def export_model(self, directory: str, deadline_s: float, *, drafter_only: bool = False) -> tuple[str, str]:
        """Write policy and drafter as Hugging Face folders. Returns (policy path, drafter path); empty: not written.

        drafter_only: the policy is written only if the drafter is a part of it.
        """
        request = trainer_pb2.ExportModelRequest(directory=directory, drafter_only=drafter_only)
        reply = await self._retry_call(self._stub.ExportModel, request, deadline_s)
        return reply.policy_path, reply.drafter_path

    async def get_status(self) -> TrainerStatus:
        """Get the trainer's step, checkpoint and drafter state."""
        reply = await self._retry_call(self._stub.GetTrainerStatus, trainer_pb2.GetTrainerStatusRequest())
        return wire.trainer_status_from_wire(reply)


class CoordinatorClient(_Client["coordinator_pb2_grpc.CoordinatorServiceAsyncStub"]):
    """Client of the coordinator, for its peers. It does not retry: `membership.py` does."""

    role = COORDINATOR

    def __init__(self, address: str, identity: Identity | None = None, token: RunToken | None = None) -> None:
        super().__init__(address, "coordinator", CONTROL_BYTES, identity, token)

    @staticmethod
    def _make_stub(channel: grpc.aio.Channel) -> coordinator_pb2_grpc.CoordinatorServiceAsyncStub:
        return coordinator_pb2_grpc.CoordinatorServiceStub(channel)

    async def register_peer(
        self, peer: Peer, generation: GenerationStatus | None = None, held_rollouts: Sequence[HeldRollout] = ()
    ) -> Registration:
        """Register a peer, and the rollouts that a replica holds. Raises RunInvalid if its run file differs."""
        request = wire.registration_to_wire(peer, generation, held_rollouts)
        reply = await self._call_once(self._stub.Register, request, STATUS_DEADLINE_S)
        return Registration(reply.run, reply.heartbeat_interval_s)

    async def send_heartbeat(
        self, peer_id: str, incarnation: str, generation: GenerationStatus | None
    ) -> Acknowledgement:
        """Report that the peer is alive. Step costs are left out; the coordinator asks for them once per step."""
        status = wire.generation_status_to_wire(replace(generation, step_costs=())) if generation is not None else None
        request = coordinator_pb2.HeartbeatRequest(peer_id=peer_id, incarnation=incarnation, generation=status)
        reply = await self._call_once(self._stub.Heartbeat, request, STATUS_DEADLINE_S)
        return Acknowledgement(reply.is_known, reply.must_leave)

    async def leave_run(self, peer_id: str, incarnation: str, drain_s: float = 0.0) -> None:
        """Leave the run. A replica gets no new rollouts, and at most `drain_s` seconds to finish those it has."""
        request = coordinator_pb2.LeaveRequest(peer_id=peer_id, incarnation=incarnation, drain_s=drain_s)
        await self._call_once(self._stub.Leave, request, drain_s + STATUS_DEADLINE_S)

    async def dismiss_replica(self, replica_id: str) -> None:
        """Have a replica drain and end. Raises VersionConflict if no replica has this name."""
        await self._call_once(
            self._stub.Dismiss, coordinator_pb2.DismissRequest(replica_id=replica_id), STATUS_DEADLINE_S
        )

    async def find_draft_costs(self, key: str) -> str:
        """Return the draft costs that an earlier replica of this kind kept, as JSON; empty if none did."""
        request = coordinator_pb2.FindDraftCostsRequest(key=key)
        return (await self._call_once(self._stub.FindDraftCosts, request, STATUS_DEADLINE_S)).costs

    async def keep_draft_costs(self, key: str, costs: str) -> None:
        """Keep draft costs for later replicas of this kind. costs: a JSON object."""
        request = coordinator_pb2.KeepDraftCostsRequest(key=key, costs=costs)
        await self._call_once(self._stub.KeepDraftCosts, request, STATUS_DEADLINE_S)
