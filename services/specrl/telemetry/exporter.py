"""A small HTTP server for metrics (Prometheus) and probes (kubelets).

Replicas and rank 0 of the trainer serve metrics on a port beside their gRPC port. The operator serves metrics and
probes. The coordinator does not use this server; its page has both.

Anybody who reaches the port may ask, so connections, their time and the work for them are bounded.

Metrics are always plain text, whatever format a scraper prefers. In OpenMetrics prometheus-client 0.26 would replace
the colon in vLLM's metric names by an underscore.
"""

from __future__ import annotations

import io
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import structlog
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from specrl.errors import PortTaken
from specrl.telemetry.hosts import is_host_allowed, join_address, list_local_hosts, resolve_bound
from specrl.telemetry.pace import Pace

PLAIN_TEXT = "text/plain; charset=utf-8"

MAX_CONNECTIONS = 32
"""Most open connections, each with a thread. Prometheus and a kubelet have two."""

HEAD_BYTES = 16 << 10
"""Longest request line and headers."""

REQUEST_S = 5.0
"""Longest wait for one piece of a request, or for a client to read its answer."""

CONNECTION_S = 15.0
"""Longest connection, whatever it does."""

ACCEPTS_PER_S = 50.0
"""Most new connections a second; further ones wait in the kernel."""

ACCEPTS_AT_ONCE = 100

RENDERS_PER_S = 5.0
RENDERS_AT_ONCE = 50

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PageResponse:
    """The response of a page."""

    body: bytes
    content_type: str = PLAIN_TEXT
    status: HTTPStatus = HTTPStatus.OK


Pages = Mapping[str, Callable[[], PageResponse]]
"""Path to a function that makes its response. Each request calls it in a separate thread."""


class MetricsText:
    """All metrics of the process in Prometheus' text format.

    A large process needs 10 ms for it, so it is made at most RENDERS_PER_S times a second under a flood of requests.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pace = Pace(RENDERS_PER_S, RENDERS_AT_ONCE)
        self._text = b""

    def read(self, update: Callable[[], object] = object) -> bytes:
        """Return the text. update: called before it is made."""
        with self._lock:
            if self._pace.try_turn() or not self._text:
                update()
                self._text = generate_latest()
            return self._text

    def answer(self) -> PageResponse:
        """Make the response of `/metrics`."""
        return PageResponse(self.read(), CONTENT_TYPE_PLAIN_0_0_4)


def serve_pages(
    host: str, port: int, pages: Pages, name: str, on_refusal: Callable[[str], object] = str
) -> ThreadingHTTPServer:
    """Serve `pages` in a daemon thread called `name`; other paths answer 404. port 0: any free one. Raises OSError.

    on_refusal: called with the kind of each refusal: host, crowded, timeout, unread, malformed.
    """
    server = _PageServer(host, port, pages, on_refusal)
    # A daemon thread: it serves until the process ends, and does not delay that.
    Thread(target=server.serve_forever, name=name, daemon=True).start()
    return server


def serve_metrics(host: str, port: int | None) -> int:
    """Serve `/metrics` in a daemon thread and return the port.

    port: 0 takes any free one; None serves nothing and returns 0. Raises PortTaken.
    """
    if port is None:
        return 0
    from specrl.telemetry.metrics import HTTP_REFUSED  # not for the operator, which has metrics of its own

    def count_refusal(kind: str) -> None:
        HTTP_REFUSED.labels(kind).inc()

    try:
        server = serve_pages(host, port, {"/metrics": MetricsText().answer}, "metrics", count_refusal)
    except OSError as error:
        raise PortTaken(
            f"the metrics address must be free, got {join_address(host, port)}: {error.strerror}; choose another "
            "--metrics-port or use 0"
        ) from error
    log.info("metrics_served", address=join_address(host, server.server_port))
    return int(server.server_port)


class _BoundedReader(io.RawIOBase):
    """Reads a request from a socket, and ends after HEAD_BYTES. is_full: whether there was more."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection
        self._left = HEAD_BYTES
        self.is_full = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self.is_full = True
            return 0
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class _PageHandler(BaseHTTPRequestHandler):
    """Answers one request and closes the connection, as the base class does in HTTP/1.0."""

    timeout = REQUEST_S  # seconds of one read or write; the server bounds the whole connection
    server: _PageServer

    def __init__(self, pages: Pages, *request: Any) -> None:
        self._pages = pages
        super().__init__(*request)  # handles the request before it returns, so `_pages` is set first

    def setup(self) -> None:
        super().setup()
        self._head = _BoundedReader(self.connection)
        self.rfile = io.BufferedReader(self._head)

    def do_GET(self) -> None:
        if self._head.is_full:
            self.server.on_refusal("malformed")
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        hosts = self.server.hosts
        if hosts is not None and not is_host_allowed(map(str.encode, self.headers.get_all("Host", [])), hosts):
            self.server.on_refusal("host")
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, f"Host must be {', '.join(sorted(hosts))}")
            return
        page = self._pages.get(self.path)
        answer = page() if page is not None else PageResponse(b"not found\n", status=HTTPStatus.NOT_FOUND)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_error(self, *_: object) -> None:
        """Count what was not a request in time; the base class calls this for a bad request and for a timeout."""
        self.server.on_refusal("malformed" if getattr(self, "raw_requestline", b"") else "timeout")

    def log_message(self, *_: object) -> None:
        """Log nothing: scrapes and probes would flood the log."""


class _PageServer(ThreadingHTTPServer):
    """A server with bounds: on connections, on the time of each, and on new ones per second.

    When there are too many, the oldest is closed, so that a crowd of idle clients keeps no scraper out.
    """

    request_queue_size = MAX_CONNECTIONS  # connections that wait in the kernel

    def __init__(self, host: str, port: int, pages: Pages, on_refusal: Callable[[str], object]) -> None:
        self.address_family, bound = resolve_bound(host)  # the base class assumes IPv4
        self.on_refusal = on_refusal
        # One that only this machine reaches is asked by its own names, unless a browser was misled.
        self.hosts = list_local_hosts(host) if host in LOOPBACK else None
        self._pace = Pace(ACCEPTS_PER_S, ACCEPTS_AT_ONCE)
        self._open: dict[socket.socket, float] = {}  # when each was accepted, the oldest first
        self._lock = Lock()
        super().__init__((bound, port), partial(_PageHandler, pages))

    def get_request(self) -> tuple[socket.socket, Any]:
        if wait_s := self._pace.take_turn():
            time.sleep(wait_s)  # only the thread that accepts waits
        return super().get_request()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = time.monotonic()
            oldest = next(iter(self._open)) if len(self._open) > MAX_CONNECTIONS else None
        if oldest is not None:
            self._refuse(oldest, "crowded")
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that take too long. The base class calls this at least twice a second."""
        before = time.monotonic() - CONNECTION_S
        with self._lock:
            late = [connection for connection, since in self._open.items() if since < before]
        for connection in late:
            self._refuse(connection, "timeout")

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Count a client that went away or did not read; log anything else, which is a bug of a page."""
        error = sys.exception()
        if isinstance(error, OSError):
            self.on_refusal("unread")
        else:
            log.error("page_failed", exc_info=error)

    def _refuse(self, connection: socket.socket, kind: str) -> None:
        """Shut a connection down. Its thread then ends and closes it."""
        self.on_refusal(kind)
        with self._lock:
            self._open.pop(connection, None)
        with suppress(OSError):  # closed meanwhile
            connection.shutdown(socket.SHUT_RDWR)
