"""Every part of every step has a finished span below its step, and no span contains text of a prompt."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from tests.integration.coordinator.small_run import LengthGrader, Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.telemetry.spans import COORDINATOR, TRAINER, VERIFIERS, Span, SpanName

STEPS = 6
PROMPTS = 3
GROUP = 4
ROOTS = (SpanName.START, SpanName.STEP, SpanName.FINISH)


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[Span]:
    """The spans of one run of six steps on two replicas."""
    found: list[Span] = []
    folder = tmp_path_factory.mktemp("spans")

    async def run_it() -> None:
        async with Run(folder, a_spec(folder), sinks=[found.append]) as run:
            await run.finish()

    asyncio.run(run_it())
    return found


def of(spans: list[Span], name: SpanName) -> list[Span]:
    return [span for span in spans if span.name is name]


def test_every_span_but_a_root_has_a_finished_parent(spans: list[Span]) -> None:
    by_context = {span.context: span for span in spans}
    assert len(by_context) == len(spans), "no two spans have the same ids"
    for span in spans:
        assert (span.parent is None) is (span.name in ROOTS)
        assert span.parent is None or span.parent in by_context, span
        assert span.began_s <= span.ended_s
        assert span.error == ""


def test_every_step_is_one_trace(spans: list[Span]) -> None:
    steps = of(spans, SpanName.STEP)
    assert [span.step for span in steps] == list(range(1, STEPS + 1))
    assert len({span.context.trace_id for span in spans}) == STEPS + 2, "and one each for the start and the finish"
    for step in steps:
        names = Counter(span.name for span in spans if span.context.trace_id == step.context.trace_id)
        assert names[SpanName.PROMPT] == PROMPTS
        validated = 4 if step.step in (3, 6) else 0
        assert names[SpanName.REWARD] == PROMPTS * GROUP + validated
        assert {names[name] for name in (SpanName.COLLECT, SpanName.TRAIN_STEP, SpanName.SYNC, SpanName.CANARY)} == {1}
        assert {names[name] for name in (SpanName.LOGPROB, SpanName.TRAIN, SpanName.BROADCAST)} == {1}
        assert {names[name] for name in (SpanName.RECEIVE, SpanName.COMMIT, SpanName.PAUSE, SpanName.LOAD)} == {2}


def test_every_rollout_is_in_its_replicas_lane_below_its_prompt(spans: list[Span]) -> None:
    prompts = {span.context: span for span in of(spans, SpanName.PROMPT)}
    rollouts = [span for span in of(spans, SpanName.ROLLOUT) if span.parent in prompts]
    assert len(rollouts) == STEPS * PROMPTS * GROUP
    assert {span.lane for span in rollouts} == {"gen-0", "gen-1"}
    for span in rollouts:
        assert span.parent is not None
        prompt = prompts[span.parent]
        assert str(span.attributes["rollout"]).startswith(str(prompt.attributes["prompt"]))
        assert prompt.began_s <= span.began_s <= span.ended_s <= prompt.ended_s
        assert int(span.attributes["tokens"]) > 0


def test_every_process_has_a_lane(spans: list[Span]) -> None:
    assert {span.lane for span in spans} == {COORDINATOR, TRAINER, VERIFIERS, "gen-0", "gen-1"}
    assert {span.lane for span in of(spans, SpanName.TRAIN)} == {TRAINER}


def test_waiting_and_work_of_a_step_do_not_overlap(spans: list[Span]) -> None:
    for step in of(spans, SpanName.STEP):
        order = [SpanName.COLLECT, SpanName.LOGPROB, SpanName.TRAIN, SpanName.BROADCAST, SpanName.CANARY]
        found = [next(span for span in of(spans, name) if span.step == step.step) for name in order]
        times = [time for span in found for time in (span.began_s, span.ended_s)]
        assert [step.began_s, *times, step.ended_s] == sorted([step.began_s, *times, step.ended_s])


def test_validations_checkpoints_and_the_drafters_initialisation_have_spans(spans: list[Span]) -> None:
    assert [span.attributes["policy_version"] for span in of(spans, SpanName.VALIDATION)] == [0, 3, 6]
    assert [span.step for span in of(spans, SpanName.CHECKPOINT)] == [0, 2, 4, 6]
    assert [span.step for span in of(spans, SpanName.DRAFTER)] == [0]
    assert [span.lane for span in of(spans, SpanName.EXPORT)] == [TRAINER]


def test_no_attribute_quotes_a_prompt_or_a_completion(spans: list[Span]) -> None:
    known = {"rollout", "prompt", "policy_version", "tokens", "finish_reason", "rollouts"}
    assert {name for span in spans for name in span.attributes} <= known | {"size_bytes", "retries"}


async def test_a_lost_rollout_ends_its_span_and_gets_another_elsewhere(tmp_path: Path) -> None:
    spans: list[Span] = []
    slow = TableShape(32, 128, 0.01)
    async with Run(
        tmp_path,
        a_spec(tmp_path, steps=3),
        make_engine=lambda name: TableEngine(name, seed=7, shape=slow),
        sinks=[spans.append],
    ) as run:
        await run.until(lambda: run.registry.replicas["gen-1"].inflight > 0 if run.trained else False)
        await run.replicas["gen-1"].kill()
        await run.finish()
    lost = [span for span in of(spans, SpanName.ROLLOUT) if span.error]
    assert lost
    assert {(span.lane, span.error) for span in lost} <= {("gen-1", "PeerUnavailable"), ("gen-1", "EngineFailed")}
    for span in lost:
        again = [
            other
            for other in of(spans, SpanName.ROLLOUT)
            if other.attributes["rollout"] == span.attributes["rollout"] and not other.error
        ]
        assert [other.parent for other in again] == [span.parent], "under the same prompt"
        assert again[0].began_s >= span.ended_s
        assert again[0].context != span.context


async def test_a_failed_verdict_is_the_error_of_its_span(tmp_path: Path) -> None:
    spans: list[Span] = []
    grader = LengthGrader(fails=lambda call: 5 <= call <= 12)  # four of these may belong to the first validation
    async with Run(tmp_path, a_spec(tmp_path, steps=2), grader=grader, sinks=[spans.append]) as run:
        await run.finish()
    assert {span.error for span in of(spans, SpanName.REWARD)} == {"", "ungraded"}


async def test_a_restarted_coordinator_continues_the_trace_of_its_step(tmp_path: Path) -> None:
    spans: list[Span] = []
    async with Run(tmp_path, a_spec(tmp_path), sinks=[spans.append]) as run:
        await run.until(lambda: len(run.trained) >= 3)
        await run.restart_coordinator()
        await run.finish()
    assert [span.step for span in of(spans, SpanName.STEP)] == list(range(1, STEPS + 1)), "each ended once"
    assert len(of(spans, SpanName.START)) == 2
    contexts = [span.context for span in spans]
    assert len(set(contexts)) == len(contexts)
    assert [span for span in spans if span.parent is not None and span.parent not in set(contexts)] == []
