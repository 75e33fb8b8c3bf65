"""The nodes of one replica. Node 0 is the leader: it serves, and its engine drives the ranks of all nodes.

    follower   WAITING (no leader yet) -> FOLLOWING -> the leader is gone

A follower has no service, and lives as long as its leader. `until_leader_is_gone` holds an idle TCP
connection to the leader's rendezvous port. It breaks when the leader's process ends or its node is lost.

Called by `main`.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass

RETRY_S = 1.0
KEEPALIVE_S = (10, 5, 3)
"""TCP keepalive: seconds until the first probe, seconds between probes, unanswered probes until the connection breaks.

So the loss of a node, which closes no connection, is noticed within half a minute.
"""


@dataclass(frozen=True)
class ReplicaNodes:
    """The nodes of a replica as one of its processes sees them.

    count: number of nodes. rank: this process's node. address, port: of the rendezvous on node 0.
    host: this process's own address, which the other nodes connect to.
    """

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    host: str = "127.0.0.1"

    @property
    def is_leader(self) -> bool:
        """Whether this process is node 0, which serves the replica."""
        return self.rank == 0


ONE_NODE = ReplicaNodes()


async def until_leader_is_gone(nodes: ReplicaNodes, met: asyncio.Event) -> None:
    """Connect to the leader, retrying every second, and set `met`; then wait until the connection breaks.

    The wait for the leader has no bound: its image may take long to pull, and its weights long to load.
    """
    reader, writer = await _connect_to_leader(nodes)
    met.set()
    _keep_alive(writer.get_extra_info("socket"))
    try:
        with suppress(OSError):  # a reset or a keepalive timeout also means that the leader is gone
            await reader.read()
    finally:
        writer.close()


async def _connect_to_leader(nodes: ReplicaNodes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection(nodes.address, nodes.port)
        except OSError:  # the leader's name does not resolve yet, or it does not listen yet
            await asyncio.sleep(RETRY_S)


def _keep_alive(connection: socket.socket) -> None:
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip(options, KEEPALIVE_S, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
