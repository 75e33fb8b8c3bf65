"""Simulates a scenario with and without its speculation: step time, exposed generation, GPU-hours, price.

Called by `search`, `pages.maps` and `specrl simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean

import numpy as np

from specrl.errors import raise_problems
from specrl.formats.calibration import RunCalibration
from specrl.simulator.costs.interface import CostModel
from specrl.simulator.costs.measured import MeasuredCosts
from specrl.simulator.costs.memory import GpuMemory, estimate_gpu_memory, find_memory_problems
from specrl.simulator.costs.pace import PaceTable, build_pace_table
from specrl.simulator.costs.roofline import RooflineCosts
from specrl.simulator.pipeline import PHASES, PipelineSimulation, SimulationTrace
from specrl.simulator.scenarios.hardware import GPUS
from specrl.simulator.scenarios.lengths import (
    NAMED_LENGTHS,
    LengthDistribution,
    LengthModel,
    MeasuredGroups,
    log_normal,
)
from specrl.simulator.scenarios.models import MODELS, ModelShape, read_shape
from specrl.simulator.scenarios.rules import find_rule_problems
from specrl.simulator.scenarios.scenario import Mechanism, Scenario, Speculation

NO_DRAFTS: dict[str, object] = dict(Speculation())

StepProgress = Callable[[int], None]


@dataclass(frozen=True)
class PreparedScenario:
    """A scenario that passed its checks, with its costs. memory is None without GPUs, where it is not known.

    max_live: rollouts that one replica computes at once.
    """

    scenario: Scenario
    costs: CostModel
    lengths: LengthModel
    memory: GpuMemory | None
    max_live: int

    @cached_property
    def pace_table(self) -> PaceTable:
        """The seconds per token, by live batch and context."""
        return build_pace_table(self.scenario, self.costs, self.max_live)


@dataclass(frozen=True)
class StepMeans:
    """Means over the steps after the pipeline has filled. Seconds; batch_s: one step's rollouts generated alone."""

    step_s: float
    phases_s: dict[str, float]
    batch_s: float
    busy_share: float
    policy_lag_max: int

    @property
    def exposed_generation_s(self) -> float:
        return self.phases_s["generation"]


