"""Ports of this machine: whether one is free, and which ones are. For launches and the trainer's starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from specrl.errors import PortTaken
from specrl.spec import RunSpec

HOST = "127.0.0.1"


def choose_ports(spec: RunSpec) -> tuple[int, int]:
    """The coordinator's (gRPC, HTTP) ports for this launch, free ones where the run file says 0.

    Chosen once, so that a coordinator that comes back does so under the same addresses. Raises PortTaken.
    """
    telemetry = spec.telemetry
    if telemetry.grpc_port == telemetry.http_port != 0:
        raise PortTaken(
            f"telemetry.grpcPort must differ from telemetry.httpPort, got both={telemetry.grpc_port}; "
            "change one, or use 0 for a free one"
        )
    with ExitStack() as held:
        grpc_port = held.enter_context(_held("telemetry.grpcPort", telemetry.grpc_port))
        http_port = held.enter_context(_held("telemetry.httpPort", telemetry.http_port))
    return grpc_port, http_port


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with _held("port", 0) as port:
        return port


@contextmanager
def _held(field: str, port: int) -> Iterator[int]:
    """Occupy the port (0: any) for a moment, so that the next choice is another."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # remains of closed connections are no obstacle
        try:
            listener.bind((HOST, port))
            listener.listen(1)
        except OSError as error:
            raise PortTaken(
                f"{field} must be a free port, got {field}={port}: {error.strerror}; "
                "stop what listens there, choose another port, or use 0 for a free one"
            ) from error
        yield int(listener.getsockname()[1])
