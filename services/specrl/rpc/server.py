"""The gRPC server of every process: checks each call, and sends errors so that clients can raise the same class.

    metadata --token--> request bytes --caller's role--> --size limit--> --protobuf--> servicer
    servicer --> reply --size limit--> reply bytes

A call without the run's token is refused before its request is read. Connections, streams and metadata are bounded, and
refusals are paced, so that hostile callers cost little (`PACE_PER_S`).

A SpecrlError becomes its gRPC status, with the class name in the trailing metadata; `clients.py` raises it again. Any
other exception is a bug of specrl: it is logged with its traceback and answered with INTERNAL. Both are counted in a
metric, and the server continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError

from specrl.errors import MessageTooLarge, PortTaken, RecordInvalid, SpecrlError, TokenRefused
from specrl.rpc.limits import LARGEST_BYTES
from specrl.rpc.run_token import PROOF_KEY, RunToken
from specrl.rpc.tls import CallerGuard
from specrl.telemetry import metrics
from specrl.telemetry.hosts import join_address
from specrl.telemetry.pace import Pace
from specrl.telemetry.spans import METHOD, SILENT_RECORDER, Recorder, SpanName, continue_trace

ERROR_CLASS_KEY = "specrl-error"
"""Trailing metadata: the class name of the error, see `errors.ERRORS_BY_NAME`."""

TRACEPARENT = "traceparent"
"""Metadata: the caller's span (W3C Trace Context). A malformed one is ignored."""

DETAILS_BYTES = 2000
"""Longest error message. gRPC percent-encodes it into a header, up to 3 bytes per byte, and limits headers to 8 KiB."""

UNEXPECTED = "Unexpected"
"""Sent in place of the class name for an exception that is no SpecrlError."""

type Context = grpc.aio.ServicerContext[Any, Any]

log = structlog.get_logger(__name__)


UNKNOWN_METHOD = "unknown"
"""Label of refused calls to methods that do not exist: the caller chooses their names."""

MAX_CONNECTIONS = 512
"""Most open connections of a server: four for each of 64 replicas, and as many of others. Others are closed at once."""

MAX_STREAMS = 32
"""Most calls at once over one connection; further ones wait at the caller. Our clients have at most eight."""

METADATA_BYTES = 8 << 10
"""Longest metadata of a call. gRPC refuses some calls above it, and all that are twice as long."""

HANDSHAKE_S = 5
"""Longest wait for a new connection to begin HTTP/2, TLS included. gRPC's default is two minutes."""

IDLE_S = 300
"""A connection without calls is closed after so long. Our clients open another one for their next call."""

KEEPALIVE_S = 60
"""Pause between pings to a silent client, and longest wait for the answer. It ends connections that read nothing."""

READ_BYTES = 32 << 10
"""Most bytes that gRPC reads and parses at once from a connection. gRPC's default is 4 MiB.

A connection that floods then has the threads of gRPC for a shorter turn. Batches of 64 MiB arrive as fast as before.
"""

PACE_PER_S = 20.0
"""Most calls without the run's token that are answered in a second; further ones wait for their turn.

A refused call takes about 0.4 ms of the event loop. While it waits it counts as one of its connection's MAX_STREAMS.
"""

PACE_BURST = 20
"""Refusals that are answered at once after a quiet time."""


def make_server_options(limit_bytes: int) -> list[tuple[str, int]]:
    """Options of servers: those of channels, and bounds on what a hostile client can hold."""
    return [
        *make_channel_options(limit_bytes),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_S),
        ("grpc.max_connection_idle_ms", 1000 * IDLE_S),
        ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_S),
        ("grpc.keepalive_timeout_ms", 1000 * KEEPALIVE_S),
        ("grpc.experimental.tcp_read_chunk_size", READ_BYTES),
        ("grpc.experimental.tcp_max_read_chunk_size", READ_BYTES),
        # Pings are answered, however many come. Above gRPC's limit of two, gRPC 1.85 goes on reading, and each further
        # ping copies a text of all before it: some KB of pings a second then cost a whole core.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def make_channel_options(limit_bytes: int) -> list[tuple[str, int]]:
    """Options of clients and servers.

    gRPC's own size check returns no useful error and increments no metric. It is set to twice our limit, so that
    `check_size` fires first.
    """
    most = min(2 * limit_bytes, LARGEST_BYTES)
    return [
        ("grpc.max_send_message_length", most),
        ("grpc.max_receive_message_length", most),
        ("grpc.so_reuseport", 0),  # else two servers may share a port, and PortTaken is never raised
    ]


