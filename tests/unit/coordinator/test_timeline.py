"""What the timeline keeps of a run: enough to see who waited for whom, in a memory that does not grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.coordinator.timeline import BARS_KEPT, CELLS, FIRST_CELL_S, LANES_KEPT, STEPS_SEEN, Timeline
from specrl.telemetry.spans import COORDINATOR, TRAINER, VERIFIERS, Recorder, Span, SpanContext, SpanName

BEGAN_S = 1_000_000.0


def a_span(name: SpanName, lane: str, began_s: float, ended_s: float, step: int | None = 1) -> Span:
    return Span(name, lane, step, BEGAN_S + began_s, BEGAN_S + ended_s, {}, SpanContext(1, 1, step))


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
    found = timeline.report(1, 1, 4)
    assert found.lanes == [TRAINER, COORDINATOR, VERIFIERS, "gen-2", "gen-10"]
    drawn = [(found.lanes[lane], found.names[name], began, ended) for lane, name, _, began, ended, _ in found.bars]
    assert drawn == [(TRAINER, "collect", 0, 2000), (TRAINER, "train", 2000, 3000), (COORDINATOR, "sync", 3000, 3500)]
    assert found.busy["gen-2"] == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=0.05)
    assert [step.step for step in found.steps] == [1]


def test_rollouts_under_way_at_once_are_counted() -> None:
    timeline = Timeline()
    for sample in range(3):
        timeline(a_span(SpanName.ROLLOUT, "gen-0", 0.0, 1.0 + sample))
    timeline(a_step(1, 0.0, 4.0))
    assert timeline.report(1, 1, 4).busy["gen-0"] == pytest.approx([3.0, 2.0, 1.0, 0.0], abs=0.1)


def test_what_is_under_way_is_shown_until_it_ends() -> None:
    now = [BEGAN_S]
    timeline = Timeline()
    recorder = Recorder(timeline, clock=lambda: now[0])
    timeline.ask(recorder)
    step = recorder.root(SpanName.STEP, COORDINATOR, SpanContext(1, 1, 1))
    collecting = recorder.begin(SpanName.COLLECT, COORDINATOR, step.context)
    rollout = recorder.begin(SpanName.ROLLOUT, "gen-0", step.context)
    now[0] += 2.0
    found = timeline.report(None, 4, 4)
    assert [(bar[3:5], bar[5]) for bar in found.bars] == [((0, 2000), True)]
    assert found.busy["gen-0"][-1] == 1.0
    assert [(it.step, it.ended_s) for it in found.steps] == [(1, None)]
    for span in (rollout, collecting, step):
        span.end()
    now[0] += 2.0
    assert [bar[5] for bar in timeline.report(None, 4, 4).bars] == [False]
    assert not recorder.open


def test_an_earlier_window_holds_nothing_of_the_steps_after_it() -> None:
    timeline = Timeline()
    for step in range(1, 10):
        timeline(a_span(SpanName.TRAIN, TRAINER, step + 0.25, step + 0.75, step))
        timeline(a_step(step, step, step + 1.0))
    found = timeline.report(4, 2, 10)
    assert [it.step for it in found.steps] == [3, 4]
    assert {bar[2] for bar in found.bars} == {3, 4}
    assert found.ended_s == BEGAN_S + 5.0


def test_long_steps_make_cells_coarser_and_lose_no_work() -> None:
    timeline, long_s = Timeline(), 3600.0
    for step in range(1, STEPS_SEEN + 5):
        timeline(a_span(SpanName.ROLLOUT, "gen-0", step * long_s, (step + 0.5) * long_s, step))
        timeline(a_step(step, step * long_s, (step + 1) * long_s))
    found = timeline.report(None, STEPS_SEEN, 2 * STEPS_SEEN)
    assert found.ended_s == 0.0, "nobody was asked for the time"
    found = timeline.report(STEPS_SEEN + 4, 4, 8)
    assert found.busy["gen-0"] == pytest.approx([1.0, 0.0] * 4, abs=0.05)


def test_memory_is_bounded() -> None:
    timeline = Timeline()
    for number in range(LANES_KEPT + 10):
        timeline(a_span(SpanName.ROLLOUT, f"gen-{number}", 0.0, 1.0))
    for number in range(BARS_KEPT + 10):
        timeline(a_span(SpanName.COMMIT, "gen-0", number, number + 1.0))
    assert len(timeline._busy) == LANES_KEPT
    assert "gen-0" not in timeline._busy, "the one that was silent for longest is forgotten"
    assert len(timeline._bars) == BARS_KEPT


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 60)), min_size=1, max_size=30))
def test_the_work_in_all_cells_is_the_work_that_was_done(rollouts: list[tuple[float, float]]) -> None:
    timeline = Timeline()
    for began_s, seconds in rollouts:
        timeline(a_span(SpanName.ROLLOUT, "gen-0", began_s, began_s + seconds))
    assert CELLS * FIRST_CELL_S > 160, "all of it is within reach"
    found = float(timeline._busy["gen-0"].cells.sum()) * FIRST_CELL_S
    assert found == pytest.approx(sum(seconds for _, seconds in rollouts), abs=1e-3 * len(rollouts) + 1e-3)
