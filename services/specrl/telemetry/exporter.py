"""A small HTTP server for pages that programs read: metrics for Prometheus, probes for kubelets.

Replicas and rank 0 of the trainer serve their metrics beside their gRPC port; the operator serves metrics and probes.
The coordinator serves its own with its page.

Metrics are always plain text, whatever a scraper prefers: in OpenMetrics prometheus-client 0.26 replaces the colon of
vLLM's names by an underscore, and they would not be vLLM's.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import structlog
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from specrl.errors import PortTaken

PLAIN_TEXT = "text/plain; charset=utf-8"

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a page says."""

    body: bytes
    content_type: str = PLAIN_TEXT
    status: HTTPStatus = HTTPStatus.OK


Pages = Mapping[str, Callable[[], Answer]]
"""Path to what is served there. Called in a thread of its own for each request."""


def metrics_page() -> Answer:
    """All metrics of the process, as Prometheus reads them."""
    return Answer(generate_latest(), CONTENT_TYPE_PLAIN_0_0_4)


def serve_pages(host: str, port: int, pages: Pages, name: str) -> ThreadingHTTPServer:
    """Serve `pages` in a daemon thread called `name`, and 404 elsewhere. port: 0 takes any free one. Raises OSError."""
    server = _Server(host, port, pages)
    Thread(target=server.serve_forever, name=name, daemon=True).start()
    return server


def serve_metrics(host: str, port: int | None) -> int:
    """Serve `/metrics` in a thread. Returns the port; 0 when `port` is None and nothing is served.

    port: 0 takes any free one. Raises PortTaken.
    """
    if port is None:
        return 0
    try:
        server = serve_pages(host, port, {"/metrics": metrics_page}, "metrics")
    except OSError as error:
        raise PortTaken(
            f"the metrics address must be free, got {host}:{port}: {error.strerror}; choose another --metrics-port "
            "or use 0"
        ) from error
    log.info("metrics_served", address=f"{host}:{server.server_port}")
    return int(server.server_port)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, pages: Pages, *request: Any) -> None:
        self._pages = pages
        super().__init__(*request)  # answers before it returns

    def do_GET(self) -> None:
        page = self._pages.get(self.path)
        answer = page() if page is not None else Answer(b"not found\n", status=HTTPStatus.NOT_FOUND)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, *_: object) -> None:
        """Scrapes and probes are not logged."""


class _Server(ThreadingHTTPServer):
    def __init__(self, host: str, port: int, pages: Pages) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), partial(_Handler, pages))