def export_zero_counts(service: ServiceDescriptor) -> None:
    """Export 0 bugs for each method.

    Alerts look at increases, and a series that starts with its first bug has none.
    """
    for method in service.methods:
        metrics.CALLS_REFUSED.labels(f"/{service.full_name}/{method.name}", UNEXPECTED)


def check_size(what: str, size_bytes: int, limit_bytes: int) -> None:
    """Raise MessageTooLarge if a message exceeds the run's limit. what: names the message in the error."""
    if size_bytes > limit_bytes:
        raise MessageTooLarge(
            f"{what} must be at most {limit_bytes} bytes, the limit of this run file, got {size_bytes}; use one run "
            "file everywhere, or lower schedule.promptsPerStep, schedule.groupSize or generation.sampling.maxTokens"
        )


@dataclass(frozen=True)
class ServerOptions:
    """Settings with which a server checks and traces calls.

    limit_bytes: largest message, in and out (`limits.py`). guard: requires mutual TLS and a caller of its roles; None:
    anybody who reaches the port may call. token: requires a proof of the run's token; None asks for none. recorder:
    records a span for each call whose caller sent one. lane: the spans' lane in the trace.
    """

    limit_bytes: int = LARGEST_BYTES
    guard: CallerGuard | None = None
    token: RunToken | None = None
    recorder: Recorder = SILENT_RECORDER
    lane: str = ""


OPEN_SERVER = ServerOptions()
"""Options of servers that anybody may call who reaches them, as in tests and benchmarks."""


async def start_server(
    register: Callable[[grpc.aio.Server], None], host: str, port: int, options: ServerOptions = OPEN_SERVER
) -> tuple[grpc.aio.Server, int]:
    """Start a server with the servicers that `register` adds. Returns (server, port).

    port: 0 takes any free one. Raises PortTaken.
    """
    checks = _CallChecks(options)
    server = grpc.aio.server(options=make_server_options(options.limit_bytes), interceptors=[checks])
    register(server)
    address = join_address(host, port)
    try:
        if options.guard is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, options.guard.server_credentials())
    except RuntimeError as error:
        raise PortTaken(
            f"the gRPC address must be free, got {address}, which another process uses; choose another port, or 0"
        ) from error
    checks.port = bound
    await server.start()
    return server, bound  # the port that was bound, which is another one than `port` if that was 0


