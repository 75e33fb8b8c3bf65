"""One way to serve gRPC: a port that is really ours, messages that can be read, and errors that arrive as raised.

    bytes --of a role that may call?--> --not too many?--> --protobuf?--> servicer --> answer --not too large?--> bytes

What fails on the way is a SpecrlError, and becomes its own gRPC status with the class's name in the trailing metadata;
`clients.py` turns it back. Anything else is our bug: it is logged with its traceback and answered INTERNAL. Each is
counted, and the server goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError

from specrl.errors import MessageTooLarge, PortTaken, RecordInvalid, SpecrlError
from specrl.rpc.limits import LARGEST_BYTES
from specrl.rpc.tls import Guard
from specrl.telemetry import metrics
from specrl.telemetry.spans import METHOD, SILENT, OpenSpan, Recorder, SpanName, continue_from

ERROR_CLASS_KEY = "specrl-error"
TRACEPARENT = "traceparent"
"""Metadata: the caller's span, as W3C Trace Context writes it. One that is malformed is passed over."""

DETAILS_BYTES = 2000
"""Of an error's message. It travels as a header, in which a byte may take three, and headers may take 8 KiB."""

UNEXPECTED = "Unexpected"
"""In place of the error's class where it is none of ours: a bug."""

type Context = grpc.aio.ServicerContext[Any, Any]

log = structlog.get_logger(__name__)


def channel_options(limit_bytes: int) -> list[tuple[str, int]]:
    """What both sides tell gRPC. It refuses without words and uncounted, so it refuses only what is twice too large."""
    most = min(2 * limit_bytes, LARGEST_BYTES)
    return [
        ("grpc.max_send_message_length", most),
        ("grpc.max_receive_message_length", most),
        ("grpc.so_reuseport", 0),
    ]


def count_from_zero(service: ServiceDescriptor) -> None:
    """Export how often each method of a service has failed by a bug, before it does: alerts look at increases."""
    for method in service.methods:
        metrics.CALLS_REFUSED.labels(f"/{service.full_name}/{method.name}", UNEXPECTED)


def check_size(what: str, size_bytes: int, limit_bytes: int) -> None:
    """Raise MessageTooLarge for a message that is larger than any of its run may be."""
    if size_bytes > limit_bytes:
        raise MessageTooLarge(
            f"{what} must be at most {limit_bytes} bytes, the largest that its run needs, got {size_bytes}; use one "
            "run file everywhere, or lower schedule.promptsPerStep, schedule.groupSize or generation.sampling.maxTokens"
        )


@dataclass(frozen=True)
class Border:
    """What a server asks of calls, and whom it tells of them.

    limit_bytes: of every message, in and out (`limits.py`). guard: mutual TLS with callers of its roles; without one,
    anybody who reaches the port may call. recorder: hears of calls that are part of a caller's span, in this lane.
    """

    limit_bytes: int = LARGEST_BYTES
    guard: Guard | None = None
    recorder: Recorder = SILENT
    lane: str = ""


ANYBODY = Border()
"""For servers of one machine."""


async def serve(
    register: Callable[[grpc.aio.Server], None],
    host: str,
    port: int,
    border: Border = ANYBODY,
) -> tuple[grpc.aio.Server, int]:
    """Start a server with the servicers that `register` adds. port 0 takes any free one. Returns (server, port).

    Raises PortTaken.
    """
    server = grpc.aio.server(options=channel_options(border.limit_bytes), interceptors=[_Checks(border)])
    register(server)
    address = f"{host}:{port}"
    try:
        if border.guard is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, border.guard.credentials())
    except RuntimeError as error:
        raise PortTaken(
            f"the gRPC address must be free, got {host}:{port} taken by another process; choose another port or use 0"
        ) from error
    await server.start()
    return server, bound


