"""The live page's own files. They hold nothing of the run: the page asks for it, with a token where one is needed."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASSETS = Path(__file__).with_name("assets")
HEADERS = {
    # Nothing is loaded from elsewhere, nothing inline runs, nobody frames it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def serve(app: FastAPI) -> None:
    """Serve the page at / and its assets below /assets, and send HEADERS with every answer."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(ASSETS / "index.html", media_type="text/html; charset=utf-8")

    app.mount("/assets", StaticFiles(directory=ASSETS), name="assets")
    app.add_middleware(_WithHeaders)


class _WithHeaders:
    """Adds HEADERS to every answer. Plain ASGI, so that streams pass through it unbuffered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)
