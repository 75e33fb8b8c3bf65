"""Serves the live page's static files. They contain no data of the run; the page fetches those from the REST API."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASSETS = Path(__file__).with_name("assets")
HEADERS = {
    # No content from other origins, no inline scripts, no frames. Texts of the policy can then never run as a script.
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


def serve_page(app: FastAPI) -> None:
    """Add the page at / and its assets below /assets to `app`, and HEADERS to every answer."""

    @app.get("/", include_in_schema=False)
    async def send_index() -> FileResponse:
        return FileResponse(ASSETS / "index.html", media_type="text/html; charset=utf-8")

    app.mount("/assets", StaticFiles(directory=ASSETS), name="assets")
    app.add_middleware(_HeaderMiddleware)


class _HeaderMiddleware:
    """Middleware that adds HEADERS to every answer. Plain ASGI, because Starlette's base class may buffer streams."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
