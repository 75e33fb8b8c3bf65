"""One scenario, with its speculation and without: what a step takes, what of it is exposed, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean

import numpy as np

from specrl.coordinator.calibration import Calibration
from specrl.errors import SpecInvalid
from specrl.simulator.costs import Costs
from specrl.simulator.hardware import GPUS
from specrl.simulator.lengths import Distribution, Groups, Lengths, log_normal
from specrl.simulator.measured import MeasuredCosts
from specrl.simulator.memory import Memory, memory_of, memory_problems
from specrl.simulator.models import MODELS, ModelShape, read_shape
from specrl.simulator.pace import Pace, pace_of
from specrl.simulator.pipeline import STAGES, Pipeline, Trace
from specrl.simulator.roofline import Roofline
from specrl.simulator.rules import problems
from specrl.simulator.scenario import Mechanism, Scenario, Speculation
from specrl.simulator.workloads import NAMED

NO_DRAFTS: dict[str, object] = dict(Speculation())

Tick = Callable[[int], None]


@dataclass(frozen=True)
class Prepared:
    """A scenario that holds together, with what it costs. memory None: without GPUs that is not known."""

    scenario: Scenario
    costs: Costs
    lengths: Lengths
    memory: Memory | None
    max_live: int

    @cached_property
    def pace(self) -> Pace:
        """Seconds for a token, by live batch and context."""
        return pace_of(self.scenario, self.costs, self.max_live)


@dataclass(frozen=True)
class Means:
    """Means over the steps after the pipeline has filled. Seconds; batch_s: one step's rollouts generated alone."""

    step_s: float
    stages_s: dict[str, float]
    batch_s: float
    busy_share: float
    policy_lag_max: int

    @property
    def exposed_generation_s(self) -> float:
        return self.stages_s["generation"]


@dataclass(frozen=True)
class Outcome:
    """A scenario beside itself without speculation."""

    scenario: Scenario
    speculative: Means
    plain: Means
    trace: Trace
    memory: Memory | None
    lengths_B: list[int]
    """Draft length by live batch of a replica; index 0 is not used."""
    warnings: list[str]

    @property
    def rollout_speedup(self) -> float:
        """Of generating one step's rollouts, everything else aside."""
        return self.plain.batch_s / self.speculative.batch_s

    @property
    def step_speedup(self) -> float:
        return self.plain.step_s / self.speculative.step_s

    @property
    def gpu_hours(self) -> float:
        """Of the whole run."""
        return self.speculative.step_s * self.run_steps * self.scenario.cluster.gpus / 3600

    @property
    def run_steps(self) -> int:
        """Steps of the whole run, simulated or not."""
        return self.scenario.schedule.run_steps or self.scenario.schedule.steps

    @property
    def usd(self) -> float | None:
        price = self.scenario.cluster.usd_per_gpu_hour
        return None if price is None else price * self.gpu_hours

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        return {
            "rollout_speedup": self.rollout_speedup,
            "step_speedup": self.step_speedup,
            "step_s": self.speculative.step_s,
            "exposed_generation_s": self.speculative.exposed_generation_s,
            "stages_s": {stage: self.speculative.stages_s[stage] for stage in STAGES},
        }


def prepare(scenario: Scenario, calibration: Calibration | None = None) -> Prepared:
    """Check a scenario and find its costs. Raises SpecInvalid with every problem."""
    found = problems(scenario, has_calibration=calibration is not None)
    if found:
        raise SpecInvalid(tuple(found))
    lengths = _lengths(scenario)
    engine_seats = scenario.engine.max_live_rollouts
    if scenario.cluster.gpu is None:
        assert calibration is not None  # rules.py
        seats = min(engine_seats, _most_live(scenario))
        return Prepared(scenario, MeasuredCosts(calibration, scenario), lengths, None, seats)
    gpu = GPUS[scenario.cluster.gpu]
    shape = _shape(scenario)
    memory = memory_of(scenario, shape, gpu, lengths.mean)
    found = memory_problems(scenario, memory)
    if found:
        raise SpecInvalid(tuple(found))
    costs: Costs = Roofline(scenario, shape, gpu)
    if calibration is not None:
        costs = MeasuredCosts(calibration, scenario)
    seats = min(engine_seats, memory.max_live, _most_live(scenario))
    return Prepared(scenario, costs, lengths, memory, seats)


