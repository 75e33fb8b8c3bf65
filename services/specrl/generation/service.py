"""The gRPC face of a replica. Protobuf stops here; everything is decided by the coordinator and done by the engine.

    SERVING --PrepareUpdate--> PAUSED --ReceiveWeights*--> PAUSED --CommitUpdate--> SERVING (new version)
                               PAUSED --AbortUpdate--> SERVING (old version)

A replica that was prepared and then forgotten stays paused: tokens sampled under its old version could break the lag
bound, and only the coordinator knows. It is not silent about it: `_watch` warns every time an update's whole allowance
(weights.timeoutS * weights.attempts) passes, and the heartbeats say `is_paused`. The coordinator then commits, aborts
or ejects it. The watch is ended by CommitUpdate, AbortUpdate and `close`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

import grpc.aio
import structlog

from specrl.api.v1 import generation_pb2, generation_pb2_grpc, rollout_pb2
from specrl.errors import RecordInvalid, VersionConflict
from specrl.generation.engine import Engine
from specrl.records import Rollout, RolloutRequest, wire
from specrl.spec.run import Weights

log = structlog.get_logger(__name__)


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """One replica's servicer over any Engine."""

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self._engine = engine
        self._allowance_s = float(weights.timeout_s * weights.attempts)
        self._watcher: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve the calls of this service."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.Rollout]:
        """Stream each rollout when it finishes; cancelling the call aborts what is unfinished."""
        requests = [wire.request_from_wire(item) for item in request.requests]
        _check_requests(requests)
        served = (await self._engine.status()).policy_version
        if served < request.min_policy_version:
            raise VersionConflict(
                f"policy version must be >= {request.min_policy_version}, got {served}; update the replica first"
            )
        # Every engine's `generate` is an async generator; the protocol cannot say so.
        stream = cast(AsyncGenerator[Rollout], self._engine.generate(requests, request.admit_together))
        async with aclosing(stream) as rollouts:
            async for rollout in rollouts:
                yield wire.rollout_to_wire(rollout)

    async def PrepareUpdate(
        self, request: generation_pb2.PrepareUpdateRequest, context: Any
    ) -> generation_pb2.PrepareUpdateReply:
        """Pause, keeping every unfinished rollout. Idempotent; restarts the watch."""
        seconds = await self._engine.pause()
        self._watch(request.policy_version)
        log.info("update_prepared", policy_version=request.policy_version, seconds=round(seconds, 3))
        return generation_pb2.PrepareUpdateReply(pause_seconds=seconds)

    async def ReceiveWeights(
        self, request: generation_pb2.ReceiveWeightsRequest, context: Any
    ) -> generation_pb2.ReceiveWeightsReply:
        """Take part in one broadcast; nothing is loaded."""
        began = time.monotonic()
        received = await self._engine.receive(
            wire.weight_group_from_wire(request.group),
            wire.manifest_from_wire(request.manifest),
            request.policy_version,
        )
        seconds = time.monotonic() - began
        log.info("weights_received", policy_version=request.policy_version, seconds=round(seconds, 3))
        return generation_pb2.ReceiveWeightsReply(received=wire.checksums_to_wire(received), broadcast_seconds=seconds)

    async def CommitUpdate(
        self, request: generation_pb2.CommitUpdateRequest, context: Any
    ) -> generation_pb2.CommitUpdateReply:
        """Verify, load, take the version, resume. After ChecksumMismatch the replica is still paused, and watched."""
        began = time.monotonic()
        sent = wire.checksums_from_wire(request.sent)
        timing = await self._engine.load(sent)
        total_s = time.monotonic() - began
        self._end_watch()
        log.info("weights_loaded", policy_version=sent.policy_version, seconds=round(total_s, 3))
        served = await self._engine.status()
        return generation_pb2.CommitUpdateReply(
            policy_version=served.policy_version,
            drafter_version=wire.drafter_version_to_wire(served.drafter_version),
            verify_seconds=max(0.0, total_s - timing.load_s - timing.resume_s),
            load_seconds=timing.load_s,
            resume_seconds=timing.resume_s,
        )

    async def AbortUpdate(
        self, request: generation_pb2.AbortUpdateRequest, context: Any
    ) -> generation_pb2.AbortUpdateReply:
        """Drop what is staged and go on under the version that was served before. Idempotent."""
        await self._engine.discard()
        await self._engine.resume()
        self._end_watch()
        log.info("update_aborted", policy_version=request.policy_version)
        return generation_pb2.AbortUpdateReply()

    async def GetGenerationStatus(
        self, request: generation_pb2.GetGenerationStatusRequest, context: Any
    ) -> generation_pb2.GenerationStatus:
        """Versions and counters."""
        return wire.generation_status_to_wire(await self._engine.status())

    def close(self) -> None:
        """End the watch."""
        self._end_watch()

    def _watch(self, policy_version: int) -> None:
        self._end_watch()

        async def warn() -> None:
            began = time.monotonic()
            while True:
                await asyncio.sleep(self._allowance_s)
                seconds = round(time.monotonic() - began)
                log.warning("update_forgotten", policy_version=policy_version, paused_seconds=seconds)

        self._watcher = asyncio.create_task(warn())

    def _end_watch(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None


def _check_requests(requests: Sequence[RolloutRequest]) -> None:
    """Raise RecordInvalid for an empty call or for two requests of one name; the engine checks each request itself."""
    if not requests:
        raise RecordInvalid("a Generate call must have at least one request, got none; do not call")
    twice = [name for name, count in Counter(request.rollout_id for request in requests).items() if count > 1]
    if twice:
        raise RecordInvalid(f"rollout ids must be unique within a call, got {twice[0]!r} twice; name each sample")
