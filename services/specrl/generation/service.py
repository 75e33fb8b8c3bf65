"""The gRPC face of a replica. Protobuf stops here; everything is decided by the coordinator and done by the engine.

    SERVING --ReceiveWeights*--> SERVING (staged) --CommitUpdate--> SERVING (new version)

Rollouts go on while weights arrive; they stand still only inside of CommitUpdate, which ends in the new version or does
not begin, when the checksums differ. So a coordinator that dies in the middle of an update leaves no replica paused.
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
from specrl.generation.engine import Engine, answers
from specrl.generation.holdings import Holdings
from specrl.records import HeldRollout, Rollout, RolloutRequest, WeightManifest, wire
from specrl.rpc.inflow import Inflow
from specrl.rpc.server import count_from_zero
from specrl.spec.run import Weights
from specrl.telemetry.spans import SILENT, OpenSpan, Recorder, SpanContext, SpanName

LONGEST_ID = 256

log = structlog.get_logger(__name__)


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """One replica's servicer over any Engine. recorder: hears of each rollout, with what the engine says of it."""

    def __init__(self, engine: Engine, weights: Weights, reattach_s: float, recorder: Recorder = SILENT) -> None:
        self._engine, self._recorder = engine, recorder
        self._timeout_s = float(weights.timeout_s)
        self._holdings = Holdings(engine, reattach_s)
        self._manifest: WeightManifest | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve the calls of this service."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        count_from_zero(generation_pb2.DESCRIPTOR.services_by_name["GenerationService"])

    async def Generate(
        self, request_iterator: AsyncIterator[generation_pb2.GenerateRequest], context: Any
    ) -> AsyncIterator[rollout_pb2.Rollout]:
        """Stream each rollout when it finishes; cancelling the call aborts what does not outlive it."""
        spans: dict[str, OpenSpan] = {}
        rollouts: Inflow[Rollout] = Inflow()

        async def begin() -> None:
            async for request in request_iterator:
                rollouts.add(await self._begun(request, spans))

        rollouts.spawn(begin())
        try:
            async with aclosing(rollouts.items()) as finished:
                async for rollout in finished:
                    span = spans.pop(rollout.rollout_id)
                    span.note(tokens=len(rollout.token_ids_T))
                    span.end()
                    yield wire.rollout_to_wire(rollout)
        finally:
            for span in spans.values():  # what the caller did not wait for, or the engine did not finish
                span.end("unfinished")

    async def _begun(
        self, request: generation_pb2.GenerateRequest, spans: dict[str, OpenSpan]
    ) -> AsyncGenerator[Rollout]:
        """What one request asks for, as it finishes. spans: of all that is under way in the call, by name."""
        asked = [wire.request_from_wire(item) for item in request.requests]
        _check_requests(asked, spans)
        status = await self._engine.status()
        served = status.policy_version
        if served < request.min_policy_version:
            raise VersionConflict(
                f"policy version must be >= {request.min_policy_version}, got {served}; update the replica first"
            )
        begun = {item.rollout_id: self._span(item, status.replica_id) for item in asked}
        spans |= begun
        if self._recorder.is_heard:
            asked = [replace(item, traceparent=begun[item.rollout_id].traceparent) for item in asked]
        if request.outlives_call:
            return self._holdings.stream(asked, served, admit_together=request.admit_together, resumes=request.resumes)
        return answers(self._engine, asked, request.admit_together)

    def _span(self, request: RolloutRequest, replica_id: str) -> OpenSpan:
        """Of one rollout: below the caller's, or else below the call."""
        caller = SpanContext.parse(request.traceparent)
        return self._recorder.begin(SpanName.GENERATE, replica_id, caller, rollout=request.rollout_id)

    async def ReceiveWeights(
        self, request: generation_pb2.ReceiveWeightsRequest, context: Any
    ) -> generation_pb2.ReceiveWeightsReply:
        """Take part in one broadcast; nothing is loaded."""
        began = time.monotonic()
        group = wire.weight_group_from_wire(request.group)
        group.check(self._timeout_s)
        if group.rank == 0 and not group.folder:
            raise RecordInvalid("a replica's rank in a weight group must be >= 1, got 0, the trainer's; count from 1")
        manifest = wire.manifest_from_wire(request.manifest) if request.HasField("manifest") else self._manifest
        if manifest is None:
            raise RecordInvalid(
                "the first transfer to a replica must have a manifest, got none; send what DescribeWeights says"
            )
        received = await self._engine.receive(group, manifest, request.policy_version)
        self._manifest = manifest
        seconds = time.monotonic() - began
        log.info("weights_received", policy_version=request.policy_version, seconds=round(seconds, 3))
        return generation_pb2.ReceiveWeightsReply(received=wire.checksums_to_wire(received), broadcast_seconds=seconds)

    async def CommitUpdate(
        self, request: generation_pb2.CommitUpdateRequest, context: Any
    ) -> generation_pb2.CommitUpdateReply:
        """Verify, pause, load, take the version, resume. After ChecksumMismatch the old version is served."""
        began = time.monotonic()
        sent = wire.checksums_from_wire(request.sent)
        timing = await self._engine.load(sent)
        total_s = time.monotonic() - began
        log.info("weights_loaded", policy_version=sent.policy_version, seconds=round(total_s, 3))
        served = await self._engine.status()
        return generation_pb2.CommitUpdateReply(
            policy_version=served.policy_version,
            drafter_version=wire.drafter_version_to_wire(served.drafter_version),
            verify_seconds=max(0.0, total_s - timing.pause_s - timing.load_s - timing.resume_s),
            pause_seconds=timing.pause_s,
            load_seconds=timing.load_s,
            resume_seconds=timing.resume_s,
        )

    async def GetGenerationStatus(
        self, request: generation_pb2.GetGenerationStatusRequest, context: Any
    ) -> generation_pb2.GenerationStatus:
        """Versions and counters."""
        return wire.generation_status_to_wire(await self._engine.status())

    def held(self) -> list[HeldRollout]:
        """What a coordinator that was started again may resume."""
        return self._holdings.held()

    def close(self) -> None:
        """Abort what is under way."""
        self._holdings.close()


def _check_requests(requests: Sequence[RolloutRequest], under_way: Container[str]) -> None:
    """Raise RecordInvalid for no rollout, or for one whose name is another's of the call; engines check the rest."""
    if not requests:
        raise RecordInvalid("a Generate request must ask for at least one rollout, got none; do not send it")
    unfit = [request.rollout_id[:64] for request in requests if not 0 < len(request.rollout_id) <= LONGEST_ID]
    if unfit:
        raise RecordInvalid(f"rollout ids must be 1 to {LONGEST_ID} characters, got {unfit[0]!r}; name each sample")
    if any(stop == "" for request in requests for stop in request.sampling.stop):
        raise RecordInvalid("stop strings must not be empty, got an empty one; leave it out")
    names = Counter(request.rollout_id for request in requests)
    twice = [name for name, count in names.items() if count > 1 or name in under_way]
    if twice:
        raise RecordInvalid(f"rollout ids must be unique within a call, got {twice[0]!r} twice; name each sample")
