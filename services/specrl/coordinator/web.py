"""The coordinator's HTTP face: status and reports as JSON, metrics for Prometheus, health for Kubernetes."""

from __future__ import annotations

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from specrl.coordinator.board import Board
from specrl.coordinator.report import Status, StepReport, ValidationReport


def make_app(board: Board) -> FastAPI:
    """Routes over a Board; all of them only read."""
    app = FastAPI(title="specrl coordinator", docs_url=None, redoc_url=None)

    @app.get("/status")
    async def status() -> Status:
        return board.status()

    @app.get("/steps")
    async def steps(after: int = 0) -> list[StepReport]:
        return board.reports(after)

    @app.get("/validations")
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

    @app.get("/metrics")
    async def metrics() -> Response:
        board.status()
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return app
