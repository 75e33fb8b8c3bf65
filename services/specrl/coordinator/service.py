"""The coordinator's gRPC face: peers register, heartbeat, leave, or are told to leave. It tells the registry."""

from __future__ import annotations

from typing import Any

import grpc.aio

from specrl.api.v1 import coordinator_pb2, coordinator_pb2_grpc
from specrl.coordinator.registry import Registry
from specrl.records import wire
from specrl.rpc.server import count_from_zero
from specrl.rpc.tls import Guard


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Servicer over a Registry; runs in the registry's event loop.

    guard: with TLS a peer registers in the role that its certificate names.
    """

    def __init__(self, registry: Registry, run: str, heartbeat_s: float, guard: Guard | None = None) -> None:
        self._registry, self._run, self._heartbeat_s, self._guard = registry, run, heartbeat_s, guard

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve the calls of this service."""
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, server)
        count_from_zero(coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"])

    async def Register(self, request: coordinator_pb2.RegisterRequest, context: Any) -> coordinator_pb2.RegisterReply:
        peer = wire.peer_from_wire(request)
        if self._guard is not None:
            self._guard.only(peer.role.value).check("Register", context.auth_context())
        status = wire.generation_status_from_wire(request.generation) if request.HasField("generation") else None
        held = tuple(wire.held_from_wire(item) for item in request.held)
        self._registry.register(peer, status, held)
        return coordinator_pb2.RegisterReply(heartbeat_interval_s=self._heartbeat_s, run=self._run)

    async def Heartbeat(
        self, request: coordinator_pb2.HeartbeatRequest, context: Any
    ) -> coordinator_pb2.HeartbeatReply:
        status = wire.generation_status_from_wire(request.generation) if request.HasField("generation") else None
        is_known = self._registry.heartbeat(request.peer_id, request.incarnation, status)
        must_leave = is_known and self._registry.is_dismissed(request.peer_id)
        return coordinator_pb2.HeartbeatReply(is_known=is_known, must_leave=must_leave)

    async def Leave(self, request: coordinator_pb2.LeaveRequest, context: Any) -> coordinator_pb2.LeaveReply:
        await self._registry.leave(request.peer_id, request.incarnation, request.drain_s)
        return coordinator_pb2.LeaveReply()

    async def Dismiss(self, request: coordinator_pb2.DismissRequest, context: Any) -> coordinator_pb2.DismissReply:
        self._registry.dismiss(request.replica_id)
        return coordinator_pb2.DismissReply()
