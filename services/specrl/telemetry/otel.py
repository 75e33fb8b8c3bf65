"""Exports finished spans through the OpenTelemetry SDK. The only module that imports it.

    Span --TraceSink--> SDK's span --queue--> batch --OTLP over HTTP--> collector

The event loop only fills the queue; a thread of the SDK sends batches. The queue is bounded. If the collector is slow,
unreachable or misbehaving, spans that do not fit or cannot be delivered are dropped, and nothing else is affected. The
first failure is logged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext as OtelContext
from opentelemetry.trace import SpanKind, Status, StatusCode, TraceFlags

from specrl.telemetry.spans import METHOD, Span, SpanContext

QUEUE_SPANS = 16384
"""Spans that may wait for the exporter: enough for a step of 4096 rollouts, about 40 MB. The SDK's default of 2048
would drop most of them."""

CLOSE_S = 5.0
"""Longest wait at the end of the process for queued spans to be sent. An unreachable collector delays it no longer."""

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("specrl")
_UNSET = Status(StatusCode.UNSET)

log = structlog.get_logger(__name__)


def make_otlp_exporter(endpoint: str | None) -> SpanExporter:
    """Make an exporter to a collector's OTLP/HTTP receiver.

    endpoint: its base URL; None takes it from OTEL_EXPORTER_OTLP_ENDPOINT. Other OTEL_EXPORTER_OTLP_* variables apply.
    """
    # The exporter appends the path only to an endpoint that it reads from the variable.
    return OTLPSpanExporter(None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")


class TraceSink:
    """A span sink that exports spans. Called from one thread. about: attributes of this process (the OTel resource)."""

    def __init__(self, exporter: SpanExporter, about: Mapping[str, str]) -> None:
        # The exporter logs every failed batch; `_WatchedExporter` logs the first.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        # Used only for its sampler and its resource, which OTEL_* variables configure. Its tracer would start new spans
        # under new ids, but our spans are finished and have ids.
        self._provider = TracerProvider(resource=Resource.create({**about}), shutdown_on_exit=False)
        # An explicit size would override the standard variable.
        size = None if OTEL_BSP_MAX_QUEUE_SIZE in os.environ else QUEUE_SPANS
        self._processor = BatchSpanProcessor(_WatchedExporter(exporter), max_queue_size=size)

    def __call__(self, span: Span) -> None:
        """Queue a span if its trace is sampled. The decision depends on the trace id, so all processes agree."""
        # Without a parent context, the SDK's samplers decide by the trace id alone.
        sampling = self._provider.sampler.should_sample(None, span.context.trace_id, span.name)
        if sampling.decision is not Decision.RECORD_AND_SAMPLE:
            return
        method = span.attributes.get(METHOD)
        attributes = {f"specrl.{name}": value for name, value in span.attributes.items()}
        attributes["specrl.lane"] = span.lane
        if span.step is not None:
            attributes["specrl.step"] = span.step
        self._processor.on_end(
            ReadableSpan(
                str(method or span.name),
                _convert_context(span.context, is_remote=False),
                None if span.parent is None else _convert_context(span.parent),
                self._provider.resource,
                attributes,
                # Only the span of a call that this process answers has a method.
                kind=SpanKind.SERVER if method else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
                start_time=round(span.began_s * 1e9),  # nanoseconds
                end_time=round(span.ended_s * 1e9),
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self) -> None:
        """Send queued spans for up to CLOSE_S; the rest is lost."""
        # The SDK's own shutdown may wait longer, so it runs in a daemon thread, which does not delay the exit.
        closing = threading.Thread(target=self._processor.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _WatchedExporter(SpanExporter):
    """Wraps an exporter: logs the first failure of a row, and the recovery."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._lost:
                log.warning(
                    "trace_export_failed", reason="the collector does not accept them; the run continues without traces"
                )
            self._lost += len(spans)
        elif self._lost:
            log.info("trace_export_recovered", spans_lost=self._lost)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _convert_context(context: SpanContext, *, is_remote: bool = True) -> OtelContext:
    return OtelContext(context.trace_id, context.span_id, is_remote=is_remote, trace_flags=_SAMPLED)
