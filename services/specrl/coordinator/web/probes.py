"""For kubelets and Prometheus: alive, ready, metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from specrl.coordinator.board import Board


def routes(board: Board) -> APIRouter:
    """Their routes. None of them is behind a token."""
    router = APIRouter(tags=["probes"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive"}

    @router.get("/readyz", responses={503: {"description": "The run does not go on by itself."}})
    async def readyz(response: Response) -> dict[str, str]:
        """Whether the run goes on by itself: it has begun, has not failed, and its state can be written."""
        status = board.status()
        if not board.is_ready:
            response.status_code = 503
        return {"phase": status.phase.value, "detail": status.detail}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """All metrics, as Prometheus reads them."""
        board.status()
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return router
