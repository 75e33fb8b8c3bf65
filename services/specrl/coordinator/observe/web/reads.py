"""The read-only routes of a run. The size of every answer is bounded, however long the run is."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from specrl.coordinator.context import RunContext
from specrl.coordinator.ledger import REPORTS_KEPT
from specrl.coordinator.observe.curves import MAX_POINTS, CurvesReport
from specrl.coordinator.observe.event_log import EVENTS_KEPT, LoggedEvent
from specrl.coordinator.observe.exposure import Exposure
from specrl.coordinator.observe.observer import RunObserver
from specrl.coordinator.observe.timeline import TimelineReport
from specrl.coordinator.observe.web.stream import MAX_STREAMS, EventStreams
from specrl.coordinator.observe.web.targets import TargetGroup, list_target_groups
from specrl.coordinator.requests.doors import is_owner
from specrl.coordinator.requests.refusals import describe_refusals
from specrl.formats.reports import ReplicaReport, StatusReport, StepReport, ValidationReport
from specrl.formats.rollout_samples import RolloutSample
from specrl.spec import dump_spec

LAST_STEP = 2**53 - 1
"""The largest integer that JavaScript represents exactly."""

After = Annotated[int, Query(ge=0, le=LAST_STEP)]
StepNumber = Annotated[int, Query(ge=1, le=LAST_STEP)]

_UNREAD = describe_refusals(
    s401="a token is required",
    s403="the token's user may not read the RLJob",
    s503="the token could not be reviewed; retry",
)


def make_read_routes(context: RunContext, observer: RunObserver) -> APIRouter:
    """Make the router of the reads. `doors` admits the requests."""
    router = APIRouter(tags=["run"], responses=_UNREAD)
    events = observer.events
    samples = observer.samples
    streams = EventStreams(observer)

    @router.get("/status")
    async def get_status() -> StatusReport:
        """The run's present status."""
        return observer.build_status()

    @router.get("/spec", response_class=PlainTextResponse)
    async def get_spec() -> str:
        """The resolved run file, as YAML."""
        # Read from the controls, because scaling a local run changes generation.replicas.
        return dump_spec(context.controls.spec)

    @router.get("/exposure")
    async def get_exposure() -> Exposure:
        """Exposed generation over the last steps, its causes, and how to reduce it."""
        return observer.measure_recent_exposure()

    @router.get("/steps")
    async def list_steps(
        after: After = 0, limit: Annotated[int, Query(ge=1, le=REPORTS_KEPT)] = 100
    ) -> list[StepReport]:
        """The first `limit` reports of steps > `after`, ascending. For the next page pass the last report's step."""
        return observer.read_report_page(after, limit)

    @router.get("/curves")
    async def get_curves(
        first: StepNumber = 1,
        last: Annotated[int | None, Query(ge=1, le=LAST_STEP)] = None,
        points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = 300,
    ) -> CurvesReport:
        """The numbers of steps `first` to `last`, downsampled to at most `points` points."""
        return observer.curves.downsample_steps(first, last, points)

    @router.get("/timeline")
    async def get_timeline(
        until: Annotated[int | None, Query(ge=1, le=LAST_STEP)] = None,
        steps: Annotated[int, Query(ge=1, le=50)] = 4,
        points: Annotated[int, Query(ge=1, le=1000)] = 300,
    ) -> TimelineReport:
        """The work of each process in the `steps` steps up to `until`, or up to now, since the coordinator's start."""
        return observer.timeline.build_report(until, steps, points)

    @router.get("/validations")
    async def list_validations() -> list[ValidationReport]:
        """The first validation and the newest ones."""
        return [*observer.read_validations()]

    @router.get("/replicas")
    async def list_replicas() -> list[ReplicaReport]:
        """The generation replicas, sorted by name."""
        return observer.build_status().replicas

    @router.get("/targets")
    async def list_targets(request: Request) -> list[TargetGroup]:
        """The addresses of the run's metrics, for `http_sd_configs` of a Prometheus."""
        return list_target_groups(context.spec.name, request.url.scheme, request.url.netloc, context.registry)

    @router.get("/events")
    async def list_events(
        after: After = 0, limit: Annotated[int, Query(ge=1, le=EVENTS_KEPT)] = EVENTS_KEPT
    ) -> list[LoggedEvent]:
        """The first `limit` kept events with ids > `after`, ascending."""
        return events.list_after(after, limit)

    @router.get(
        "/rollouts",
        responses=describe_refusals(s409="telemetry.rolloutsShown is 0"),
        summary="A few rollouts in full; opt-in",
    )
    async def list_rollouts(limit: Annotated[int, Query(ge=1, le=256)] = 16) -> list[RolloutSample]:
        """The newest kept rollouts with their texts, the newest first."""
        if not samples.sample_limit:
            raise HTTPException(
                409,
                "telemetry.rolloutsShown must be > 0 to show rollouts, got 0, because prompts may be private; "
                "set it in the run file of the next run",
            )
        return samples.list_newest(limit)

    @router.get(
        "/stream",
        response_class=StreamingResponse,
        responses={
            200: {"content": {"text/event-stream": {}}},
            **describe_refusals(s429=f"{MAX_STREAMS} are open already"),
        },
    )
    async def open_stream(request: Request, last_event_id: Annotated[str | None, Header(max_length=100)] = None) -> Any:
        """Server-sent events. `beat`: status and exposure, when they change. `happened`: one event of the run.

        With Last-Event-ID the stream continues after that event. An id of an earlier start of the coordinator starts at
        the oldest event that is kept.
        """
        if streams.is_full(is_owner=is_owner(request.scope)):
            raise HTTPException(429, f"open streams must be <= {MAX_STREAMS}, got one more; close another page")
        return StreamingResponse(streams.stream_changes(last_event_id or ""), media_type="text/event-stream")

    return router
