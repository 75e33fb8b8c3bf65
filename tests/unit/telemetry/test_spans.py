"""Spans know what they are part of, end once, and cost nothing where nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.telemetry.spans import (
    COORDINATOR,
    NO_SPAN,
    SILENT,
    TRAINER,
    Recorder,
    Span,
    SpanContext,
    SpanName,
    UnixClock,
    continue_from,
    present,
)

ROOT = SpanContext(trace_id=7, span_id=9, step=3)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_begins_inside_of_a_span_is_part_of_it() -> None:
    spans: list[Span] = []
    recorder = Recorder(spans.append)
    with recorder.root(SpanName.STEP, COORDINATOR, ROOT):
        with recorder.begin(SpanName.SYNC, COORDINATOR, policy_version=2):
            recorder.begin(SpanName.BROADCAST, TRAINER).end()
        recorder.begin(SpanName.CHECKPOINT, TRAINER).end()
    broadcast, sync, checkpoint, step = spans
    assert (step.context, step.parent) == (ROOT, None)
    assert (sync.parent, checkpoint.parent, broadcast.parent) == (ROOT, ROOT, sync.context)
    assert {span.context.trace_id for span in spans} == {7}
    assert {span.step for span in spans} == {3}
    assert len({span.context.span_id for span in spans}) == 4
    assert sync.attributes == {"policy_version": 2}
    assert present() is None


def test_a_span_that_an_error_ends_names_its_class_and_not_its_words() -> None:
    spans: list[Span] = []
    recorder = Recorder(spans.append)
    with pytest.raises(ValueError, match="the answer is secret"), recorder.root(SpanName.STEP, COORDINATOR, ROOT):
        raise ValueError("the answer is secret")
    assert [span.error for span in spans] == ["ValueError"]
    assert "secret" not in repr(spans)


def test_only_the_first_end_counts() -> None:
    spans: list[Span] = []
    with Recorder(spans.append).root(SpanName.STEP, COORDINATOR, ROOT) as span:
        span.end("ungraded")
    span.end()
    assert [span.error for span in spans] == ["ungraded"]


def test_parts_that_a_peer_reports_lie_end_to_end_before_the_end() -> None:
    spans: list[Span] = []
    clock = Clock()
    recorder = Recorder(spans.append, clock=clock)
    span = recorder.root(SpanName.TRAIN_STEP, TRAINER, ROOT)
    clock.now += 10
    span.end_in((SpanName.LOGPROB, 3.0), (SpanName.TRAIN, 5.0))
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
    span = Recorder(spans.append, clock=clock).root(SpanName.TRAIN_STEP, TRAINER, ROOT)
    clock.now += 4
    span.end_in((SpanName.LOGPROB, 3.0), (SpanName.TRAIN, 3.0))
    assert {span.name: span.ended_s - span.began_s for span in spans[1:]} == {
        SpanName.TRAIN: 3.0,
        SpanName.LOGPROB: 1.0,
    }


def test_without_a_listener_nothing_is_begun_and_nothing_is_sent() -> None:
    with SILENT.root(SpanName.STEP, COORDINATOR, ROOT) as span:
        assert present() is None
        assert span.traceparent == ""
        assert SILENT.begin(SpanName.SYNC, COORDINATOR) is span is NO_SPAN
        span.note(tokens=3)
        span.link(ROOT)
        span.end_in((SpanName.TRAIN, 1.0))
    assert (NO_SPAN.attributes, NO_SPAN.links) == ({}, [])


def test_work_that_is_part_of_no_run_is_no_span() -> None:
    spans: list[Span] = []
    with Recorder(spans.append).begin(SpanName.SYNC, COORDINATOR):
        assert present() is None
    assert spans == []


async def test_tasks_stay_below_the_span_that_they_were_begun_in() -> None:
    spans: list[Span] = []
    recorder = Recorder(spans.append)

    async def receive(replica: str) -> None:
        with recorder.begin(SpanName.RECEIVE, replica):
            await asyncio.sleep(0)

    with recorder.root(SpanName.STEP, COORDINATOR, ROOT):
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
        with recorder.root(SpanName.CALL, TRAINER, ROOT):
            yield 1

    numbers = stream()
    assert await asyncio.create_task(anext(numbers)) == 1  # type: ignore[arg-type]  # a coroutine, whatever stubs say
    await asyncio.create_task(numbers.aclose())  # type: ignore[arg-type]
    assert [span.error for span in spans] == ["GeneratorExit"]
    assert present() is None


async def test_a_call_goes_on_where_its_caller_is() -> None:
    spans: list[Span] = []

    async def handle() -> None:
        continue_from("nonsense")
        continue_from(ROOT.traceparent)
        Recorder(spans.append).begin(SpanName.LOAD, "gen-0").end()

    await asyncio.create_task(handle())
    assert [span.parent for span in spans] == [SpanContext(ROOT.trace_id, ROOT.span_id)], "of a step it knows nothing"
    assert present() is None


def test_the_clock_shows_unix_seconds_and_never_steps_back() -> None:
    clock = UnixClock()
    times = [clock() for _ in range(100)]
    assert times == sorted(times)
    assert times[0] > 1.7e9, "seconds since 1970, and this was written in 2026"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
def test_a_traceparent_says_which_span(trace_id: int, span_id: int) -> None:
    assert SpanContext.parse(SpanContext(trace_id, span_id).traceparent) == SpanContext(trace_id, span_id)


HEX = st.text("0123456789abcdefABCDEF", max_size=40)


@given(st.one_of(st.text(), st.lists(HEX, max_size=6).map("-".join)))
def test_what_is_no_traceparent_names_no_span_and_is_no_error(text: str) -> None:
    found = SpanContext.parse(text)
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
def test_what_the_standard_forbids_is_passed_over(text: str) -> None:
    assert SpanContext.parse(text) is None


def test_a_later_version_of_the_header_is_read_as_far_as_it_is_known() -> None:
    text = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more"
    assert SpanContext.parse(text) == SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