@dataclass(frozen=True)
class SimulationResult:
    """The result of simulating a scenario, beside that of the same scenario without speculation."""

    scenario: Scenario
    speculative: StepMeans
    plain: StepMeans
    trace: SimulationTrace
    memory: GpuMemory | None
    lengths_B: list[int]
    """Draft length by live batch of a replica; index 0 is not used."""
    warnings: list[str]

    @property
    def rollout_speedup(self) -> float:
        """Speed-up of generating one step's rollouts, apart from everything else."""
        return self.plain.batch_s / self.speculative.batch_s

    @property
    def step_speedup(self) -> float:
        return self.plain.step_s / self.speculative.step_s

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the whole run."""
        return self.speculative.step_s * self.run_steps * self.scenario.cluster.gpus / 3600

    @property
    def run_steps(self) -> int:
        """Steps of the whole run, including those that are not simulated."""
        return self.scenario.schedule.run_steps or self.scenario.schedule.steps

    @property
    def cost_usd(self) -> float | None:
        price = self.scenario.cluster.usd_per_gpu_hour
        return None if price is None else price * self.gpu_hours

    def as_json(self) -> dict[str, object]:
        """Return what `specrl simulate --json` prints."""
        return {
            "rolloutSpeedup": self.rollout_speedup,
            "stepSpeedup": self.step_speedup,
            "stepSeconds": self.speculative.step_s,
            "exposedGenerationSeconds": self.speculative.exposed_generation_s,
            "phaseSeconds": {phase: self.speculative.phases_s[phase] for phase in PHASES},
            "notes": self.warnings,
        }


def prepare_scenario(scenario: Scenario, calibration: RunCalibration | None = None) -> PreparedScenario:
    """Check a scenario and derive its costs. Raises SpecInvalid with every problem."""
    raise_problems(find_rule_problems(scenario, has_calibration=calibration is not None))
    lengths = _build_lengths(scenario)
    seats = min(scenario.engine.max_live_rollouts, scenario.max_rollouts)
    if scenario.cluster.gpu is None:
        assert calibration is not None  # rules.py
        return PreparedScenario(scenario, MeasuredCosts(calibration, scenario), lengths, None, seats)
    gpu = GPUS[scenario.cluster.gpu]
    shape = _find_shape(scenario)
    memory = estimate_gpu_memory(scenario, shape, gpu, lengths.mean_tokens)
    raise_problems(find_memory_problems(scenario, memory))
    # Memory follows from the shape in any case; a calibration replaces the seconds.
    costs: CostModel = RooflineCosts(scenario, shape, gpu)
    if calibration is not None:
        costs = MeasuredCosts(calibration, scenario)
    return PreparedScenario(scenario, costs, lengths, memory, min(seats, memory.max_live))


def simulate_scenario(
    scenario: Scenario, calibration: RunCalibration | None = None, tick: StepProgress | None = None
) -> SimulationResult:
    """Simulate a scenario, and the same without speculation. Raises SpecInvalid with every problem.

    tick: called with the number of each simulated step.
    """
    prepared = prepare_scenario(scenario, calibration)
    plain = prepare_scenario(scenario.with_fields(speculation=NO_DRAFTS), calibration)
    trace = simulate_events(prepared, tick)
    mine = average_steps(prepared, trace)
    is_plain = scenario.speculation.mechanism is Mechanism.NONE
    theirs = mine if is_plain else average_steps(plain, simulate_events(plain, tick))
    warnings = find_warnings(prepared)
    return SimulationResult(scenario, mine, theirs, trace, prepared.memory, prepared.pace_table.lengths_B, warnings)


def simulate_events(prepared: PreparedScenario, tick: StepProgress | None = None) -> SimulationTrace:
    """Simulate the events of one run."""
    return PipelineSimulation(prepared.scenario, prepared.costs, prepared.pace_table, prepared.lengths, tick).run()


def simulate_means(scenario: Scenario, calibration: RunCalibration | None) -> StepMeans:
    """Simulate a run and return its means. Raises SpecInvalid where the scenario is impossible."""
    prepared = prepare_scenario(scenario, calibration)
    return average_steps(prepared, simulate_events(prepared))


def average_steps(prepared: PreparedScenario, trace: SimulationTrace) -> StepMeans:
    """Average over the steps after the pipeline has filled.

    It fills within maxPolicyLag + 1 steps; these are left out, but at most half of all steps.
    """
    steps = trace.steps
    lag = prepared.scenario.schedule.max_policy_lag
    kept = steps[min(lag + 1 if lag else 0, len(steps) // 2) :]
    return StepMeans(
        step_s=fmean(step.wall_s for step in kept),
        phases_s={phase: fmean(step.phases[phase] for step in kept) for phase in PHASES},
        batch_s=fmean(step.phases["generation"] for step in kept) if lag == 0 else batch_s(prepared),
        busy_share=fmean(step.busy_share for step in kept),
        policy_lag_max=max(step.policy_lag_max for step in steps),
    )


def batch_s(prepared: PreparedScenario, batches: int = 3) -> float:
    """Return the seconds in which the replicas generate one step's rollouts, from none to the last.

    This is the mean of `batches` batches.
    """
    # With lag 0, generation starts from nothing in every step and nothing runs beside it.
    alone = prepared.scenario.with_fields(schedule={"max_policy_lag": 0, "steps": batches}).without_failures()
    trace = PipelineSimulation(alone, prepared.costs, prepared.pace_table, prepared.lengths).run()
    return fmean(step.phases["generation"] for step in trace.steps)


def _find_shape(scenario: Scenario) -> ModelShape:
    model = scenario.model
    return MODELS[model.name] if model.name is not None else _read_shape(Path(str(model.path)))


_read_shape = lru_cache(maxsize=8)(read_shape)  # a search prepares hundreds of scenarios of one model


def _build_lengths(scenario: Scenario) -> LengthModel:
    work = scenario.workload
    if work.groups is not None:
        return MeasuredGroups(work.groups, work.max_tokens)
    if work.quantiles is not None:
        return LengthDistribution(np.asarray(work.quantiles), work.group_correlation, work.max_tokens)
    median, sigma = NAMED_LENGTHS[work.named] if work.named is not None else (work.median_tokens, work.sigma)
    assert median is not None  # rules.py
    assert sigma is not None
    return log_normal(median, sigma, work.max_tokens, work.group_correlation)


def find_warnings(prepared: PreparedScenario) -> list[str]:
    """Return what a reader must know to judge this result."""
    scenario = prepared.scenario
    found = []
    engine = scenario.engine
    gpu = scenario.cluster.gpu
    if isinstance(prepared.costs, RooflineCosts) and gpu is not None and not GPUS[gpu].is_compared:
        found.append(
            f"no published run on {gpu} was compared: its costs come from its data sheet alone, so expect larger "
            "errors than docs/simulator.md shows"
        )
    scheduled = min(engine.max_live_rollouts, scenario.max_replica_rollouts)
    if prepared.memory is not None and prepared.max_live < scheduled:
        found.append(
            f"memory is the bottleneck: a replica's KV cache holds {prepared.max_live} rollouts of mean length, "
            f"but {scheduled} would be scheduled on it"
        )
    k = scenario.speculation.draft_tokens
    live = min(prepared.max_live, scenario.max_replica_rollouts)
    together = math.ceil(live / scenario.layout.attention_groups)  # rollouts of one engine process
    if engine.capture_tokens is not None and k and together * (k + 1) > engine.capture_tokens and gpu:
        found.append(
            f"CUDA graphs cover {engine.capture_tokens} query tokens, but {together} live rollouts x (k + 1) are "
            f"{together * (k + 1)}; set engine.captureTokens to that"
        )
    if isinstance(prepared.costs, MeasuredCosts):
        found += prepared.costs.list_extrapolations(live)
    return found
