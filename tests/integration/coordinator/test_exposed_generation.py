"""A trainer and an engine of known pace expose and hide the seconds of generation that arithmetic says.

The real loop, on a clock that stands still until trainer and engine both have the work that they can have.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from tests.integration.coordinator.small_run import VOCAB, RecordingBackend, Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.coordinator.observe.rljob_status import build_rljob_status
from specrl.coordinator.schedule.scheduler import SlotId
from specrl.generation.engine import LoadTiming
from specrl.records import Batch, Prompt, Reward, Rollout, RolloutRequest, TrainMetrics, WeightChecksums
from specrl.spec import RunSpec, parse_spec

GENERATION_S = 2.0
TRAINING_S = 1.0
STEPS = 4


@dataclass
class PacedClock:
    """A clock that only moves to the end of a work that is in progress. ends: when each ends, and how to end it."""

    now: float = 100.0
    ends: dict[str, tuple[float, Callable[[], None]]] = field(default_factory=dict)

    def __call__(self) -> float:
        return self.now

    def begin_work(self, name: str, seconds: float, end: Callable[[], None]) -> None:
        self.ends[name] = (self.now + seconds, end)

    def end_next_work(self) -> None:
        name, (moment, end) = min(self.ends.items(), key=lambda item: item[1][0])
        del self.ends[name]
        self.now = moment
        end()


class PacedEngine(TableEngine):
    """Generates the rollouts of one step in GENERATION_S, and loads weights in `load_s`."""

    def __init__(self, name: str, clock: PacedClock, spec: RunSpec, load_s: float) -> None:
        super().__init__(name, seed=7, shape=TableShape(VOCAB, 128))
        self._clock = clock
        self._load_s = load_s
        self._wanted = spec.schedule.prompts_per_step * spec.schedule.group_size
        self._waiting: list[asyncio.Event] = []
        self.generated = 0  # steps

    async def _sample_rollout(self, request: RolloutRequest) -> Rollout:
        assert SlotId.from_name(request.rollout_id) is not None, "neither canary nor validation"
        rollout = await super()._sample_rollout(request)
        finished = asyncio.Event()
        self._waiting.append(finished)
        if len(self._waiting) == self._wanted:
            self._clock.begin_work("generation", GENERATION_S, self._finish_step)
        await finished.wait()
        return rollout

    def _finish_step(self) -> None:
        self.generated += 1
        waiting = self._waiting
        self._waiting = []
        for finished in waiting:
            finished.set()

    async def load_weights(self, sent: WeightChecksums) -> LoadTiming:
        self._clock.now += self._load_s
        return await super().load_weights(sent)


class PacedBackend(RecordingBackend):
    """Trains a step in TRAINING_S."""

    def __init__(self, trained: list[Batch], clock: PacedClock) -> None:
        super().__init__(trained)
        self._clock = clock

    def train_step(self, batch: Batch) -> TrainMetrics:
        metrics: TrainMetrics = super().train_step(batch)
        finished = threading.Event()
        self._clock.begin_work("training", TRAINING_S, finished.set)
        finished.wait()
        return metrics.model_copy(update={"logprob_seconds": 0.0, "train_seconds": TRAINING_S})


class PacedGrader:
    """Grades the rollouts of one step together, in `seconds`."""

    def __init__(self, clock: PacedClock, spec: RunSpec, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._wanted = spec.schedule.prompts_per_step * spec.schedule.group_size
        self._waiting: list[asyncio.Event] = []
        self.begun = 0  # steps
        self.graded = 0

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        graded = asyncio.Event()
        self._waiting.append(graded)
        if len(self._waiting) == self._wanted:
            self.begun += 1
            waiting = self._waiting
            self._waiting = []
            self._clock.begin_work(f"grading-{self.begun}", self._seconds, lambda: self._finish_step(waiting))
        await graded.wait()
        return Reward(float(len(text) % 2))

    def _finish_step(self, waiting: list[asyncio.Event]) -> None:
        self.graded += 1
        for graded in waiting:
            graded.set()


async def advance_clock(
    run: Run, clock: PacedClock, engine: PacedEngine, lag: int, grader: PacedGrader | None = None
) -> None:
    """Advance the clock whenever trainer, engine and grader have begun all work that they can begin at this moment."""
    while not run.running.done():
        await asyncio.sleep(0.001)
        reported = len(run.observer.read_reports())
        may_generate = engine.generated < min(STEPS, reported + 1 + lag)
        may_train = reported < (engine.generated if grader is None else grader.graded)
        has_begun = ("generation" in clock.ends or not may_generate) and ("training" in clock.ends or not may_train)
        has_begun = has_begun and (grader is None or grader.begun == engine.generated)
        if clock.ends and has_begun:
            clock.end_next_work()


def paced_spec(folder: Path, lag: int, name: str) -> RunSpec:
    base = a_spec(folder, steps=STEPS, maxPolicyLag=lag).model_dump(mode="json", by_alias=True)
    base["name"] = name
    base["generation"] |= {"replicas": 1, "maxLiveRollouts": 12, "speculation": {"none": {}}}
    base |= {"validation": None, "canary": {"everySteps": 0}, "checkpoint": {"everySteps": 100}}
    return parse_spec(base)


@dataclass(frozen=True)
class Seconds:
    """Seconds of generation of each step."""

    exposed: list[float]
    under_way: list[float]
    hidden: list[float]


SYNCHRONOUS = Seconds(exposed=[2, 2, 2, 2], under_way=[2, 2, 2, 2], hidden=[0, 0, 0, 0])
# The first step waits for its whole generation. While the last one is trained, nothing is left to generate.
OVERLAPPED = Seconds(exposed=[2, 1, 1, 1], under_way=[3, 2, 2, 1], hidden=[1, 1, 1, 0])


@pytest.mark.parametrize(
    ("lag", "load_s", "wanted"),
    [
        (0, 0.0, SYNCHRONOUS),
        (1, 0.0, OVERLAPPED),
        (0, 0.5, SYNCHRONOUS),  # weight sync is the phase prepare, and no part of exposed generation
    ],
)
async def test_exposed_and_hidden_generation_follow_from_the_paces(
    tmp_path: Path, lag: int, load_s: float, wanted: Seconds
) -> None:
    spec = paced_spec(tmp_path, lag, f"paced-{lag}-{load_s}".replace(".", "-"))
    clock = PacedClock()
    engine = PacedEngine("gen-0", clock, spec, load_s)
    run = Run(
        tmp_path,
        spec,
        make_engine=lambda _: engine,
        make_backend=lambda trained: PacedBackend(trained, clock),
        clock=clock,
        started=("gen-0",),
    )
    async with run:
        advancing = asyncio.create_task(advance_clock(run, clock, engine, lag))
        await run.finish()
        await advancing
        reports = run.observer.read_reports()
        assert [report.exposed_generation for report in reports] == wanted.exposed
        assert [report.generation_under_way for report in reports] == wanted.under_way
        assert [report.hidden_generation for report in reports] == wanted.hidden
        assert [report.phases.train for report in reports] == [TRAINING_S] * STEPS
        assert [report.phases.prepare for report in reports] == [load_s] * STEPS
        assert [r.phases.wall_seconds for r in reports] == [waited + TRAINING_S + load_s for waited in wanted.exposed]

        progress = build_rljob_status(run.observer.build_status(), reports, spec.placement)["progress"]
        assert progress["exposedGenerationSeconds"] == f"{wanted.exposed[-1]:.2f}"
        assert progress["generationUnderWaySeconds"] == f"{wanted.under_way[-1]:.2f}"
        assert progress["hiddenGenerationSeconds"] == f"{wanted.hidden[-1]:.2f}"
        assert progress["weightSyncSeconds"] == f"{load_s:.2f}"

        def counted(name: str) -> float | None:
            return REGISTRY.get_sample_value(f"specrl_coordinator_{name}_seconds_total", {"rljob": spec.name})

        assert (counted("generation_under_way"), counted("hidden_generation")) == (
            sum(wanted.under_way),
            sum(wanted.hidden),
        )
        summary = run.observer.build_status().summary
        assert summary is not None
        assert (summary.exposed_generation, summary.hidden_generation) == (sum(wanted.exposed), sum(wanted.hidden))
        assert (summary.generation_under_way, summary.weight_sync_seconds) == (sum(wanted.under_way), load_s * STEPS)
        recent = run.observer.measure_recent_exposure()
        assert recent.generation_under_way == pytest.approx(sum(wanted.under_way) / STEPS)
        assert recent.hidden_generation == pytest.approx(sum(wanted.hidden) / STEPS)


@pytest.mark.parametrize(
    ("lag", "sampling", "grading"),
    [
        (0, [2, 2, 2, 2], [3, 3, 3, 3]),
        # Steps 2 and 4 are sampled while the step before them is graded, and graded while it is trained.
        (1, [2, 0, 0, 0], [3, 1, 3, 1]),
    ],
)
async def test_a_slow_verifier_is_not_booked_as_slow_generation(
    tmp_path: Path, lag: int, sampling: list[float], grading: list[float]
) -> None:
    """A verifier that hung until its time limit looked like an engine that is too slow."""
    spec = paced_spec(tmp_path, lag, f"graded-{lag}")
    clock = PacedClock()
    engine = PacedEngine("gen-0", clock, spec, 0.0)
    grader = PacedGrader(clock, spec, 3.0)
    run = Run(
        tmp_path,
        spec,
        grader=grader,
        make_engine=lambda _: engine,
        make_backend=lambda trained: PacedBackend(trained, clock),
        clock=clock,
        started=("gen-0",),
    )
    async with run:
        advancing = asyncio.create_task(advance_clock(run, clock, engine, lag, grader))
        await run.finish()
        await advancing
        causes = [report.exposed_by_cause for report in run.observer.read_reports()]
    assert [found["grading"] for found in causes] == grading
    assert [found["bufferWait"] for found in causes] == sampling
