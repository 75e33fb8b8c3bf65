"""Serves an app with the real uvicorn, in a separate thread, at an address that stays the same over restarts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Self

import httpx2
from starlette.types import ASGIApp

from specrl.coordinator.requests.web_server import make_server
from specrl.launcher.processes.ports import find_free_port

PATIENCE_S = 240.0  # generous, because the machine may be busy


class Served:
    """Use as a context; `begin` and `end` run in the loop, whose coroutines `do` waits for."""

    def __init__(self) -> None:
        self._port = find_free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served")
        self.url = f"http://127.0.0.1:{self._port}"
        # Without verification, so that httpx2 does not load the system's certificates.
        self.client = httpx2.Client(base_url=self.url, verify=False, timeout=PATIENCE_S, trust_env=False)  # no TLS

    def __enter__(self) -> Self:
        self._thread.start()
        self.do(self.begin())
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.do(self.end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def begin(self) -> None:
        """Make what is served, and `serve` it."""
        raise NotImplementedError

    async def end(self) -> None:
        """`unserve`, and clean up."""
        raise NotImplementedError

    def do[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and wait for it."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(PATIENCE_S)

    def serve(self, app: ASGIApp) -> None:
        """Answer at `url` from now on."""
        self._web = make_server(app, "127.0.0.1", self._port)
        self._serving = self._loop.create_task(self._web.serve())

    async def unserve(self) -> None:
        """Nobody answers there any more."""
        self._web.should_exit = True
        await self._serving
