"""Spans know their parents and end once. Without a sink they cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.telemetry.spans import (
    COORDINATOR,
    NO_SPAN,
    SILENT_RECORDER,
    TRAINER,
    Recorder,
    Span,
    SpanContext,
    SpanName,
    UnixClock,
    continue_trace,
    present_span,
)

ROOT = SpanContext(trace_id=7, span_id=9, step=3)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_span_that_begins_inside_another_is_its_child() -> None:
    spans: list[Span] = []
    recorder = Recorder(spans.append)
    with recorder.begin_root(SpanName.STEP, COORDINATOR, ROOT):
        with recorder.begin_span(SpanName.SYNC, COORDINATOR, policy_version=2):
            recorder.begin_span(SpanName.BROADCAST, TRAINER).end()
        recorder.begin_span(SpanName.CHECKPOINT, TRAINER).end()
    broadcast, sync, checkpoint, step = spans
    assert (step.context, step.parent) == (ROOT, None)
    assert (sync.parent, checkpoint.parent, broadcast.parent) == (ROOT, ROOT, sync.context)
    assert {span.context.trace_id for span in spans} == {7}
    assert {span.step for span in spans} == {3}
    assert len({span.context.span_id for span in spans}) == 4
    assert sync.attributes == {"policy_version": 2}
    assert present_span() is None


def test_a_failed_span_has_the_errors_class_and_not_its_message() -> None:
    spans: list[Span] = []
    recorder = Recorder(spans.append)
    with pytest.raises(ValueError, match="the answer is secret"), recorder.begin_root(SpanName.STEP, COORDINATOR, ROOT):
        raise ValueError("the answer is secret")
    assert [span.error for span in spans] == ["ValueError"]
    assert "secret" not in repr(spans)


def test_only_the_first_end_counts() -> None:
    spans: list[Span] = []
    with Recorder(spans.append).begin_root(SpanName.STEP, COORDINATOR, ROOT) as span:
        span.end("ungraded")
    span.end()
    assert [span.error for span in spans] == ["ungraded"]


def test_parts_that_a_peer_reports_are_placed_back_to_back_at_the_end() -> None:
    spans: list[Span] = []
    clock = Clock()
    recorder = Recorder(spans.append, clock=clock)
    span = recorder.begin_root(SpanName.TRAIN_STEP, TRAINER, ROOT)
    clock.now += 10
    span.end_with_parts((SpanName.LOGPROB, 3.0), (SpanName.TRAIN, 5.0))
    found = {span.name: (span.began_s, span.ended_s) for span in spans}
    assert found == {
        SpanName.TRAIN_STEP: (1000.0, 1010.0),
        SpanName.LOGPROB: (1002.0, 1005.0),
        SpanName.TRAIN: (1005.0, 1010.0),
    }
    assert all(span.parent == ROOT for span in spans[1:])


def test_parts_that_exceed_their_whole_are_cut() -> None:
    spans: list[Span] = []
    clock = Clock()
    span = Recorder(spans.append, clock=clock).begin_root(SpanName.TRAIN_STEP, TRAINER, ROOT)
    clock.now += 4
    span.end_with_parts((SpanName.LOGPROB, 3.0), (SpanName.TRAIN, 3.0))
    assert {span.name: span.ended_s - span.began_s for span in spans[1:]} == {
        SpanName.TRAIN: 3.0,
        SpanName.LOGPROB: 1.0,
    }


def test_without_a_sink_no_span_is_made_or_sent() -> None:
    with SILENT_RECORDER.begin_root(SpanName.STEP, COORDINATOR, ROOT) as span:
        assert present_span() is None
        assert span.traceparent == ""
        assert SILENT_RECORDER.begin_span(SpanName.SYNC, COORDINATOR) is span is NO_SPAN
        span.add_attributes(tokens=3)
        span.end_with_parts((SpanName.TRAIN, 1.0))
    assert NO_SPAN.attributes == {}


def test_work_outside_a_run_has_no_span() -> None:
    spans: list[Span] = []
    with Recorder(spans.append).begin_span(SpanName.SYNC, COORDINATOR):
        assert present_span() is None
    assert spans == []


async def test_a_tasks_spans_are_children_of_the_span_in_which_it_started() -> None:
    spans: list[Span] = []
    recorder = Recorder(spans.append)

    async def receive(replica: str) -> None:
        with recorder.begin_span(SpanName.RECEIVE, replica):
            await asyncio.sleep(0)

    with recorder.begin_root(SpanName.STEP, COORDINATOR, ROOT):
        both = [asyncio.create_task(receive(replica)) for replica in ("gen-0", "gen-1")]
    await asyncio.gather(*both)
    assert {(span.lane, span.parent) for span in spans if span.name is SpanName.RECEIVE} == {
        ("gen-0", ROOT),
        ("gen-1", ROOT),
    }


async def test_a_stream_that_is_closed_elsewhere_ends_its_span() -> None:
    spans: list[Span] = []
    recorder = Recorder(spans.append)

    async def stream() -> AsyncGenerator[int]:
        with recorder.begin_root(SpanName.CALL, TRAINER, ROOT):
            yield 1

    numbers = stream()
    assert await asyncio.create_task(anext(numbers)) == 1  # type: ignore[arg-type]  # a coroutine, whatever stubs say
    await asyncio.create_task(numbers.aclose())  # type: ignore[arg-type]
    assert [span.error for span in spans] == ["GeneratorExit"]
    assert present_span() is None


async def test_a_call_continues_its_callers_trace() -> None:
    spans: list[Span] = []

    async def handle() -> None:
        continue_trace("nonsense")
        continue_trace(ROOT.traceparent)
        Recorder(spans.append).begin_span(SpanName.LOAD, "gen-0").end()

    await asyncio.create_task(handle())
    assert [span.parent for span in spans] == [SpanContext(ROOT.trace_id, ROOT.span_id)], "without the step"
    assert present_span() is None


def test_the_clock_shows_unix_seconds_and_never_goes_back() -> None:
    clock = UnixClock()
    times = [clock() for _ in range(100)]
    assert times == sorted(times)
    assert times[0] > 1.7e9, "seconds since 1970, and this was written in 2026"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
def test_a_traceparent_identifies_its_span(trace_id: int, span_id: int) -> None:
    assert SpanContext.parse_traceparent(SpanContext(trace_id, span_id).traceparent) == SpanContext(trace_id, span_id)


HEX = st.text("0123456789abcdefABCDEF", max_size=40)


@given(st.one_of(st.text(), st.lists(HEX, max_size=6).map("-".join)))
def test_an_invalid_traceparent_is_ignored(text: str) -> None:
    found = SpanContext.parse_traceparent(text)
    assert found is None or found.traceparent[3:52] == text[3:52]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n",
        "00-\u0660af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ],
)
def test_values_that_the_standard_forbids_are_ignored(text: str) -> None:
    assert SpanContext.parse_traceparent(text) is None


def test_a_later_version_of_the_header_is_read() -> None:
    text = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"
    assert SpanContext.parse_traceparent(text) == SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
