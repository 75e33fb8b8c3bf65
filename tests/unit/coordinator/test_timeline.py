"""The timeline keeps spans and load curves in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.coordinator.observe.timeline import (
    BARS_KEPT,
    CELLS,
    FIRST_CELL_S,
    LANES_KEPT,
    MAX_FILE_BYTES,
    STEPS_SEEN,
    Timeline,
)
from specrl.telemetry.spans import COORDINATOR, TRAINER, VERIFIERS, Recorder, Span, SpanContext, SpanName

BEGAN_S = 1_000_000.0


def a_span(name: SpanName, lane: str, began_s: float, ended_s: float, step: int | None = 1) -> Span:
    return Span(name, lane, BEGAN_S + began_s, BEGAN_S + ended_s, {}, SpanContext(1, 1, step))


def a_step(step: int, began_s: float, ended_s: float) -> Span:
    return a_span(SpanName.STEP, COORDINATOR, began_s, ended_s, step)


def test_a_step_is_drawn_in_lanes_with_the_trainer_first() -> None:
    timeline = Timeline()
    for span in (
        a_span(SpanName.ROLLOUT, "gen-10", 0.0, 1.0),
        a_span(SpanName.ROLLOUT, "gen-2", 0.0, 2.0),
        a_span(SpanName.REWARD, VERIFIERS, 1.0, 1.5),
        a_span(SpanName.COLLECT, COORDINATOR, 0.0, 2.0),
        a_span(SpanName.TRAIN, TRAINER, 2.0, 3.0),
        a_span(SpanName.SYNC, COORDINATOR, 3.0, 3.5),
        a_step(1, 0.0, 4.0),
    ):
        timeline(span)
    found = timeline.build_report(1, 1, 4)
    assert found.lanes == [TRAINER, COORDINATOR, VERIFIERS, "gen-2", "gen-10"]
    drawn = [(found.lanes[lane], found.names[name], began, ended) for lane, name, _, began, ended, _ in found.bars]
    assert drawn == [(TRAINER, "collect", 0, 2000), (TRAINER, "train", 2000, 3000), (COORDINATOR, "sync", 3000, 3500)]
    assert found.busy["gen-2"] == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=0.05)
    assert [step.step for step in found.steps] == [1]


def test_a_resumed_run_shows_the_steps_from_before_it(tmp_path: Path) -> None:
    """The timeline of a resumed run began empty, although its curves had all steps."""
    file = tmp_path / "timeline.jsonl"
    first = Timeline(file)
    for step in range(1, STEPS_SEEN + 3):
        first(a_span(SpanName.TRAIN, TRAINER, 4.0 * step, 4.0 * step + 3.0, step))
        first(a_step(step, 4.0 * step, 4.0 * step + 4.0))
    resumed = Timeline(file)
    expected = first.build_report(STEPS_SEEN + 2, STEPS_SEEN, 4)
    assert resumed.build_report(STEPS_SEEN + 2, 100, 4) == expected
    resumed(a_step(STEPS_SEEN + 3, 1000.0, 1004.0))
    assert [step.step for step in Timeline(file).build_report(100, 2, 4).steps][:2] == [STEPS_SEEN + 2, STEPS_SEEN + 3]


TOO_LARGE = pytest.param(bytes(MAX_FILE_BYTES + 1), id="too large")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"step": 1}', b'{"step": 1, "began', b"\xff", TOO_LARGE])
def test_a_damaged_timeline_counts_as_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "timeline.jsonl"
    file.write_bytes(content)
    timeline = Timeline(file)
    assert timeline.build_report(1, 1, 4).steps == []
    timeline(a_step(1, 0.0, 4.0))
    assert [step.step for step in Timeline(file).build_report(1, 1, 4).steps] == [1]


def test_a_file_that_could_not_be_read_at_the_start_keeps_its_steps(tmp_path: Path) -> None:
    """It counted as empty, so the next step replaced it."""
    file = tmp_path / "timeline.jsonl"
    first = Timeline(file)
    for step in (1, 2):
        first(a_span(SpanName.TRAIN, TRAINER, 4.0 * step, 4.0 * step + 3.0, step))
        first(a_step(step, 4.0 * step, 4.0 * step + 4.0))
    aside = file.rename(tmp_path / "aside")
    file.symlink_to(file)  # cannot be read: a link to itself
    resumed = Timeline(file)
    resumed(a_step(3, 12.0, 16.0))
    file.unlink()
    aside.rename(file)
    resumed(a_span(SpanName.TRAIN, TRAINER, 16.0, 19.0, 4))
    resumed(a_step(4, 16.0, 20.0))
    for timeline in (resumed, Timeline(file)):
        found = timeline.build_report(4, 100, 4)
        assert [step.step for step in found.steps] == [1, 2, 3, 4]
        assert [bar[2] for bar in found.bars] == [1, 2, 4]


def test_a_step_appends_a_line_and_the_file_is_bounded(tmp_path: Path) -> None:
    """The whole file was written after each step, in the event loop."""
    file = tmp_path / "timeline.jsonl"
    timeline = Timeline(file)
    timeline(a_step(1, 4.0, 8.0))
    inode = file.stat().st_ino
    for step in range(2, 2 * STEPS_SEEN + 1):
        timeline(a_step(step, 4.0 * step, 4.0 * step + 4.0))
    assert file.stat().st_ino == inode, "appended to, not replaced"
    assert len(file.read_text().splitlines()) == 2 * STEPS_SEEN
    timeline(a_step(2 * STEPS_SEEN + 1, 1000.0, 1004.0))
    assert len(file.read_text().splitlines()) == STEPS_SEEN


def test_concurrent_rollouts_are_counted() -> None:
    timeline = Timeline()
    for sample in range(3):
        timeline(a_span(SpanName.ROLLOUT, "gen-0", 0.0, 1.0 + sample))
    timeline(a_step(1, 0.0, 4.0))
    assert timeline.build_report(1, 1, 4).busy["gen-0"] == pytest.approx([3.0, 2.0, 1.0, 0.0], abs=0.1)


def test_open_spans_are_shown_until_they_end() -> None:
    now = [BEGAN_S]
    timeline = Timeline()
    recorder = Recorder(timeline, clock=lambda: now[0])
    timeline.set_recorder(recorder)
    step = recorder.begin_root(SpanName.STEP, COORDINATOR, SpanContext(1, 1, 1))
    collecting = recorder.begin_span(SpanName.COLLECT, COORDINATOR, step.context)
    rollout = recorder.begin_span(SpanName.ROLLOUT, "gen-0", step.context)
    now[0] += 2.0
    found = timeline.build_report(None, 4, 4)
    assert [(bar[3:5], bar[5]) for bar in found.bars] == [((0, 2000), True)]
    assert found.busy["gen-0"][-1] == 1.0
    assert [(it.step, it.ended_s) for it in found.steps] == [(1, None)]
    for span in (rollout, collecting, step):
        span.end()
    now[0] += 2.0
    assert [bar[5] for bar in timeline.build_report(None, 4, 4).bars] == [False]
    assert not recorder.open


def test_an_earlier_window_contains_nothing_of_later_steps() -> None:
    timeline = Timeline()
    for step in range(1, 10):
        timeline(a_span(SpanName.TRAIN, TRAINER, step + 0.25, step + 0.75, step))
        timeline(a_step(step, step, step + 1.0))
    found = timeline.build_report(4, 2, 10)
    assert [it.step for it in found.steps] == [3, 4]
    assert {bar[2] for bar in found.bars} == {3, 4}
    assert found.ended_s == BEGAN_S + 5.0


def test_long_steps_make_cells_coarser_and_lose_no_work() -> None:
    timeline = Timeline()
    long_s = 3600.0
    for step in range(1, STEPS_SEEN + 5):
        timeline(a_span(SpanName.ROLLOUT, "gen-0", step * long_s, (step + 0.5) * long_s, step))
        timeline(a_step(step, step * long_s, (step + 1) * long_s))
    found = timeline.build_report(None, STEPS_SEEN, 2 * STEPS_SEEN)
    assert found.ended_s == 0.0, "no recorder was set"
    found = timeline.build_report(STEPS_SEEN + 4, 4, 8)
    assert found.busy["gen-0"] == pytest.approx([1.0, 0.0] * 4, abs=0.05)


def test_a_first_step_of_hours_is_shown_in_full_while_it_runs() -> None:
    """Cells were made coarser only when a step ended: of a first step, the load of the last 163 s was kept."""
    now = [BEGAN_S]
    timeline = Timeline()
    recorder = Recorder(lambda _: None, clock=lambda: now[0])
    timeline.set_recorder(recorder)
    recorder.begin_root(SpanName.STEP, COORDINATOR, SpanContext(1, 1, 1))
    recorder.begin_span(SpanName.COLLECT, COORDINATOR, SpanContext(1, 1, 1))
    for minute in range(240):
        timeline(a_span(SpanName.ROLLOUT, "gen-0", 60.0 * minute, 60.0 * (minute + 1)))
    now[0] += 4 * 3600.0
    assert timeline.build_report(None, 4, 8).busy["gen-0"] == pytest.approx([1.0] * 8, abs=0.05)


def test_a_gap_of_days_before_a_resume_costs_neither_memory_nor_detail(tmp_path: Path) -> None:
    """A report allocated a number per cell of the time that it spans, and 62 hours are 11 million cells per lane.

    The page asks for a report every second.
    """
    file = tmp_path / "timeline.jsonl"
    Timeline(file)(a_step(1, 0.0, 4.0))
    gap_s = 62 * 3600.0
    now = [BEGAN_S + gap_s]
    timeline = Timeline(file)
    recorder = Recorder(timeline, clock=lambda: now[0])
    timeline.set_recorder(recorder)
    step = recorder.begin_root(SpanName.STEP, COORDINATOR, SpanContext(1, 1, 2))
    for replica in range(4):
        timeline(a_span(SpanName.ROLLOUT, f"gen-{replica}", gap_s, gap_s + 2.0))
        recorder.begin_span(SpanName.ROLLOUT, f"gen-{replica}", step.context)
    now[0] += 4.0
    tracemalloc.start()
    found = timeline.build_report(None, 4, 300)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20
    interval_s = (found.ended_s - found.began_s) / 300
    for replica in range(4):
        assert sum(found.busy[f"gen-{replica}"]) * interval_s == pytest.approx(2.0 + 4.0, abs=0.05 * interval_s)
    step.end()
    assert timeline.build_report(2, 1, 4).steps[0].step == 2
    assert timeline._cell_s == FIRST_CELL_S, "the gap has no load, so it needs no cells"


def test_memory_is_bounded() -> None:
    timeline = Timeline()
    for number in range(LANES_KEPT + 10):
        timeline(a_span(SpanName.ROLLOUT, f"gen-{number}", 0.0, 1.0))
    for number in range(BARS_KEPT + 10):
        timeline(a_span(SpanName.COMMIT, "gen-0", number, number + 1.0))
    assert len(timeline._busy) == LANES_KEPT
    assert "gen-0" not in timeline._busy, "the least recently used lane is dropped"
    assert len(timeline._bars) == BARS_KEPT


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 60)), min_size=1, max_size=30))
def test_the_cells_sum_to_the_work_that_was_done(rollouts: list[tuple[float, float]]) -> None:
    timeline = Timeline()
    for began_s, seconds in rollouts:
        timeline(a_span(SpanName.ROLLOUT, "gen-0", began_s, began_s + seconds))
    assert CELLS * FIRST_CELL_S > 160, "the cells span all of it"
    found = float(timeline._busy["gen-0"].cells.sum()) * FIRST_CELL_S
    assert found == pytest.approx(sum(seconds for _, seconds in rollouts), abs=1e-3 * len(rollouts) + 1e-3)