def simulate(scenario: Scenario, calibration: Calibration | None = None, tick: Tick | None = None) -> Outcome:
    """Simulate it and the same without speculation. Raises SpecInvalid with every problem."""
    prepared = prepare(scenario, calibration)
    plain = prepare(scenario.with_(speculation=NO_DRAFTS), calibration)
    trace = run(prepared, tick)
    mine = means(prepared, trace)
    is_plain = scenario.speculation.mechanism is Mechanism.NONE
    theirs = mine if is_plain else means(plain, run(plain, tick))
    warnings = _warnings(prepared)
    return Outcome(scenario, mine, theirs, trace, prepared.memory, prepared.pace.lengths_B, warnings)


def run(prepared: Prepared, tick: Tick | None = None) -> Trace:
    """The events of one run."""
    return Pipeline(prepared.scenario, prepared.costs, prepared.pace, prepared.lengths, tick).run()


def means(prepared: Prepared, trace: Trace) -> Means:
    """Over the steps after those in which the pipeline fills: maxPolicyLag + 1, but at least half of all remain."""
    steps = trace.steps
    lag = prepared.scenario.schedule.max_policy_lag
    kept = steps[min(lag + 1 if lag else 0, len(steps) // 2) :]
    return Means(
        step_s=fmean(step.seconds for step in kept),
        stages_s={stage: fmean(step.stages[stage] for step in kept) for stage in STAGES},
        batch_s=fmean(step.stages["generation"] for step in kept) if lag == 0 else batch_s(prepared),
        busy_share=fmean(step.busy_share for step in kept),
        policy_lag_max=max(step.policy_lag_max for step in steps),
    )


def batch_s(prepared: Prepared, batches: int = 3) -> float:
    """Seconds in which the replicas generate one step's rollouts from none to the last, mean of a few batches."""
    alone = prepared.scenario.with_(schedule={"max_policy_lag": 0, "steps": batches}).alone()
    trace = Pipeline(alone, prepared.costs, prepared.pace, prepared.lengths).run()
    return fmean(step.stages["generation"] for step in trace.steps)


def _shape(scenario: Scenario) -> ModelShape:
    model = scenario.model
    return MODELS[model.name] if model.name is not None else _read_shape(Path(str(model.path)))


@lru_cache(maxsize=8)
def _read_shape(folder: Path) -> ModelShape:
    return read_shape(folder)


def _lengths(scenario: Scenario) -> Lengths:
    work = scenario.workload
    if work.groups is not None:
        return Groups(work.groups, work.max_tokens)
    if work.quantiles is not None:
        return Distribution(np.asarray(work.quantiles), work.group_correlation, work.max_tokens)
    median, sigma = NAMED[work.named] if work.named is not None else (work.median_tokens, work.sigma)
    assert median is not None  # rules.py
    assert sigma is not None
    return log_normal(median, sigma, work.max_tokens, work.group_correlation)


def _most_live(scenario: Scenario) -> int:
    """Rollouts that there ever are: of the steps that may be under way together."""
    schedule = scenario.schedule
    return schedule.prompts_per_step * schedule.group_size * (schedule.max_policy_lag + 1)


def _warnings(prepared: Prepared) -> list[str]:
    """What a reader must know of this outcome."""
    scenario, found = prepared.scenario, []
    engine, speculation = scenario.engine, scenario.speculation
    if not engine.has_host_costs:
        found.append("engine.hasHostCosts is false: an ideal engine whose processor costs nothing, not a forecast")
    per_replica = -(-_most_live(scenario) // scenario.layout.replicas)
    if prepared.memory is not None and prepared.max_live < min(engine.max_live_rollouts, per_replica):
        found.append(
            f"memory binds: a replica's KV cache holds {prepared.max_live} rollouts of mean length, "
            f"{min(engine.max_live_rollouts, per_replica)} would be given to it"
        )
    k = 0 if speculation.mechanism is Mechanism.NONE else speculation.k
    live = min(prepared.max_live, per_replica)
    if engine.capture_tokens is not None and k and live * (k + 1) > engine.capture_tokens and scenario.cluster.gpu:
        found.append(
            f"CUDA graphs cover {engine.capture_tokens} query tokens, and {live} live rollouts x (k + 1) are "
            f"{live * (k + 1)}: capture that many (engine.captureTokens)"
        )
    if isinstance(prepared.costs, MeasuredCosts):
        found += prepared.costs.extrapolations(prepared.max_live if per_replica > prepared.max_live else per_replica)
    return found
