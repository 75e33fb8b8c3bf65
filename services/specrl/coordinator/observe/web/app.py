"""The coordinator's HTTP server: the live page, the REST API behind it, actions, metrics and health.

    page      /                      one page and its assets, without any data of the run
    reads     /status /steps ...     JSON, and /stream: server-sent events
    actions   /pause /resume ...     only for users who may act               (requests/actions.py)
    probes    /metrics /healthz /readyz                                       (requests/probes.py)

`requests/admission.py` decides who may read and who may act. Probes need no token, because kubelets and scrapers have
none; NetworkPolicies restrict who reaches them. /openapi.json describes all routes.
"""

from __future__ import annotations

from fastapi import FastAPI

from specrl.coordinator.context import RunContext
from specrl.coordinator.observe.observer import RunObserver
from specrl.coordinator.observe.web import page, reads
from specrl.coordinator.requests import actions, probes
from specrl.coordinator.requests.doors import OPEN_DOORS, DoorMiddleware, Doors


def make_app(
    context: RunContext, observer: RunObserver, doors: Doors = OPEN_DOORS, *, is_local: bool = True
) -> FastAPI:
    """Make the HTTP application of one run.

    doors: who may send which requests. is_local: whether a launcher sets the number of replicas; in a cluster the RLJob
    does.
    """
    app = FastAPI(
        title="specrl coordinator",
        version="v1",
        description="One run: its status and history, and the actions on it.",
        # FastAPI's pages of documentation load scripts from a CDN.
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,  # one schema per report, although computed fields occur in answers only
    )
    app.include_router(probes.make_probe_routes(context.phase, observer.build_status))
    app.include_router(reads.make_read_routes(context, observer))
    app.include_router(actions.make_action_routes(context, observer.build_status, is_local))
    app.add_middleware(DoorMiddleware, doors=doors)
    page.serve_page(app)  # last: its middleware adds headers to the answers of all routes
    return app