class _Checks(grpc.aio.ServerInterceptor):
    """Wraps every handler of this server's three call shapes: unary-unary, stream-stream and stream-unary.

    gRPC would read requests itself, and answer what it cannot read in words of its own: so it is given no codec, and
    hands over bytes. Handlers are untyped: types-grpcio describes those of the server with threads alone.
    """

    def __init__(self, border: Border) -> None:
        self._border = border
        self._limit_bytes, self._guard = border.limit_bytes, border.guard

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        caller = _caller(handler_call_details.invocation_metadata)

        def span() -> OpenSpan:
            """Of this call, if it is part of one of the caller's. The task is the call's own."""
            continue_from(caller)
            name = method.removeprefix("/")
            return self._border.recorder.begin(SpanName.CALL, self._border.lane, None, **{METHOD: name})

        def admit(context: Context) -> None:
            if self._guard is not None:
                self._guard.check(method, context.auth_context())

        def request_of(data: bytes) -> Any:
            check_size(f"a request to {method}", len(data), self._limit_bytes)
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                raise RecordInvalid(
                    f"a request to {method} must be the protobuf message of its name, got {len(data)} other bytes; "
                    "use the same version of specrl everywhere"
                ) from error

        def bytes_of(reply: Any) -> bytes:
            data: bytes = handler.response_serializer(reply)
            check_size(f"an answer of {method}", len(data), self._limit_bytes)
            return data

        async def answer(data: bytes, context: Context) -> Any:
            with span() as open_span:
                try:
                    admit(context)
                    return bytes_of(await handler.unary_unary(request_of(data), context))
                except Exception as error:  # noqa: BLE001 - the edge of the process: answer, count, go on
                    open_span.end(type(error).__name__)
                    await _refuse(method, context, error)

        async def requests_of(parts: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in parts:
                yield request_of(data)

        async def gather(parts: AsyncIterator[bytes], context: Context) -> Any:
            with span() as open_span:
                try:
                    admit(context)
                    return bytes_of(await handler.stream_unary(requests_of(parts), context))
                except Exception as error:  # noqa: BLE001 - the edge of the process: answer, count, go on
                    open_span.end(type(error).__name__)
                    await _refuse(method, context, error)

        async def converse(parts: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            with span() as open_span:
                try:
                    admit(context)
                    async for item in handler.stream_stream(requests_of(parts), context):
                        yield bytes_of(item)
                except Exception as error:  # noqa: BLE001 - the edge of the process: answer, count, go on
                    open_span.end(type(error).__name__)
                    await _refuse(method, context, error)

        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(gather)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(answer)
        return grpc.stream_stream_rpc_method_handler(converse)


def _caller(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The traceparent of a call, or what was sent in its place; empty without one."""
    found = next((value for key, value in metadata or () if key == TRACEPARENT), "")
    return found if isinstance(found, str) else ""


async def _refuse(method: str, context: Context, error: Exception) -> NoReturn:
    """Answer a call with an error."""
    if isinstance(error, grpc.aio.AbortError):  # a servicer has answered already
        raise error
    if isinstance(error, SpecrlError):
        name, status, details = type(error).__name__, error.grpc_status, str(error)
        log.debug("call_refused", method=method, error=name, reason=details)
    else:
        name, status, details = UNEXPECTED, "INTERNAL", f"{method} must not fail like this; see the log of the server"
        log.error("call_failed", method=method, exc_info=error)
    metrics.CALLS_REFUSED.labels(method, name).inc()
    encoded = details.encode("utf-8", "backslashreplace")  # half of a surrogate pair is no UTF-8
    if len(encoded) > DETAILS_BYTES:  # the middle goes: a long value may stand before or after what is wrong with it
        encoded = encoded[: DETAILS_BYTES // 2] + b" ... " + encoded[-DETAILS_BYTES // 2 :]
    await context.abort(getattr(grpc.StatusCode, status), encoded.decode("utf-8", "ignore"), ((ERROR_CLASS_KEY, name),))
    raise AssertionError("abort raises")
