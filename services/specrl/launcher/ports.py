"""Ports of this machine: whether one is free, and which ones are. For launches and the trainer's starts."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from specrl.errors import PortTaken
from specrl.spec import RunSpec

HOST = "127.0.0.1"
LISTENED = range(20_000, 32_000)
"""Where free ports are looked for: below the range from which Linux takes ports for outgoing connections (32768 on).
A port of that range may be taken by anybody's connection between this choice and the moment its owner listens."""
CHOICES = 100


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
    """Occupy the port (0: any free one) for a moment, so that the next choice is another. Raises PortTaken."""
    choices = [port] if port else random.sample(LISTENED, CHOICES)
    for choice in choices:
        # A socket for each try: one that was bound, and could not listen, can never be bound again.
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # remains of closed connections do not count
            try:
                listener.bind((HOST, choice))
                listener.listen(1)
            except OSError as error:
                reason = error
                continue
            yield choice
            return
    raise PortTaken(
        f"{field} must be a free port, got {field}={port}: {reason.strerror}; "
        "stop what listens there, choose another port, or use 0 for a free one"
    ) from reason
