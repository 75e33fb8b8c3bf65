"""The nodes that one replica spans. Node 0 leads: it serves, and its engine commands the ranks of all of them.

    member   WAITING (no leader yet) -> FOLLOWING -> the leader is gone

A member has no service of its own. It lives as long as its leader: `until_leader_is_gone` holds a connection on which
nothing is ever said, and which the leader's end, or the loss of its node, breaks.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass

RETRY_S = 1.0
KEEPALIVE_S = (10, 5, 3)
"""First probe of a silent connection, pause between probes, probes without an answer until it counts as broken: a node
that is lost without a word is noticed within half a minute."""


@dataclass(frozen=True)
class Nodes:
    """How many nodes, which of them this process is, and where node 0 gathers the ranks.

    host: this process's own address, at which the others reach it.
    """

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    host: str = "127.0.0.1"

    @property
    def is_leader(self) -> bool:
        """Whether this node serves the replica."""
        return self.rank == 0


ONE_NODE = Nodes()


async def until_leader_is_gone(nodes: Nodes, met: asyncio.Event) -> None:
    """Wait for the leader to come, every second anew, and set `met`; then wait for it to go."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(nodes.address, nodes.port)
            break
        except OSError:  # its name is not known yet, or nobody listens yet
            await asyncio.sleep(RETRY_S)
    met.set()
    _keep_alive(writer.get_extra_info("socket"))
    try:
        with suppress(OSError):  # reset, or no answer to the probes: gone as well
            await reader.read()
    finally:
        writer.close()


def _keep_alive(connection: socket.socket) -> None:
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip(options, KEEPALIVE_S, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
