"""Serves what the process exports to Prometheus; replicas and rank 0 of the trainer do so beside their gRPC port."""

from __future__ import annotations

import prometheus_client
import structlog

from specrl.errors import PortTaken

log = structlog.get_logger(__name__)


def serve_metrics(host: str, port: int | None) -> int:
    """Serve `/metrics` in a thread. Returns the port; 0 when `port` is None and nothing is served.

    port: 0 takes any free one. Raises PortTaken.
    """
    if port is None:
        return 0
    try:
        server, _ = prometheus_client.start_http_server(port, host)
    except OSError as error:
        raise PortTaken(
            f"the metrics address must be free, got {host}:{port}: {error.strerror}; choose another --metrics-port "
            "or use 0"
        ) from error
    log.info("metrics_served", address=f"{host}:{server.server_port}")
    return int(server.server_port)
