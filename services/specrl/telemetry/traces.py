"""Switches the export of OpenTelemetry traces on or off for one process. Off by default.

`telemetry.traces` of the run file switches it on in every process of the run. It needs the extra `traces`. While it is
off, OpenTelemetry is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from specrl.errors import SpecProblem, raise_problems
from specrl.models import RunModels
from specrl.spec import RunSpec
from specrl.telemetry.spans import Recorder, SpanSink


def is_tracing_on(spec: RunSpec) -> bool:
    """Whether the run file enables traces and the standard variable OTEL_SDK_DISABLED does not disable them here."""
    return spec.telemetry.traces is not None and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


def check(spec: RunSpec, _models: RunModels | None = None) -> list[SpecProblem]:
    """Return a problem if traces are on and the packages that they need are not installed."""
    if not is_tracing_on(spec):
        return []
    try:
        import specrl.telemetry.otel  # noqa: F401 - imported only to see whether it works
    except ImportError as error:
        rule = f"must have OpenTelemetry's SDK and OTLP exporter installed, got neither ({error})"
        remedy = "install the extra `traces` (docs/install.md), or remove telemetry.traces"
        return [SpecProblem("telemetry.traces", rule, remedy)]
    return []


@contextmanager
def open_trace_sinks(spec: RunSpec, process: str, instance: str) -> Iterator[tuple[SpanSink, ...]]:
    """Yield the trace sink of this process, or none if traces are off. On exit, send queued spans for up to CLOSE_S.

    process: coordinator, generation or trainer. instance: which one, for example gen-0. Raises SpecInvalid.
    """
    raise_problems(check(spec))
    traces = spec.telemetry.traces
    if traces is None or not is_tracing_on(spec):
        yield ()
        return
    from specrl.telemetry import otel

    about = {"service.name": f"specrl-{process}", "service.instance.id": instance, "specrl.run": spec.name}
    sink = otel.TraceSink(otel.make_otlp_exporter(traces.endpoint), about)
    try:
        yield (sink,)
    finally:
        sink.close()


@contextmanager
def open_recorder(spec: RunSpec, process: str, instance: str) -> Iterator[Recorder]:
    """Yield a recorder whose only sink is the trace sink; silent if traces are off."""
    with open_trace_sinks(spec, process, instance) as found:
        yield Recorder(*found)
