"""Puts the parts of the HTTP side together."""

from __future__ import annotations

from fastapi import FastAPI

from specrl.coordinator.admission import Admission, Everybody
from specrl.coordinator.parts import Parts
from specrl.coordinator.web import actions, page, probes, reads


def make_app(
    parts: Parts, readers: Admission | None = None, actors: Admission | None = None, *, is_local: bool = True
) -> FastAPI:
    """Routes over one run.

    readers, actors: None admits everybody who reaches the address. is_local: a launcher follows what is asked of scale;
    in a cluster the RLJob says it.
    """
    app = FastAPI(
        title="specrl coordinator",
        version="v1",
        description="One run: what it is doing, and what may be asked of it.",
        docs_url=None,  # its page loads scripts from a CDN
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.include_router(probes.routes(parts.board))
    app.include_router(reads.routes(parts, readers or Everybody()))
    app.include_router(actions.routes(parts, actors or Everybody(), is_local))
    page.serve(app)
    return app
