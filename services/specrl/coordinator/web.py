"""The coordinator's HTTP face: status and reports as JSON, metrics for Prometheus, health for Kubernetes.

In a cluster what the run says is for those who may read its RLJob (`readers.py`). Health and metrics are for kubelets
and scrapers, which have no token for it: NetworkPolicies say who reaches them.
"""

from __future__ import annotations

from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from specrl.coordinator.board import Board
from specrl.coordinator.readers import Readers
from specrl.coordinator.report import Status, StepReport, ValidationReport
from specrl.coordinator.targets import TargetGroup


def make_app(board: Board, readers: Readers | None = None) -> FastAPI:
    """Routes over a Board; all of them only read. readers: None admits everybody who reaches the address."""
    app = FastAPI(title="specrl coordinator", docs_url=None, redoc_url=None, openapi_url=None)
    for_readers = [Depends(readers.admit)] if readers is not None else []

    @app.get("/status", dependencies=for_readers)
    async def status() -> Status:
        return board.status()

    @app.get("/steps", dependencies=for_readers)
    async def steps(after: int = 0) -> list[StepReport]:
        return board.reports(after)

    @app.get("/validations", dependencies=for_readers)
    async def validations() -> list[ValidationReport]:
        return board.validations()

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, str]:
        status = board.status()
        if not board.is_ready:
            response.status_code = 503
        return {"phase": status.phase.value, "detail": status.detail}

    @app.get("/targets", dependencies=for_readers)
    async def targets(request: Request) -> list[TargetGroup]:
        """For `http_sd_configs` of a Prometheus."""
        return board.targets(request.url.scheme, request.url.netloc)

    @app.get("/metrics")
    async def metrics() -> Response:
        board.status()
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return app
