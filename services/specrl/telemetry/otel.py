"""Finished spans as OpenTelemetry spans, sent in batches by a thread of the SDK. The one module that imports it.

    Span --TraceSink--> SDK's span --queue--> batch --OTLP over HTTP--> collector

The event loop only fills the queue. A collector that is slow, away or hostile costs spans and nothing else: the queue
is bounded, what does not fit is dropped, and what cannot be delivered is dropped too, which is said once.
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
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace import SpanContext as OtelContext

from specrl.telemetry.spans import METHOD, Span, SpanContext

QUEUE = 16384
"""Spans that wait for the exporter: those of a step of 4096 rollouts, some 40 MB; the SDK's 2048 would drop most."""

CLOSE_S = 5.0
"""For what is left in the queue when the process ends; a collector that is away must not keep it."""

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("specrl")
_UNSET = Status(StatusCode.UNSET)

log = structlog.get_logger(__name__)


def otlp_exporter(endpoint: str | None) -> SpanExporter:
    """To a collector's OTLP/HTTP receiver. The variables OTEL_EXPORTER_OTLP_* say the rest, and where, if None."""
    return OTLPSpanExporter(None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")


class TraceSink:
    """A sink of spans; called from one thread. about: attributes of this process (OpenTelemetry's resource)."""

    def __init__(self, exporter: SpanExporter, about: Mapping[str, str]) -> None:
        # The exporter repeats itself at every batch; `_Watched` says the same once.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        # For its sampler and its resource, which OTEL_* variables say. Its tracer makes spans that begin now, under ids
        # of its own; ours are finished, and have theirs.
        self._provider = TracerProvider(resource=Resource.create({**about}), shutdown_on_exit=False)
        size = None if OTEL_BSP_MAX_QUEUE_SIZE in os.environ else QUEUE
        self._processor = BatchSpanProcessor(_Watched(exporter), max_queue_size=size)

    def __call__(self, span: Span) -> None:
        """Queue a span, if its trace is sampled: every process decides alike, by the trace's id."""
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
                _context(span.context, is_remote=False),
                None if span.parent is None else _context(span.parent),
                self._provider.resource,
                attributes,
                links=[Link(_context(link)) for link in span.links],
                kind=SpanKind.SERVER if method else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
                start_time=round(span.began_s * 1e9),
                end_time=round(span.ended_s * 1e9),
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self) -> None:
        """Send what is left; what is not sent after `CLOSE_S` is lost. Bounds what the SDK's own shutdown waits."""
        closing = threading.Thread(target=self._processor.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _Watched(SpanExporter):
    """An exporter of which one learns once that it fails, and once that it works again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._lost:
                log.warning("traces_lost", reason="the collector does not take them; the run goes on without")
            self._lost += len(spans)
        elif self._lost:
            log.info("traces_taken_again", spans_lost=self._lost)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _context(context: SpanContext, *, is_remote: bool = True) -> OtelContext:
    return OtelContext(context.trace_id, context.span_id, is_remote=is_remote, trace_flags=_SAMPLED)
