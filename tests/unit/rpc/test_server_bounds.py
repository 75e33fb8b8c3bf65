"""What a hostile client can hold of a gRPC server. Raw sockets that speak HTTP/2 against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests import hostile_clients as hostile
from tests.hostile_clients import HTTP2_START, connected, read_until_closed

from specrl.api.v1 import coordinator_pb2, coordinator_pb2_grpc
from specrl.errors import DeadlineExceeded
from specrl.rpc import run_token, server
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.run_token import RunToken
from specrl.rpc.server import ServerOptions, start_server

PATIENCE_S = 60.0


class Dismissals(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers the owner's calls."""

    async def Dismiss(self, request: coordinator_pb2.DismissRequest, context: Any) -> coordinator_pb2.DismissReply:
        return coordinator_pb2.DismissReply()


@pytest.fixture
def token(tmp_path: Path) -> RunToken:
    run_token.write_token(tmp_path)
    return RunToken(tmp_path / run_token.TOKEN_FILE)


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch, token: RunToken) -> AsyncGenerator[int]:
    for name, value in (("HANDSHAKE_S", 1), ("IDLE_S", 1), ("MAX_CONNECTIONS", 8)):
        monkeypatch.setattr(server, name, value)
    add = coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server
    started, bound = await start_server(lambda it: add(Dismissals(), it), "127.0.0.1", 0, ServerOptions(token=token))
    yield bound
    await started.stop(None)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", hostile.HTTP2_PREFACE, HTTP2_START, HTTP2_START + b"\xff" * 100],
    ids=["nothing", "HTTP/1.1", "no settings", "no call", "noise"],
)
async def test_a_connection_without_a_call_is_closed(port: int, sent: bytes) -> None:
    """gRPC keeps one that says nothing for two minutes, and one without calls for ever."""
    async with connected("127.0.0.1", port, sent) as (reader, _):
        await asyncio.wait_for(read_until_closed(reader), PATIENCE_S)


async def test_connections_above_the_bound_are_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a file descriptor of the process."""
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(8):
            opened.append(await stack.enter_async_context(connected("127.0.0.1", port, HTTP2_START)))
            await asyncio.wait_for(opened[-1][0].readexactly(9), PATIENCE_S)  # the server's settings
        reader, _ = await stack.enter_async_context(connected("127.0.0.1", port, HTTP2_START))
        assert await asyncio.wait_for(read_until_closed(reader), PATIENCE_S) == b""


async def test_pings_are_answered_without_end(port: int) -> None:
    """Above a limit of pings, gRPC's work grew with their square: one connection took a core from the run."""
    async with connected("127.0.0.1", port, HTTP2_START) as (reader, writer):
        for _ in range(5):
            writer.write(hostile.A_PING)
            kind = flags = 0
            while (kind, flags) != (hostile.PING, hostile.ACK):
                head = await asyncio.wait_for(reader.readexactly(9), PATIENCE_S)
                kind, flags = head[3], head[4]
                assert kind != hostile.GOAWAY, "the connection is closed"
                await reader.readexactly(int.from_bytes(head[:3]))


async def test_metadata_above_the_bound_is_refused(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(hostile.REGISTER)(b"", metadata=(("x", "y" * 40_000),), timeout=PATIENCE_S)
    assert refused.value.code() is not grpc.StatusCode.UNAUTHENTICATED


async def dismiss_patiently(client: CoordinatorClient) -> None:
    """Repeat a call that a busy machine has not answered within its deadline, as callers do."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(DeadlineExceeded):
                return await client.dismiss_replica("gen-0")


async def test_the_owner_is_answered_amid_all_hostile_clients(
    port: int, token: RunToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Floods, cancelled calls (CVE-2023-44487), endless headers (CVE-2024-24549), large requests, and noise."""
    async with CoordinatorClient(f"127.0.0.1:{port}", token=token) as client:
        await client.dismiss_replica("gen-0")
        with hostile.start_attack(2 * len(hostile.GRPC_CLIENTS), f"grpc:127.0.0.1:{port}"):
            for _ in range(20):
                await dismiss_patiently(client)
