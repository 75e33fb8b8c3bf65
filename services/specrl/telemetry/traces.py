"""Whether this process exports its spans as OpenTelemetry traces. Off, which is the default, nothing of it is imported.

`telemetry.traces` of the run file switches it on, in every process of the run; the extra `traces` brings it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from specrl.errors import Problem, SpecInvalid
from specrl.spec import RunSpec
from specrl.telemetry.spans import Recorder, Sink


def is_on(spec: RunSpec) -> bool:
    """Whether the run file asks for traces, and the standard variable OTEL_SDK_DISABLED does not forbid them here."""
    return spec.telemetry.traces is not None and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


def check(spec: RunSpec) -> None:
    """Raise SpecInvalid when traces are asked for and the packages that they need are not installed."""
    if not is_on(spec):
        return
    try:
        import specrl.telemetry.otel  # noqa: F401 - whether it can be
    except ImportError as error:
        raise SpecInvalid(
            (
                Problem(
                    "telemetry.traces",
                    f"must have OpenTelemetry's SDK and OTLP exporter, got none installed ({error})",
                    "install the extra: pip install 'specrl[traces]', or leave telemetry.traces out",
                ),
            )
        ) from error


@contextmanager
def sinks(spec: RunSpec, process: str, instance: str) -> Iterator[tuple[Sink, ...]]:
    """Where this process's spans go: to the collector, or nowhere. Leaving sends what is left, for seconds at most.

    process: coordinator, generation or trainer. instance: which one, for example gen-0. Raises SpecInvalid.
    """
    check(spec)
    traces = spec.telemetry.traces
    if traces is None or not is_on(spec):
        yield ()
        return
    from specrl.telemetry import otel

    about = {"service.name": f"specrl-{process}", "service.instance.id": instance, "specrl.run": spec.name}
    sink = otel.TraceSink(otel.otlp_exporter(traces.endpoint), about)
    try:
        yield (sink,)
    finally:
        sink.close()


@contextmanager
def recorder(spec: RunSpec, process: str, instance: str) -> Iterator[Recorder]:
    """A recorder with these `sinks` and no others."""
    with sinks(spec, process, instance) as found:
        yield Recorder(*found)
