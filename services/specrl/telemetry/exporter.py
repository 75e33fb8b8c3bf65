"""Serves what the process exports to Prometheus; replicas and rank 0 of the trainer do so beside their gRPC port.

Always as plain text, whatever a scraper prefers: in OpenMetrics prometheus-client 0.26 replaces the colon of vLLM's
names by an underscore, and they would not be vLLM's.
"""

from __future__ import annotations

import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import structlog
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from specrl.errors import PortTaken

log = structlog.get_logger(__name__)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(404)
            return
        body = generate_latest()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingHTTPServer):
    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)


def serve_metrics(host: str, port: int | None) -> int:
    """Serve `/metrics` in a thread. Returns the port; 0 when `port` is None and nothing is served.

    port: 0 takes any free one. Raises PortTaken.
    """
    if port is None:
        return 0
    try:
        server = _Server(host, port)
    except OSError as error:
        raise PortTaken(
            f"the metrics address must be free, got {host}:{port}: {error.strerror}; choose another --metrics-port "
            "or use 0"
        ) from error
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    log.info("metrics_served", address=f"{host}:{server.server_port}")
    return int(server.server_port)
