"""Servers in pods bind all addresses: clusters have IPv4, IPv6 or both, and some kernels have no IPv6.

tests/integration/test_tools.py has a whole run over IPv6.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from specrl.coordinator.requests.web_server import make_server
from specrl.rpc.server import start_server
from specrl.telemetry.exporter import serve_metrics
from specrl.telemetry.hosts import ALL_ADDRESSES, join_address

PATIENCE_S = 60.0


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """An application that is never called: connections are accepted before a request comes."""


async def connect(host: str, port: int) -> None:
    _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PATIENCE_S)
    writer.close()


@pytest.mark.parametrize("has_ipv6", [True, False])
async def test_servers_of_all_addresses_are_reached_by_ipv4_and_ipv6(
    has_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["127.0.0.1", "::1"] if has_ipv6 and socket.has_dualstack_ipv6() else ["127.0.0.1"]
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: len(hosts) == 2)
    grpc_server, grpc_port = await start_server(lambda it: None, ALL_ADDRESSES, 0)
    web = make_server(answer, ALL_ADDRESSES, 0)
    serving = asyncio.create_task(web.serve())
    try:
        for port in (grpc_port, web.port, serve_metrics(ALL_ADDRESSES, 0)):
            for host in hosts:
                await connect(host, port)
    finally:
        web.should_exit = True
        await asyncio.wait_for(serving, PATIENCE_S)
        await grpc_server.stop(None)


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.7", "10.0.0.7:80"), ("gen-0.rl", "gen-0.rl:80"), ("fd00::7", "[fd00::7]:80")]
)
def test_only_an_ipv6_address_is_in_brackets(host: str, address: str) -> None:
    assert join_address(host, 80) == address
