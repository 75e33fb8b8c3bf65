"""The coordinator's gRPC service: peers register, send heartbeats and leave. Passes every call on to the registry."""

from __future__ import annotations

from typing import Any

import grpc.aio

from specrl.api.v1 import coordinator_pb2, coordinator_pb2_grpc
from specrl.coordinator.members.registry import Registry
from specrl.records import wire
from specrl.rpc.server import export_zero_counts
from specrl.rpc.tls import CallerGuard


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves one Registry, in its event loop.

    guard: checks that a peer registers in the role that its certificate names; None without TLS.
    """

    def __init__(self, registry: Registry, run: str, heartbeat_s: float, guard: CallerGuard | None = None) -> None:
        self._registry = registry
        self._run = run
        self._heartbeat_s = heartbeat_s
        self._guard = guard

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add this service to a server, and start its call metrics at zero."""
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, server)
        export_zero_counts(coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"])

    async def Register(self, request: coordinator_pb2.RegisterRequest, context: Any) -> coordinator_pb2.RegisterReply:
        peer = wire.peer_from_wire(request)
        if self._guard is not None:
            self._guard.restrict_to(peer.role.value).check_caller("Register", context.auth_context())
        status = wire.generation_status_from_wire(request.generation) if request.HasField("generation") else None
        held_rollouts = tuple(wire.held_from_wire(item) for item in request.held_rollouts)
        self._registry.register_peer(peer, status, held_rollouts)
        return coordinator_pb2.RegisterReply(heartbeat_interval_s=self._heartbeat_s, run=self._run)

    async def Heartbeat(
        self, request: coordinator_pb2.HeartbeatRequest, context: Any
    ) -> coordinator_pb2.HeartbeatReply:
        status = wire.generation_status_from_wire(request.generation) if request.HasField("generation") else None
        is_known = self._registry.note_heartbeat(request.peer_id, request.incarnation, status)
        must_leave = is_known and self._registry.must_peer_leave(request.peer_id)
        return coordinator_pb2.HeartbeatReply(is_known=is_known, must_leave=must_leave)

    async def Leave(self, request: coordinator_pb2.LeaveRequest, context: Any) -> coordinator_pb2.LeaveReply:
        await self._registry.remove_leaving_peer(request.peer_id, request.incarnation, request.drain_s)
        return coordinator_pb2.LeaveReply()

    async def Dismiss(self, request: coordinator_pb2.DismissRequest, context: Any) -> coordinator_pb2.DismissReply:
        self._registry.dismiss_replica(request.replica_id)
        return coordinator_pb2.DismissReply()
