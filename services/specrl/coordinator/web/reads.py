"""What is to be known of a run: its resources, read only. Every answer is bounded, however long the run."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from specrl.coordinator.admission import Admission
from specrl.coordinator.curves import MOST_POINTS, CurvesReport
from specrl.coordinator.events import EVENTS_KEPT, Event
from specrl.coordinator.exposure import Exposure
from specrl.coordinator.parts import Parts
from specrl.coordinator.report import ReplicaReport, Status, StepReport, ValidationReport
from specrl.coordinator.samples import RolloutSample
from specrl.coordinator.store import REPORTS_KEPT
from specrl.coordinator.targets import TargetGroup
from specrl.coordinator.timeline import TimelineReport
from specrl.coordinator.web.stream import MOST_STREAMS, Streams
from specrl.coordinator.web.words import refusals
from specrl.spec import dump

LAST_STEP = 2**53 - 1
"""JavaScript counts no further."""

After = Annotated[int, Query(ge=0, le=LAST_STEP)]
StepNumber = Annotated[int, Query(ge=1, le=LAST_STEP)]

_UNREAD = refusals(s401="a token is needed", s403="its user may not read the RLJob", s503="nobody could say")


def routes(parts: Parts, readers: Admission) -> APIRouter:
    """Routes for those whom `readers` admits."""
    router = APIRouter(tags=["run"], dependencies=[Depends(readers.admit)], responses=_UNREAD)
    board, events = parts.board, parts.events
    streams = Streams(parts)

    @router.get("/status")
    async def status() -> Status:
        """The run at this moment."""
        return board.status()

    @router.get("/spec", response_class=PlainTextResponse)
    async def spec() -> str:
        """The resolved run file, as YAML."""
        return dump(parts.controls.spec)

    @router.get("/exposure")
    async def exposed() -> Exposure:
        """Exposed generation over the last steps, its causes, and what makes it smaller."""
        return board.exposure()

    @router.get("/steps")
    async def steps(after: After = 0, limit: Annotated[int, Query(ge=1, le=REPORTS_KEPT)] = 100) -> list[StepReport]:
        """The first `limit` reports of steps after `after`, ascending; go on after the last one's step."""
        return board.page(after, limit)

    @router.get("/curves")
    async def curves(
        first: StepNumber = 1,
        last: Annotated[int | None, Query(ge=1, le=LAST_STEP)] = None,
        points: Annotated[int, Query(ge=1, le=MOST_POINTS)] = 300,
    ) -> CurvesReport:
        """Numbers of the steps `first` to `last`, in at most `points` points."""
        return board.curves(first, last, points)

    @router.get("/timeline")
    async def timeline(
        until: Annotated[int | None, Query(ge=1, le=LAST_STEP)] = None,
        steps: Annotated[int, Query(ge=1, le=50)] = 4,
        points: Annotated[int, Query(ge=1, le=1000)] = 300,
    ) -> TimelineReport:
        """Who did what when in the `steps` steps up to `until`, or up to now; of this start of the coordinator."""
        return parts.timeline.report(until, steps, points)

    @router.get("/validations")
    async def validations() -> list[ValidationReport]:
        """The first validation and the newest."""
        return board.validations()

    @router.get("/replicas")
    async def replicas() -> list[ReplicaReport]:
        """Generation replicas, by name."""
        return board.status().replicas

    @router.get("/targets")
    async def targets(request: Request) -> list[TargetGroup]:
        """Where a Prometheus finds the run's processes, for its `http_sd_configs`."""
        return board.targets(request.url.scheme, request.url.netloc)

    @router.get("/events")
    async def happened(
        after: After = 0, limit: Annotated[int, Query(ge=1, le=EVENTS_KEPT)] = EVENTS_KEPT
    ) -> list[Event]:
        """The first `limit` of the kept events with larger ids, ascending."""
        return events.after(after, limit)

    @router.get(
        "/rollouts", responses=refusals(s409="telemetry.rolloutsShown is 0"), summary="A few rollouts in full; opt-in"
    )
    async def rollouts(limit: Annotated[int, Query(ge=1, le=256)] = 16) -> list[RolloutSample]:
        """The newest kept rollouts, the newest first."""
        if not parts.samples.kept:
            raise HTTPException(
                409,
                "rollouts are shown of runs that have opted in, got telemetry.rolloutsShown=0; prompts may be private, "
                "so set it in the run file of the next run",
            )
        return parts.samples.newest(limit)

    @router.get(
        "/stream",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}, **refusals(s429=f"{MOST_STREAMS} are open already")},
    )
    async def stream(last_event_id: Annotated[str | None, Header(max_length=100)] = None) -> Any:
        """Server-sent events: `beat`, status and exposure when they change; `happened`, one event of the run each.

        Last-Event-ID goes on after that event; that of another start of the coordinator begins at the first that is
        kept.
        """
        if streams.is_full:
            raise HTTPException(429, f"at most {MOST_STREAMS} streams may be open, got one more; close a page")
        return StreamingResponse(streams.follow(last_event_id or ""), media_type="text/event-stream")

    return router
