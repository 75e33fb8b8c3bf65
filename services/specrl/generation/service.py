"""The gRPC service of a replica. It converts protobuf to records; the coordinator decides, and the engine acts.

    SERVING --ReceiveWeights*--> SERVING (staged) --CommitUpdate--> SERVING (new version)

Rollouts continue while weights arrive. They are paused only within CommitUpdate, which either ends with the new version
or fails before the pause if checksums differ. A load goes on when its call is cancelled (`Engine.load_weights`). So a
coordinator that dies during an update leaves no replica paused.

Called by the coordinator, through `main`'s gRPC server.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Container, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc.aio
import structlog

from specrl.api.v1 import generation_pb2, generation_pb2_grpc, rollout_pb2
from specrl.errors import RecordInvalid, VersionConflict
from specrl.generation.detached_rollouts import DetachedRollouts
from specrl.generation.engine import Engine, generate_checked
from specrl.records import HeldRollout, Rollout, RolloutRequest, WeightManifest, wire
from specrl.rpc.server import export_zero_counts
from specrl.rpc.task_stream import TaskStream
from specrl.spec.run import Weights
from specrl.telemetry.spans import SILENT_RECORDER, OpenSpan, Recorder, SpanContext, SpanName

LONGEST_ID = 256  # characters

log = structlog.get_logger(__name__)


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """The gRPC servicer of one replica, over any Engine.

    reattach_s: seconds for which rollouts outlive a broken call. recorder: records a span for each rollout.
    """

    def __init__(
        self, engine: Engine, weights: Weights, reattach_s: float, recorder: Recorder = SILENT_RECORDER
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._timeout_s = float(weights.timeout_s)
        self._detached = DetachedRollouts(engine, reattach_s)
        self._manifest: WeightManifest | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register this service with a gRPC server."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        export_zero_counts(generation_pb2.DESCRIPTOR.services_by_name["GenerationService"])

    async def Generate(
        self, request_iterator: AsyncIterator[generation_pb2.GenerateRequest], context: Any
    ) -> AsyncIterator[rollout_pb2.Rollout]:
        """Stream each rollout when it finishes. Cancelling the call aborts rollouts that do not outlive it.

        The call is bidirectional: the coordinator adds requests while rollouts stream back.
        """
        spans: dict[str, OpenSpan] = {}
        rollouts: TaskStream[Rollout] = TaskStream()

        async def start_requests() -> None:
            async for request in request_iterator:
                rollouts.add_source(await self._start_rollouts(request, spans))

        rollouts.spawn_task(start_requests())
        try:
            async with aclosing(rollouts.iterate_items()) as finished:
                async for rollout in finished:
                    span = spans.pop(rollout.rollout_id)
                    span.add_attributes(tokens=len(rollout.token_ids_T))
                    span.end()
                    yield wire.rollout_to_wire(rollout)
        finally:
            for span in spans.values():  # the caller left, or the engine failed
                span.end("unfinished")

    async def _start_rollouts(
        self, request: generation_pb2.GenerateRequest, spans: dict[str, OpenSpan]
    ) -> AsyncGenerator[Rollout]:
        """Check and start the rollouts of one request; returns their stream.

        spans: open spans of the call by rollout id; those of this request are added.
        """
        asked = [wire.request_from_wire(item) for item in request.requests]
        _check_requests(asked, spans)
        status = await self._engine.get_status()
        served = status.policy_version
        if served < request.min_policy_version:
            raise VersionConflict(
                f"policy version must be >= {request.min_policy_version}, got {served}; update the replica first"
            )
        begun = {item.rollout_id: self._open_span(item, status.replica_id) for item in asked}
        spans |= begun
        if self._recorder.has_sinks:
            asked = [replace(item, traceparent=begun[item.rollout_id].traceparent) for item in asked]
        if request.outlives_call:
            return self._detached.stream_finished(
                asked, served, admit_together=request.admit_together, resumes=request.resumes
            )
        return generate_checked(self._engine, asked, request.admit_together)

    def _open_span(self, request: RolloutRequest, replica_id: str) -> OpenSpan:
        """Open the span of one rollout, as a child of the caller's span if the request has one, else of the call's."""
        caller = SpanContext.parse_traceparent(request.traceparent)
        return self._recorder.begin_span(SpanName.GENERATE, replica_id, caller, rollout=request.rollout_id)

    async def ReceiveWeights(
        self, request: generation_pb2.ReceiveWeightsRequest, context: Any
    ) -> generation_pb2.ReceiveWeightsReply:
        """Receive one version into the engine's staging area, by broadcast or from a folder. Loads nothing."""
        began = time.monotonic()
        group = wire.weight_group_from_wire(request.group)
        group.check(self._timeout_s)
        if group.rank == 0 and not group.folder:
            raise RecordInvalid("a replica's rank in a weight group must be >= 1, got 0, the trainer's; count from 1")
        # The coordinator sends the manifest once; later transfers have the same tensors.
        manifest = wire.manifest_from_wire(request.manifest) if request.HasField("manifest") else self._manifest
        if manifest is None:
            raise RecordInvalid(
                "the first transfer to a replica must have a manifest, got none; send the reply of DescribeWeights"
            )
        received = await self._engine.receive_weights(group, manifest, request.policy_version)
        self._manifest = manifest
        seconds = time.monotonic() - began
        log.info("weights_received", policy_version=request.policy_version, seconds=round(seconds, 3))
        return generation_pb2.ReceiveWeightsReply(received=wire.checksums_to_wire(received), broadcast_seconds=seconds)

    async def CommitUpdate(
        self, request: generation_pb2.CommitUpdateRequest, context: Any
    ) -> generation_pb2.CommitUpdateReply:
        """Verify the staged weights, pause, load, switch to the new version, resume.

        After ChecksumMismatch the replica still serves the old version.
        """
        began = time.monotonic()
        sent = wire.checksums_from_wire(request.sent)
        timing = await self._engine.load_weights(sent)
        total_s = time.monotonic() - began
        log.info("weights_loaded", policy_version=sent.policy_version, seconds=round(total_s, 3))
        served = await self._engine.get_status()
        return generation_pb2.CommitUpdateReply(
            policy_version=served.policy_version,
            drafter_version=wire.drafter_version_to_wire(served.drafter_version),
            # The rest of the time: waiting for the transfer lock, and comparing checksums.
            verify_seconds=max(0.0, total_s - timing.pause_s - timing.load_s - timing.resume_s),
            pause_seconds=timing.pause_s,
            load_seconds=timing.load_s,
            resume_seconds=timing.resume_s,
        )

    async def GetGenerationStatus(
        self, request: generation_pb2.GetGenerationStatusRequest, context: Any
    ) -> generation_pb2.GenerationStatus:
        """Return versions and counters."""
        return wire.generation_status_to_wire(await self._engine.get_status())

    def list_held(self) -> list[HeldRollout]:
        """List the rollouts that a restarted coordinator can resume."""
        return self._detached.list_held()

    def close(self) -> None:
        """Abort all rollouts."""
        self._detached.close()


def _check_requests(requests: Sequence[RolloutRequest], under_way: Container[str]) -> None:
    """Raise RecordInvalid for an empty request, and for rollout ids that are malformed or already used in the call.

    under_way: ids of the call's unfinished rollouts. The engine checks prompts and sampling.
    """
    if not requests:
        raise RecordInvalid("a Generate request must have at least one rollout, got none; do not send it")
    unfit = [request.rollout_id[:64] for request in requests if not 0 < len(request.rollout_id) <= LONGEST_ID]
    if unfit:
        raise RecordInvalid(f"rollout ids must be 1 to {LONGEST_ID} characters, got {unfit[0]!r}; name each sample")
    if any(stop == "" for request in requests for stop in request.sampling.stop):
        raise RecordInvalid("stop strings must not be empty, got an empty one; leave it out")
    names = Counter(request.rollout_id for request in requests)
    twice = [name for name, count in names.items() if count > 1 or name in under_way]
    if twice:
        raise RecordInvalid(f"rollout ids must be unique within a call, got {twice[0]!r} twice; name each sample")
