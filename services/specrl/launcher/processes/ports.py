"""Finds free ports on this machine, for the coordinator of a launch and for each start of the trainer's ranks."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from specrl.errors import PortTaken
from specrl.spec import RunSpec

HOST = "127.0.0.1"
# Linux takes ports for outgoing connections from 32768 upwards (net.ipv4.ip_local_port_range). A port from that range
# could be taken between our choice and the moment its owner listens, so we choose below it.
PORT_RANGE = range(20_000, 32_000)

# Ports to try before giving up.
MAX_PORT_ATTEMPTS = 100


def choose_ports(spec: RunSpec) -> tuple[int, int]:
    """Return the coordinator's (gRPC, HTTP) ports for this launch; a free port where the run file says 0.

    They are chosen once, so that a restarted coordinator has the same addresses. Raises PortTaken.
    """
    telemetry = spec.telemetry
    if telemetry.grpc_port == telemetry.http_port != 0:
        raise PortTaken(
            f"telemetry.grpcPort must differ from telemetry.httpPort, got both={telemetry.grpc_port}; "
            "change one, or use 0 for a free one"
        )
    with ExitStack() as held:
        grpc_port = held.enter_context(_hold_port("telemetry.grpcPort", telemetry.grpc_port))
        http_port = held.enter_context(_hold_port("telemetry.httpPort", telemetry.http_port))
    return grpc_port, http_port


def find_free_port() -> int:
    """Return a port that no process listens on at this moment."""
    with _hold_port("port", 0) as port:
        return port


@contextmanager
def _hold_port(field: str, port: int) -> Iterator[int]:
    """Listen on the port (0: on any free one) while the context is open, so that the next choice differs.

    Raises PortTaken when the port, or each of `MAX_PORT_ATTEMPTS` ports, is taken.
    """
    choices = [port] if port else random.sample(PORT_RANGE, MAX_PORT_ATTEMPTS)
    reason: OSError | None = None
    for choice in choices:
        # A new socket for each attempt: a socket that was bound but could not listen cannot be bound again.
        with socket.socket() as listener:
            # Connections in TIME_WAIT must not count as a taken port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, choice))
                listener.listen(1)
            except OSError as error:
                reason = error
                continue
            yield choice
            return
    raise PortTaken(
        f"{field} must be a free port, got {field}={port}: {reason and reason.strerror}; "
        "stop the process that listens there, choose another port, or use 0 for a free one"
    ) from reason
