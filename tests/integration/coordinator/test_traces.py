"""The OpenTelemetry spans of the coordinator and of its peers form one tree per step.

Coordinator, gRPC and SDK are real, and each process has its own provider. Engine, trainer and exporter are stand-ins.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.integration.coordinator.small_run import Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.telemetry.otel import TraceSink

STEPS = 6
PROMPTS = 3
GROUP = 4
GENERATE = "generate"
TRAIN_PARTS = "specrl.api.v1.TrainerService/TrainParts"


@dataclass
class Collected:
    """The spans that all processes exported."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    sinks: list[TraceSink] = field(default_factory=list)

    def of(self, process: str) -> list[TraceSink]:
        """The sinks of a process that is started now."""
        self.sinks.append(TraceSink(Shared(self.exporter), {"service.name": process}))
        return self.sinks[-1:]

    def spans(self) -> list[ReadableSpan]:
        """All spans, once every process has ended."""
        for sink in self.sinks:
            sink.close()
        return list(self.exporter.get_finished_spans())


class Shared(InMemorySpanExporter):
    """One process's handle of an exporter that others go on using after it shuts down."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        super().__init__()
        self.export = exporter.export  # type: ignore[method-assign]


async def a_run(folder: Path, collected: Collected) -> None:
    async with Run(folder, a_spec(folder), sinks=collected.of("coordinator"), peer_sinks=collected.of) as run:
        await run.finish()


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[ReadableSpan]:
    """The spans of one run of six steps on two replicas."""
    collected = Collected()
    asyncio.run(a_run(tmp_path_factory.mktemp("traces"), collected))
    return collected.spans()


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def by_ids(spans: list[ReadableSpan]) -> dict[tuple[int, int], ReadableSpan]:
    return {ids(span): span for span in spans}


def parent_of(span: ReadableSpan, spans: dict[tuple[int, int], ReadableSpan]) -> ReadableSpan:
    assert span.parent is not None
    return spans[span.parent.trace_id, span.parent.span_id]


def process_of(span: ReadableSpan) -> object:
    return span.resource.attributes["service.name"]


def attribute(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes[f"specrl.{name}"]


def test_every_span_is_finished_and_has_a_known_parent(spans: list[ReadableSpan]) -> None:
    found = by_ids(spans)
    assert len(found) == len(spans), "no two spans have the same ids"
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
        assert span.status.status_code is StatusCode.UNSET
        if span.parent is not None:
            assert parent_of(span, found).context.trace_id == ids(span)[0]  # type: ignore[union-attr]


def test_every_step_is_one_trace_with_one_root(spans: list[ReadableSpan]) -> None:
    roots = [span for span in spans if span.parent is None]
    assert Counter(root.name for root in roots) == {"step": STEPS, "start": 1, "finish": 1}
    assert {ids(root)[0] for root in roots} == {ids(span)[0] for span in spans}
    assert [attribute(root, "step") for root in roots if root.name == "step"] == list(range(1, STEPS + 1))


def test_a_replicas_span_of_a_rollout_is_a_child_of_the_coordinators(spans: list[ReadableSpan]) -> None:
    found = by_ids(spans)
    generated = [span for span in spans if span.name == GENERATE and process_of(span) in ("gen-0", "gen-1")]
    stream = [span for span in generated if parent_of(span, found).name == "rollout"]
    assert {process_of(span) for span in stream} == {"gen-0", "gen-1"}
    for span in stream:
        rollout = parent_of(span, found)
        assert process_of(rollout) == "coordinator"
        assert attribute(rollout, "rollout") == attribute(span, "rollout")
        assert attribute(rollout, "lane") == process_of(span)
        assert attribute(rollout, "tokens") == attribute(span, "tokens")
    of_steps = [span for span in stream if parent_of(parent_of(span, found), found).name == "prompt"]
    assert len(of_steps) == STEPS * PROMPTS * GROUP


def test_a_rollout_is_in_the_trace_of_the_step_that_trains_it(spans: list[ReadableSpan]) -> None:
    found = by_ids(spans)
    for span in spans:
        if span.name == "prompt":
            assert parent_of(span, found).name == "step"
            assert attribute(parent_of(span, found), "step") == attribute(span, "step")


def test_the_trainers_span_of_a_step_is_a_child_of_the_coordinators(spans: list[ReadableSpan]) -> None:
    found = by_ids(spans)
    trained = [span for span in spans if span.name == TRAIN_PARTS]
    assert {(process_of(span), span.kind) for span in trained} == {("trainer", SpanKind.SERVER)}
    above = [parent_of(span, found) for span in trained]
    assert [span.name for span in above] == ["train_step"] * STEPS
    assert [parent_of(span, found).name for span in above] == ["step"] * STEPS


@pytest.mark.parametrize(
    ("method", "above"),
    [
        ("GenerationService/ReceiveWeights", {"receive"}),
        ("GenerationService/CommitUpdate", {"commit"}),
        ("TrainerService/BroadcastWeights", {"broadcast"}),
        ("TrainerService/SaveCheckpoint", {"checkpoint", "write"}),
        ("TrainerService/Score", {"canary"}),
        ("TrainerService/TrainDrafter", {"drafter"}),
        ("TrainerService/ExportModel", {"export"}),
    ],
)
def test_a_peers_span_is_a_child_of_the_span_that_caused_it(
    spans: list[ReadableSpan], method: str, above: set[str]
) -> None:
    calls = [span for span in spans if span.name == f"specrl.api.v1.{method}"]
    assert calls
    assert {parent_of(span, by_ids(spans)).name for span in calls} == above


def test_a_canarys_rollouts_are_children_of_their_call(spans: list[ReadableSpan]) -> None:
    found = by_ids(spans)
    asked = [span for span in spans if span.name == GENERATE and str(attribute(span, "rollout")).startswith("canary")]
    assert asked
    assert {parent_of(span, found).name for span in asked} == {"specrl.api.v1.GenerationService/Generate"}
    assert {parent_of(parent_of(span, found), found).name for span in asked} == {"canary"}


def test_no_attribute_contains_text(spans: list[ReadableSpan]) -> None:
    names = {name for span in spans for name in span.attributes or ()}
    assert {name.removeprefix("specrl.") for name in names} == {
        *("lane", "step", "method", "rollout", "prompt", "policy_version", "tokens", "finish_reason"),
        *("rollouts", "size_bytes", "retries"),
    }
    texts = {str(value) for span in spans for value in (span.attributes or {}).values() if isinstance(value, str)}
    assert all(len(text) < 64 and " " not in text for text in texts), "only names: completions contain blanks"


async def test_a_lost_rollout_ends_in_an_error_and_its_retry_has_its_own_span(
    tmp_path: Path,
) -> None:
    collected = Collected()
    slow = TableShape(32, 128, 0.01)
    async with Run(
        tmp_path,
        a_spec(tmp_path, steps=3),
        make_engine=lambda name: TableEngine(name, seed=7, shape=slow),
        sinks=collected.of("coordinator"),
        peer_sinks=collected.of,
    ) as run:
        await run.until(lambda: bool(run.trained) and run.registry.replicas["gen-1"].inflight > 0)
        await run.replicas["gen-1"].kill()
        await run.finish()
    spans = collected.spans()
    found = by_ids(spans)
    rollouts = [span for span in spans if span.name == "rollout"]
    lost = [span for span in rollouts if span.status.status_code is StatusCode.ERROR]
    assert lost
    assert {span.status.description for span in lost} <= {"PeerUnavailable", "EngineFailed"}
    for span in lost:
        assert attribute(span, "lane") == "gen-1"
        (again,) = [
            other
            for other in rollouts
            if attribute(other, "rollout") == attribute(span, "rollout") and other not in lost
        ]
        assert again.parent == span.parent
        assert ids(again) != ids(span)
        (own,) = [other for other in spans if other.name == GENERATE and parent_of(other, found) is again]
        assert process_of(own) == attribute(again, "lane")
    cut = [span for span in spans if span.name == GENERATE and span.status.status_code is StatusCode.ERROR]
    assert {process_of(span) for span in cut} <= {"gen-1"}
    assert all(parent_of(span, found) in lost for span in cut)
