"""The coordinator's gRPC service: peers register, send heartbeats and leave, and replicas share draft costs.

Passes every call on to the registry or to the tables of draft costs.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from specrl.api.v1 import coordinator_pb2, coordinator_pb2_grpc
from specrl.coordinator.members.draft_costs import DraftCostTables
from specrl.coordinator.members.registry import Registry
from specrl.records import Role, wire
from specrl.rpc.server import export_zero_counts
from specrl.rpc.tls import CallerGuard


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves one Registry, in its event loop.

    guard: checks that a peer calls in the role that its certificate names; None without TLS. draft_costs: None keeps
    them in memory.
    """

    def __init__(
        self,
        registry: Registry,
        run: str,
        heartbeat_s: float,
        guard: CallerGuard | None = None,
        draft_costs: DraftCostTables | None = None,
    ) -> None:
        self._registry = registry
        self._run = run
        self._heartbeat_s = heartbeat_s
        self._guard = guard
        self._draft_costs = draft_costs or DraftCostTables()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add this service to a server, and start its call metrics at zero."""
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, server)
        export_zero_counts(coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"])

    async def Register(self, request: coordinator_pb2.RegisterRequest, context: Any) -> coordinator_pb2.RegisterReply:
        peer = wire.peer_from_wire(request)
        self._check_role(peer.role, "Register", context)
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

    async def FindDraftCosts(
        self, request: coordinator_pb2.FindDraftCostsRequest, context: Any
    ) -> coordinator_pb2.FindDraftCostsReply:
        self._check_role(Role.GENERATION, "FindDraftCosts", context)
        return coordinator_pb2.FindDraftCostsReply(costs=self._draft_costs.find_table(request.key))

    async def KeepDraftCosts(
        self, request: coordinator_pb2.KeepDraftCostsRequest, context: Any
    ) -> coordinator_pb2.KeepDraftCostsReply:
        self._check_role(Role.GENERATION, "KeepDraftCosts", context)
        self._draft_costs.keep_table(request.key, request.costs)
        return coordinator_pb2.KeepDraftCostsReply()

    def _check_role(self, role: Role, method: str, context: Any) -> None:
        """Raise CallerRefused unless the caller's certificate names this role."""
        if self._guard is not None:
            self._guard.restrict_to(role.value).check_caller(method, context.auth_context())
