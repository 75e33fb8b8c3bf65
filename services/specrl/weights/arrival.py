"""Tells an engine that a rank on its node has received its share of a version.

The engine asks the ranks for their shares through vLLM's engine core. There each question interrupts the overlap of
scheduling and computing. So the engine asks once it is told, and else only every few seconds (`vllm_backend.engine`).

A notification is one datagram of a Unix socket in Linux's abstract namespace. It has no content, and may be lost or
come from elsewhere without harm: it only makes the engine ask. The kernel chooses the address, which needs no folder
and is gone with the socket.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from types import TracebackType
from typing import Self


class ArrivalListener:
    """Receives the notifications of one transfer. A context manager, which closes the socket.

    address: what ranks pass to `notify_listener`.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind("")  # unix(7), "Autobind feature"
        self.address: bytes = self._socket.getsockname()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._socket.close()

    async def wait_for_notification(self, within_s: float) -> bool:
        """Wait for a rank's notification, at most `within_s`. Returns whether one came."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._socket, 1), within_s)
            return True
        return False


def notify_listener(address: bytes) -> None:
    """Tell the listener that this rank's transfer has ended. Does nothing if no listener has the address.

    That is so on other nodes of a replica, and after the engine has given the transfer up.
    """
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(b"\0", address)
