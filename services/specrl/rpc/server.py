"""One way to serve gRPC: a port that is really ours, and errors that arrive as what they were raised as.

A SpecrlError raised by a servicer becomes its own gRPC status with the class's name in the trailing metadata;
`clients.py` turns it back. Anything else is our bug: it is logged with its traceback and answered INTERNAL.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import structlog

from specrl.errors import PortTaken, SpecrlError

ERROR_CLASS_KEY = "specrl-error"
MESSAGE_BYTES = 1 << 30
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]

log = structlog.get_logger(__name__)


async def serve(register: Callable[[grpc.aio.Server], None], host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Start a server with the servicers that `register` adds. port 0 takes any free one. Returns (server, port).

    Raises PortTaken.
    """
    server = grpc.aio.server(options=OPTIONS, interceptors=[_Translate()])
    register(server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise PortTaken(
            f"the gRPC address must be free, got {host}:{port} taken by another process; choose another port or use 0"
        ) from error
    await server.start()
    return server, bound


class _Translate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # the stubs' generics do not exist at run time
    """Wraps every handler of this server's two call shapes: unary-unary and unary-stream.

    Untyped inside: the published stubs of grpc.aio describe neither handlers nor interceptors.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method

        async def answer(request: Any, context: Any) -> Any:
            try:
                return await handler.unary_unary(request, context)
            except SpecrlError as error:
                await _abort(context, error)
            except Exception:  # the edge of the process: log, answer, go on
                log.exception("call_failed", method=method)
                raise

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for item in handler.unary_stream(request, context):
                    yield item
            except SpecrlError as error:
                await _abort(context, error)
            except Exception:  # the edge of the process: log, answer, go on
                log.exception("call_failed", method=method)
                raise

        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(answer, *codec)
        return grpc.unary_stream_rpc_method_handler(stream, *codec)


async def _abort(context: Any, error: SpecrlError) -> None:
    await context.abort(
        getattr(grpc.StatusCode, error.grpc_status),
        str(error),
        ((ERROR_CLASS_KEY, type(error).__name__),),
    )
