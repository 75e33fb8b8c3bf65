"""The bounds of the coordinator's web server, over real sockets, with an application of three lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests import hostile_clients as hostile
from tests.hostile_clients import a_request, connected, read_until_closed

from specrl.coordinator.requests import web_server
from specrl.coordinator.requests.doors import TRUST
from specrl.telemetry import metrics

PATIENCE_S = 60.0
LARGE = bytes(64 << 20)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """An application: trusts /trusted, and answers a large body at /large."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/trusted":
        scope[TRUST]()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": LARGE if scope["path"] == "/large" else b"served"})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[int]:
    for name, value in (("REQUEST_S", 0.3), ("UNREAD_S", 0.3), ("SWEEP_S", 0.05), ("MAX_CONNECTIONS", 8)):
        monkeypatch.setattr(web_server, name, value)
    server = web_server.make_server(answer, "127.0.0.1", 0)
    serving = asyncio.create_task(server.serve())
    yield server.port
    server.should_exit = True
    await asyncio.wait_for(serving, PATIENCE_S)


def refused(kind: str) -> float:
    return metrics.HTTP_REFUSED.labels(kind)._value.get()


async def until_refused(kind: str, count: float) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while refused(kind) < count:  # noqa: ASYNC110 - a counter sets no event
            await asyncio.sleep(0.05)


async def is_served(port: int) -> bool:
    async with connected("127.0.0.1", port, a_request("/", "GET", "Connection: close")) as (reader, _):
        return (await asyncio.wait_for(read_until_closed(reader), PATIENCE_S)).endswith(b"served\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", "timeout"),
        (b"GET / HTTP/1.1\r\nHost: x", "timeout"),
        (a_request("/", "PUT", "Content-Length: 5") + b"x", "timeout"),
        (a_request("/", "GET", "Content-Length: 99999999999"), "timeout"),
        (a_request(), "timeout"),  # idle after an answer
        (a_request() * 3, "pipelined"),
        (b"\0\1\2 noise\r\n\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000, "malformed"),
        (b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", "malformed"),
        (b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "malformed"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", "malformed"),
    ],
)
async def test_a_connection_that_is_not_a_request_in_time_is_closed(
    port: int, sent: bytes, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle clients, and those that send a byte now and then, were kept for ever."""
    if kind != "timeout":
        monkeypatch.setattr(web_server, "REQUEST_S", PATIENCE_S)
    before = refused(kind)
    async with connected("127.0.0.1", port, sent) as (reader, _):
        await asyncio.wait_for(read_until_closed(reader), PATIENCE_S)
    assert refused(kind) == before + 1
    monkeypatch.setattr(web_server, "REQUEST_S", PATIENCE_S)
    assert await is_served(port)


@pytest.mark.parametrize("client", [hostile.send_head_slowly, hostile.send_body_slowly, hostile.send_body_without_end])
async def test_a_client_that_sends_something_now_and_then_is_not_kept(port: int, client: hostile.Client) -> None:
    with pytest.raises(OSError):
        await asyncio.wait_for(client("127.0.0.1", port), PATIENCE_S)


async def test_an_answer_that_is_not_read_is_given_up(port: int) -> None:
    before = refused("unread")
    async with connected("127.0.0.1", port, a_request("/large")) as (reader, _):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until_refused("unread", before + 1)


async def test_a_crowd_of_idle_clients_keeps_nobody_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is closed, but not one that has shown the token."""
    monkeypatch.setattr(web_server, "REQUEST_S", PATIENCE_S)
    async with connected("127.0.0.1", port, a_request("/trusted")) as (reader, writer):
        await reader.readuntil(b"served")
        before = refused("crowded")
        async with hostile.attack([hostile.stay_idle], 20, "127.0.0.1", port):
            await until_refused("crowded", before + 12)
            assert await is_served(port)
            writer.write(a_request("/"))
            assert await reader.readuntil(b"served")


async def test_the_server_answers_amid_all_hostile_clients(port: int) -> None:
    async with hostile.attack(hostile.HTTP_CLIENTS, 2 * len(hostile.HTTP_CLIENTS), "127.0.0.1", port):
        for _ in range(100):
            if await is_served(port):
                break
        else:
            pytest.fail("no request was answered")
    assert await is_served(port)