class _CallChecks(grpc.aio.ServerInterceptor):
    """Wraps every handler, for the three kinds of calls in use: unary-unary, stream-unary and stream-stream.

    The wrapped handlers have no codec, so that gRPC passes bytes. It would otherwise parse requests itself, and answer
    malformed ones with errors of its own. Handlers are untyped, because types-grpcio describes only those of the
    threaded server.

    port: of the server, for which proofs of the token are made; set before the server starts.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._pace = Pace(PACE_PER_S, PACE_BURST)
        self.port = 0

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if self._options.token is not None:
            try:
                proof = _read_metadata(handler_call_details.invocation_metadata, PROOF_KEY)
                self._options.token.check_proof(self.port, proof)
            except TokenRefused as error:
                label = UNKNOWN_METHOD if handler is None else handler_call_details.method
                return self._make_refusing_handler(label, error)
        if handler is None:  # an unknown method; gRPC answers UNIMPLEMENTED
            return handler
        method = handler_call_details.method
        traceparent = _read_metadata(handler_call_details.invocation_metadata, TRACEPARENT)
        caller = traceparent if isinstance(traceparent, str) else ""

        @asynccontextmanager
        async def answer_call(context: Context) -> AsyncIterator[None]:
            """Check and trace one call around its servicer, below the caller's span if it sent one."""
            continue_trace(caller)  # gRPC runs each call in its own task, so the context variable is this call's
            name = method.removeprefix("/")
            with self._options.recorder.begin_span(SpanName.CALL, self._options.lane, None, **{METHOD: name}) as span:
                try:
                    if self._options.guard is not None:
                        self._options.guard.check_caller(method, context.auth_context())
                    yield
                except Exception as error:  # noqa: BLE001 - the edge of the process: answer, count, go on
                    span.end(type(error).__name__)
                    await _abort_call(method, context, error)

        def decode_request(data: bytes) -> Any:
            check_size(f"a request to {method}", len(data), self._options.limit_bytes)
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                raise RecordInvalid(
                    f"a request to {method} must be its protobuf message, got {len(data)} other bytes; use the same "
                    "version of specrl everywhere"
                ) from error

        def encode_reply(reply: Any) -> bytes:
            data: bytes = handler.response_serializer(reply)
            check_size(f"a reply of {method}", len(data), self._options.limit_bytes)
            return data

        async def decode_requests(parts: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in parts:
                yield decode_request(data)

        async def handle_unary_unary(data: bytes, context: Context) -> Any:
            async with answer_call(context):
                return encode_reply(await handler.unary_unary(decode_request(data), context))

        async def handle_stream_unary(parts: AsyncIterator[bytes], context: Context) -> Any:
            async with answer_call(context):
                return encode_reply(await handler.stream_unary(decode_requests(parts), context))

        async def handle_stream_stream(parts: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async with answer_call(context):
                async for item in handler.stream_stream(decode_requests(parts), context):
                    yield encode_reply(item)

        # grpc.aio stores a handler's function in the attribute of its kind; the others are None.
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(handle_stream_unary)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(handle_unary_unary)
        return grpc.stream_stream_rpc_method_handler(handle_stream_stream)

    def _make_refusing_handler(self, method: str, error: TokenRefused) -> Any:
        """Make a handler that refuses a call. A handler of streams, so that gRPC reads nothing of the request."""

        async def refuse_call(_parts: AsyncIterator[bytes], context: Context) -> None:
            wait_s = self._pace.take_turn()
            if wait_s:
                await asyncio.sleep(wait_s)
            await _abort_call(method, context, error)

        return grpc.stream_stream_rpc_method_handler(refuse_call)


def _read_metadata(metadata: Iterable[tuple[str, str | bytes]] | None, wanted: str) -> str | bytes | None:
    """Return the first value of a key in a call's metadata; None without one."""
    return next((value for key, value in metadata or () if key == wanted), None)


async def _abort_call(method: str, context: Context, error: Exception) -> NoReturn:
    """Abort a call with the status, message and class name of an error. Logs and counts it."""
    if isinstance(error, grpc.aio.AbortError):  # the servicer has aborted the call already
        raise error
    if isinstance(error, SpecrlError):
        name = type(error).__name__
        status = error.grpc_status
        details = str(error)
        log.debug("call_refused", method=method, error=name, reason=details)
    else:
        name = UNEXPECTED
        status = "INTERNAL"
        details = f"{method} failed because of a bug in specrl; see the server's log"
        log.error("call_failed", method=method, exc_info=error)
    metrics.CALLS_REFUSED.labels(method, name).inc()
    # The message is a header: valid UTF-8 of limited size, whatever the request put into it.
    encoded = details.encode("utf-8", "backslashreplace")  # a lone surrogate cannot be encoded otherwise
    if len(encoded) > DETAILS_BYTES:  # cut the middle: the reason may stand before or after a long value
        encoded = encoded[: DETAILS_BYTES // 2] + b" ... " + encoded[-DETAILS_BYTES // 2 :]
    await context.abort(getattr(grpc.StatusCode, status), encoded.decode("utf-8", "ignore"), ((ERROR_CLASS_KEY, name),))
    raise AssertionError("abort raises")  # grpc.aio types abort as returning
