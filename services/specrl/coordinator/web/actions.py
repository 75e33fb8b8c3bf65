"""What may be asked of a run. Each answers with the status as it is then; asking twice is asking once."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException
from fastapi.security import HTTPBearer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from specrl.coordinator.admission import Admission
from specrl.coordinator.parts import Parts
from specrl.coordinator.report import Phase, Status
from specrl.coordinator.web.words import refusals

MOST_REPLICAS = 64
"""On one machine, and as many as are tested."""

_OVER = (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)
_REFUSALS = refusals(
    s401="a token is needed", s403="its user may not update the RLJob", s409="not of this run, or not now", s503="later"
)


def _whole(value: Any) -> Any:
    """29.0 is an integer to JSON Schema; "29" and true are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Scale(BaseModel):
    """How many replicas there are to be."""

    model_config = ConfigDict(extra="forbid")

    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS, strict=True), BeforeValidator(_whole)]


def routes(parts: Parts, actors: Admission, is_local: bool) -> APIRouter:
    """Routes for those whom `actors` admits."""
    token = HTTPBearer(auto_error=False, description="The token file of the run's folder; in a cluster a user's token.")
    router = APIRouter(tags=["actions"], dependencies=[Depends(actors.admit), Depends(token)], responses=_REFUSALS)
    board, controls = parts.board, parts.controls

    def check() -> None:
        """Raise HTTPException unless something can be asked of the run now."""
        status = board.status()
        if status.phase in _OVER:
            raise HTTPException(409, f"a run must be under way to be asked for something, got phase={status.phase}")
        if not board.is_writable:
            raise HTTPException(503, f"what is asked must be written first, got {status.detail}; ask again later")

    @router.post("/pause")
    async def pause() -> Status:
        """Begin no new rollout and no training step; what is under way is finished. A restart keeps it."""
        check()
        await controls.pause()
        return board.status()

    @router.post("/resume")
    async def resume() -> Status:
        """Go on after a pause."""
        check()
        await controls.resume()
        return board.status()

    @router.post("/checkpoint", status_code=202)
    async def checkpoint() -> Status:
        """Have the trainer write a checkpoint at the next boundary between two steps; see checkpointStep."""
        check()
        controls.checkpoint()
        return board.status()

    @router.put("/scale", status_code=202, responses=refusals(s400="the body is no JSON"))
    async def scale(wanted: Scale) -> Status:
        """Have so many generation replicas; local runs only. Those that are too many finish what they have."""
        if not is_local:
            raise HTTPException(
                409,
                f"an RLJob's replicas must be set through the API server; "
                f"use `kubectl scale rljob/{parts.spec.name} --replicas {wanted.replicas}`",
            )
        check()
        try:
            controls.scale(wanted.replicas)
        except OSError as error:
            raise HTTPException(503, f"the run file must be writable, got {error}; free space and repeat") from error
        return board.status()

    return router
