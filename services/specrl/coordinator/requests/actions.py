"""The routes that change a run: pause, resume, checkpoint, scale, and which replicas are not started any more.

Each is idempotent and answers with the status.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException
from fastapi.security import HTTPBearer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from specrl.coordinator.context import RunContext
from specrl.coordinator.requests.refusals import describe_refusals
from specrl.formats.reports import StatusReport

MAX_REPLICAS = 64
"""Most replicas of a run on one machine: as many as are tested."""

_REFUSALS = describe_refusals(
    s401="a token is required",
    s403="the token's user may not update the RLJob",
    s409="the run does not support this, or is over",
    s503="the state cannot be written now; retry",
)


def _parse_whole_float(value: Any) -> Any:
    """Accept 29.0, which is an integer in JSON Schema. "29" and true are not, and stay as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class ScaleRequest(BaseModel):
    """The number of generation replicas that the run should have."""

    model_config = ConfigDict(extra="forbid")

    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS, strict=True), BeforeValidator(_parse_whole_float)]


class GivenUpReplicas(BaseModel):
    """The replicas that the launcher starts no more. It replaces what the launcher has said before."""

    model_config = ConfigDict(extra="forbid")

    reasons: Annotated[
        dict[Annotated[str, Field(pattern=r"^gen-[0-9]{1,2}$")], Annotated[str, Field(max_length=4000)]],
        Field(max_length=MAX_REPLICAS),
    ]
    """Name of the replica to how its last start ended."""


def make_action_routes(context: RunContext, read_status: Callable[[], StatusReport], is_local: bool) -> APIRouter:
    """Make the router of the actions.

    `doors` admits the requests. read_status: returns the run's status, which every route answers with.
    is_local: whether a launcher on this machine starts the replicas. Otherwise the RLJob sets their number.
    """
    token = HTTPBearer(auto_error=False, description="The token file of the run's folder; in a cluster a user's token.")
    router = APIRouter(tags=["actions"], dependencies=[Depends(token)], responses=_REFUSALS)
    phase = context.phase
    controls = context.controls

    def check_writable() -> None:
        """Raise HTTPException 409 when the run is over, 503 while the store is unreachable."""
        if phase.phase.is_over:
            raise HTTPException(409, f"the run is over (phase {phase.phase}) and takes no more requests")
        # Otherwise the request would wait for the store, and its sender with it.
        if not phase.is_store_reachable:
            raise HTTPException(503, f"the request cannot be stored now: {phase.detail}; retry later")

    @router.post("/pause")
    async def pause_run() -> StatusReport:
        """Start no new rollout and no training step; finish those under way. A restarted coordinator stays paused."""
        check_writable()
        await controls.pause_run()
        return read_status()

    @router.post("/resume")
    async def resume_run() -> StatusReport:
        """Resume a paused run."""
        check_writable()
        await controls.resume_run()
        return read_status()

    @router.post("/checkpoint", status_code=202)
    async def request_checkpoint() -> StatusReport:
        """Request a checkpoint after the present step. The status shows it as checkpointStep once it is complete."""
        check_writable()
        controls.request_checkpoint()
        return read_status()

    @router.put("/scale", status_code=202, responses=describe_refusals(s400="the body is not JSON"))
    async def scale_run(wanted: ScaleRequest) -> StatusReport:
        """Set the number of generation replicas of a local run. Surplus replicas drain: they finish their rollouts."""
        if not is_local:
            raise HTTPException(
                409,
                "the replicas of an RLJob must be set through the API server, got a request to the coordinator; "
                f"use `kubectl scale rljob/{context.spec.name} --replicas {wanted.replicas}`",
            )
        check_writable()
        try:
            controls.scale_replicas(wanted.replicas)
        except OSError as error:
            raise HTTPException(503, f"the run file could not be written: {error}; free space and retry") from error
        return read_status()

    # Not part of the API that users have, and so not in its description.
    @router.put("/given-up", status_code=202, include_in_schema=False)
    async def give_up_replicas(given_up: GivenUpReplicas) -> StatusReport:
        """Say which replicas of a local run are not started any more, and why. Sent by the run's launcher."""
        if not is_local:
            raise HTTPException(409, "the replicas of an RLJob are restarted by Kubernetes, so none is given up")
        check_writable()
        context.registry.set_not_started(given_up.reasons)
        return read_status()

    return router
