"""Traces are off by default, reach a collector unchanged, and a failing collector never affects the run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.run_files import a_model_folder, a_run

from specrl.errors import SpecInvalid
from specrl.launcher import preflight
from specrl.launcher.memory import GIB
from specrl.spec import RunSpec, parse_spec
from specrl.telemetry import otel, traces
from specrl.telemetry.otel import TraceSink, make_otlp_exporter
from specrl.telemetry.spans import COORDINATOR, METHOD, TRAINER, Recorder, SpanContext, SpanName

ROOT = SpanContext(trace_id=0xABC, span_id=0xDEF, step=3)


def a_spec(folder: Path, **telemetry: Any) -> RunSpec:
    return parse_spec(a_run(folder, telemetry=telemetry))


def a_step(recorder: Recorder, root: SpanContext = ROOT) -> None:
    with (
        recorder.begin_root(SpanName.STEP, COORDINATOR, root),
        recorder.begin_span(SpanName.SYNC, COORDINATOR, retries=2),
    ):
        pass


class Collector(BaseHTTPRequestHandler):
    """Records the requests that it receives, as (path, request)."""

    taken: list[tuple[str, ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.taken.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """Yields a collector's address and the requests that it received."""
    taken: list[tuple[str, ExportTraceServiceRequest]] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Collector,), {"taken": taken})) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()
        thread.join()


def test_a_collector_receives_spans_with_our_ids(
    tmp_path: Path, collector: tuple[str, list[tuple[str, ExportTraceServiceRequest]]]
) -> None:
    endpoint, taken = collector
    with traces.open_recorder(a_spec(tmp_path, traces={"endpoint": endpoint}), "generation", "gen-1") as recorder:
        a_step(recorder)
        with recorder.begin_root(SpanName.STEP, COORDINATOR, ROOT):
            recorder.begin_span(SpanName.CALL, TRAINER, **{METHOD: "specrl.api.v1.TrainerService/Score"}).end(
                "StoreFailed"
            )
    assert {path for path, _ in taken} == {"/v1/traces"}
    resources = [sent for _, request in taken for sent in request.resource_spans]
    about = {item.key: item.value.string_value for item in resources[0].resource.attributes}
    assert (about["service.name"], about["service.instance.id"], about["specrl.run"]) == (
        "specrl-generation",
        "gen-1",
        "tiny",
    )
    spans = [span for sent in resources for scope in sent.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["sync", "step", "specrl.api.v1.TrainerService/Score", "step"]
    sync, step, score, _ = spans
    assert {span.trace_id for span in spans} == {ROOT.trace_id.to_bytes(16, "big")}
    assert step.span_id == sync.parent_span_id == score.parent_span_id == ROOT.span_id.to_bytes(8, "big")
    assert step.parent_span_id == b""
    assert step.start_time_unix_nano <= sync.start_time_unix_nano <= sync.end_time_unix_nano
    facts = {item.key: item.value.int_value or item.value.string_value for item in sync.attributes}
    assert facts == {"specrl.retries": 2, "specrl.lane": COORDINATOR, "specrl.step": 3}
    assert (score.status.message, score.kind) == ("StoreFailed", score.SPAN_KIND_SERVER)


def test_without_traces_opentelemetry_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(a_run(tmp_path)))
    program = (
        "import sys, specrl.coordinator.main\n"
        "from specrl.spec import load_spec\nfrom specrl.telemetry import traces\n"
        "from pathlib import Path\n"
        "with traces.open_recorder(load_spec(Path(sys.argv[1])), 'coordinator', 'coordinator') as recorder:\n"
        "    print(recorder.has_sinks, [name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run.json")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout == "False []\n"


def test_the_standard_variable_switches_traces_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with traces.open_recorder(a_spec(tmp_path, traces={}), "coordinator", "coordinator") as recorder:
        assert not recorder.has_sinks


def test_traces_without_the_extra_are_refused_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_model_folder(tmp_path / "model")
    monkeypatch.delitem(sys.modules, "specrl.telemetry.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SpecInvalid, match=r"telemetry\.traces: must have OpenTelemetry.*install the extra `traces`"):
        preflight.check_run(a_spec(tmp_path, traces={}), available_bytes=lambda: 64 * GIB)
    with (
        pytest.raises(SpecInvalid, match="install the extra `traces`"),
        traces.open_trace_sinks(a_spec(tmp_path, traces={}), "trainer", "trainer"),
    ):
        pass
    preflight.check_run(a_spec(tmp_path), available_bytes=lambda: 64 * GIB)


class Refusing(InMemorySpanExporter):
    """An exporter that fails a given number of times, and then works."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.failures -= 1
        return SpanExportResult.FAILURE if self.failures >= 0 else super().export(spans)


def test_spans_that_cannot_be_delivered_are_dropped_and_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    exporter = Refusing(failures=3)
    sink = TraceSink(exporter, {})
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            a_step(Recorder(sink))
        sink.close()
    assert [line["event"] for line in logs] == ["trace_export_failed", "trace_export_recovered"]
    assert logs[1]["spans_lost"] == 6
    assert len(exporter.get_finished_spans()) == 4


def test_an_unreachable_collector_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "600")
    with structlog.testing.capture_logs() as logs:
        sink = TraceSink(make_otlp_exporter("http://127.0.0.1:9"), {})
        for _ in range(2000):
            a_step(Recorder(sink))
        sink.close()
    assert [line["event"] for line in logs] == ["trace_export_failed"]


def test_a_collector_that_never_answers_delays_the_exit_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "CLOSE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are accepted, and never read
        sink = TraceSink(make_otlp_exporter(f"http://127.0.0.1:{silent.getsockname()[1]}"), {})
        for _ in range(600):  # more than a batch: the exporter hangs in the first
            a_step(Recorder(sink))
        closing = threading.Thread(target=sink.close, daemon=True)
        closing.start()
        closing.join(timeout=8)
        assert not closing.is_alive(), "the exporter's own deadline is 10 s"


def test_a_sampler_takes_or_drops_whole_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    exporter = InMemorySpanExporter()
    sink = TraceSink(exporter, {})
    for number in range(1, 17):
        a_step(Recorder(sink), SpanContext(number << 60, 1, number))
    sink.close()
    found = [(span.context.trace_id, span.name) for span in exporter.get_finished_spans() if span.context]
    taken = {trace for trace, _ in found}
    assert 0 < len(taken) < 16
    assert sorted(found) == sorted((trace, name) for trace in taken for name in ("step", "sync"))


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4318",
        "ftp://collector",
        "http://user:secret@collector:4318",
        "http://collector:0",
        "http://collector:65536",
        "http://",
        "http://collector\n",
    ],
)
def test_an_invalid_address_of_a_collector_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(SpecInvalid, match=r"telemetry\.traces\.endpoint"):
        a_spec(tmp_path, traces={"endpoint": endpoint})
