"""The routes for kubelets and Prometheus: /healthz, /readyz and /metrics. They need no token."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from specrl.coordinator.phase import RunPhase
from specrl.formats.reports import StatusReport
from specrl.telemetry.exporter import MetricsText


def make_probe_routes(phase: RunPhase, read_status: Callable[[], StatusReport]) -> APIRouter:
    """Make the router of the probes. read_status: called before each scrape, because it also updates the gauges."""
    router = APIRouter(tags=["probes"])
    metrics = MetricsText()

    @router.get("/healthz")
    async def report_health() -> dict[str, str]:
        """Report that the process is alive."""
        return {"status": "alive"}

    @router.get("/readyz", responses={503: {"description": "The run needs help: it failed, or cannot be written."}})
    async def report_readiness(response: Response) -> dict[str, str]:
        """Report whether the run makes progress: it has started, has not failed, and its state can be written."""
        if not phase.is_ready:
            response.status_code = 503
        return {"phase": phase.phase.value, "detail": phase.detail}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def export_metrics() -> Response:
        """All metrics, in Prometheus' text format."""
        return Response(metrics.read(read_status), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router
