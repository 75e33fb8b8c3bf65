"""The HTTP server of the coordinator: uvicorn, with bounds on what a connection may hold and for how long.

    accept, at most ACCEPT_PER_S --> wait for a request, at most REQUEST_S --> answer, read within UNREAD_S --> wait ...

uvicorn bounds neither the number of connections nor the time until a first request is complete: idle and slow clients
would keep its sockets for ever. Here the connections are counted in one book, which looks at them every SWEEP_S and
closes those that are late. When there are too many, the oldest one without the run's token is closed, so that a crowd
of idle clients keeps nobody out. Every connection that is closed so is counted by kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specrl.coordinator.requests.doors import TRUST
from specrl.errors import PortTaken
from specrl.rpc import tls
from specrl.telemetry import metrics
from specrl.telemetry.hosts import ALL_ADDRESSES, join_address, resolve_bound
from specrl.telemetry.pace import Pace

MAX_CONNECTIONS = 160
"""Most open connections: 64 streams (`observe/web/stream.py`), as many pages' requests, and room for others."""

HEAD_BYTES = 16 << 10
"""Longest request line and headers. Browsers send about 1 KB; a token of a cluster may have 2 KB."""

REQUEST_S = 10.0
"""Longest wait for a complete request: from the connection, or from the answer before. Its body included."""

UNREAD_S = 20.0
"""Longest time for which an answer that does not fit the socket's buffers may be unread."""

SWEEP_S = 1.0

ACCEPT_PER_S = 50.0
"""Most new connections a second; further ones wait in the kernel. One that is refused takes about 0.5 ms."""

ACCEPT_BURST = 100

BACKLOG = 64
"""Connections that wait in the kernel to be accepted."""


class _Book:
    """The open connections of one server."""

    def __init__(self) -> None:
        self._open: dict[BoundedConnection, None] = {}  # in order of opening
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: BoundedConnection) -> None:
        """Add a connection. Closes another one if there are too many."""
        self._open[connection] = None
        if len(self._open) > MAX_CONNECTIONS:
            untrusted = (one for one in self._open if not one.is_trusted)
            next(untrusted, connection).close("crowded")
        if self._timer is None:
            self._timer = connection.loop.call_later(SWEEP_S, self._sweep, connection.loop)

    def discard(self, connection: BoundedConnection) -> None:
        """Forget a connection that is closed."""
        self._open.pop(connection, None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        for connection in list(self._open):
            if (kind := connection.find_lateness(now)) is not None:
                connection.close(kind)
        self._timer = loop.call_later(SWEEP_S, self._sweep, loop) if self._open else None


class BoundedConnection(H11Protocol):
    """One connection. is_trusted: a request over it has shown the run's token."""

    book: _Book  # of a subclass that `make_server` makes

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.is_trusted = False
        self._waits_since: float | None = time.monotonic()
        self._unread_since: float | None = None
        routes: Any = self.app

        async def answer_request(scope: Scope, receive: Receive, send: Send) -> None:
            scope[TRUST] = self._set_trusted
            await routes(scope, receive, send)

        untyped: Any = answer_request
        self.app = untyped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.book.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.book.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):  # a request is complete
            self._waits_since = None

    def on_response_complete(self) -> None:
        """Wait for the next request. One that has arrived already was pipelined: that no browser does."""
        self._waits_since = time.monotonic()
        if self.conn.trailing_data[0]:
            self.close("pipelined")
        else:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        metrics.HTTP_REFUSED.labels("malformed").inc()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the answer has begun; the rest of it cannot be told
            self.transport.abort()

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()

    def find_lateness(self, now_s: float) -> str | None:
        """Return the kind of refusal if the client is late, else None. now_s: monotonic seconds."""
        if self._unread_since is not None and now_s - self._unread_since > UNREAD_S:
            return "unread"
        if self._waits_since is not None and now_s - self._waits_since > REQUEST_S:
            return "timeout"
        return None

    def close(self, kind: str) -> None:
        """Close the connection at once, without waiting for what its client has not read."""
        metrics.HTTP_REFUSED.labels(kind).inc()
        self.transport.abort()

    def _set_trusted(self) -> None:
        self.is_trusted = True


class WebServer(uvicorn.Server):
    """A uvicorn server without signal handlers: they would close the page before the last checkpoint is complete.

    It accepts connections itself, at a bounded pace: asyncio's servers accept as many as there are.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Override an undocumented method of uvicorn 0.54. Held by tests/integration/coordinator/test_stop.py."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections. Overrides a method of uvicorn 0.54, which would make asyncio's servers."""
        await super().startup(sockets=[])
        self._accepting = asyncio.get_running_loop().create_task(self._accept_connections(), name="accept")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and close those that are open."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)
        self._listener.close()
        await super().shutdown(sockets=[])

    async def _accept_connections(self) -> None:
        """Accept connections until cancelled. New clients wake it."""
        loop = asyncio.get_running_loop()
        pace = Pace(ACCEPT_PER_S, ACCEPT_BURST)
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError:  # the client is gone already, or this process has no free descriptor
                await asyncio.sleep(1.0 / ACCEPT_PER_S)
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = loop.create_task(self._open_connection(client))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)
            if wait_s := pace.take_turn():
                await asyncio.sleep(wait_s)
            # Handshakes end by themselves within REQUEST_S.
            while len(self._handshakes) > MAX_CONNECTIONS:
                await asyncio.wait(self._handshakes, return_when=asyncio.FIRST_COMPLETED)

    async def _open_connection(self, client: socket.socket) -> None:
        config = self.config
        protocol: Callable[..., asyncio.Protocol] = config.http_protocol_class
        timeout_s = REQUEST_S if config.ssl is not None else None
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: protocol(
                    config=config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
                ),
                client,
                ssl=config.ssl,
                ssl_handshake_timeout=timeout_s,
            )
        except OSError:  # the TLS handshake failed, or took too long
            metrics.HTTP_REFUSED.labels("malformed").inc()
            client.close()


def make_server(app: ASGIApp, host: str, port: int, identity: tls.Identity | None = None) -> WebServer:
    """Make the server of `app`, whose socket listens already. port: 0 takes any free one.

    identity: it uses TLS if the peers do. Raises PortTaken.
    """
    # uvicorn logs a warning for each malformed request, without limit; they are counted instead.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        http=type("_Connection", (BoundedConnection,), {"book": _Book()}),
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # else a client names its own address
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_graceful_shutdown=1,  # seconds; event streams never end by themselves
        ssl_certfile=None if identity is None else identity.folder / "tls.crt",
        ssl_keyfile=None if identity is None else identity.folder / "tls.key",
    )
    config.load()
    return WebServer(config, _open_listener(host, port))


def _open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket. It accepts connections at once, so its address may be published before it is served.

    Raises PortTaken.
    """
    try:
        family, bound = resolve_bound(host)
        has_both = bound == ALL_ADDRESSES
        listener = socket.create_server((bound, port), family=family, backlog=BACKLOG, dualstack_ipv6=has_both)
    except OSError as error:
        raise PortTaken(
            f"telemetry.httpPort must be free, got {join_address(host, port)}, which is in use; choose another port, "
            "or 0 for any"
        ) from error
    listener.setblocking(False)
    return listener
