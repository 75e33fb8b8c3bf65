"""Serves an app from an event loop in a thread of its own, with the real uvicorn, at one address for good."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Self

import httpx2
import uvicorn
from starlette.types import ASGIApp
from tests.redis_servers import free_port

PATIENCE_S = 240.0  # a busy machine is slow, not wrong


class Served:
    """Use as a context; `begin` and `end` run in the loop, whose coroutines `do` waits for."""

    def __init__(self) -> None:
        self._port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served")
        self.url = f"http://127.0.0.1:{self._port}"
        # Unverified, or httpx2 would read all the machine's certificates.
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
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        self._web = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", self._port))
        self._serving = self._loop.create_task(self._web.serve(sockets=[listener]))

    async def unserve(self) -> None:
        """Nobody answers there any more."""
        self._web.should_exit = True
        await self._serving
