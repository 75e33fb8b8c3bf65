"""Finds the best layout of the same cluster: splits, policy lags and widths, each simulated, with k chosen by batch.

The search leaves out what the simulator cannot judge. More policy lag costs learning, so it recommends no more lag than
the run has, or than the user allows. The GPUs are those of the cluster. With a calibration on processors only the lag
varies: how a trainer's seconds scale with its ranks was not measured. Called by `specrl plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from specrl.errors import SpecInvalid
from specrl.formats.calibration import RunCalibration
from specrl.simulator.costs.pace import solve_constant_chance
from specrl.simulator.scenarios.scenario import Mechanism, Scenario
from specrl.simulator.simulate import PreparedScenario, StepMeans, find_warnings, prepare_scenario, simulate_means

# Shares of the GPUs that generate, in layouts where generation and training have GPUs of their own.
GENERATION_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

# Degrees of tensor parallelism, in GPUs.
TENSOR_WIDTHS = (1, 2, 4, 8)

# Longest draft that is considered, in tokens, unless the scenario itself drafts more.
MAX_DRAFT_LENGTH = 8

# Draws of lengths and efficiencies for the uncertainty of the gain. Each costs two simulations.
GAIN_DRAWS = 8

# Relative standard deviations of efficiencies: about what separates one good software stack from another.
EFFICIENCY_DEVIATIONS = {
    "memory_bandwidth": 0.1,
    "flops": 0.15,
    "train_flops": 0.2,
    "train_flops_experts": 0.3,
    "host_step_ms": 0.3,
    "host_sequence_us": 0.3,
    "kv_reread_share": 0.3,
    "eager_us_per_layer": 0.3,
    "prepare_s": 0.3,
}

SearchProgress = Callable[[int, int], None]
"""Called with the number of layouts tried and the number of all layouts."""


@dataclass(frozen=True)
class TriedLayout:
    """A layout that was simulated: its scenario and means."""

    scenario: Scenario
    means: StepMeans


@dataclass(frozen=True)
class LayoutAdvice:
    """The recommended layout, its gain, and its bottleneck. Gains are today's step time over the recommended one's."""

    today: TriedLayout
    best: TriedLayout
    layouts_tried: int
    layouts_impossible: int
    draft_lengths: list[tuple[int, int, int]]
    """(smallest live batch of a replica, largest, tokens drafted)."""
    gain: float
    gain_low: float
    gain_high: float
    bottleneck: str
    shares: dict[str, float]
    """Share of each phase in the recommended step."""
    capture_tokens: int | None
    """Query tokens that CUDA graphs should cover; None without GPUs or speculation."""
    warnings: list[str]
    """Notes that a reader needs to judge the recommended layout."""

    def as_json(self) -> dict[str, object]:
        """Return what `specrl plan --json` prints."""
        best = self.best.scenario
        layout = best.layout
        return {
            "draftLengths": [{"from": low, "to": high, "k": k} for low, high, k in self.draft_lengths],
            "generationGpus": layout.generation_gpus,
            "trainingGpus": layout.training_gpus,
            "colocated": layout.colocated,
            "maxPolicyLag": best.schedule.max_policy_lag,
            "replicas": layout.replica_count,
            "tensorParallel": layout.tensor_parallel,
            "captureTokens": self.capture_tokens,
            "stepSeconds": self.best.means.step_s,
            "gain": self.gain,
            "gainP10": self.gain_low,
            "gainP90": self.gain_high,
            "binds": self.bottleneck,
            "layoutsTried": self.layouts_tried,
            "notes": self.warnings,
        }


def find_best_layout(
    scenario: Scenario,
    calibration: RunCalibration | None = None,
    max_lag: int | None = None,
    tick: SearchProgress | None = None,
    *,
    can_colocate: bool = True,
) -> LayoutAdvice:
    """Simulate every layout and return the best. Raises SpecInvalid when today's own layout is impossible.

    max_lag: largest policy lag to consider; None: that of the scenario. can_colocate: whether generation and training
    may share GPUs, which specrl's own runs never do.
    """
    today = _with_few_steps(scenario)
    now = TriedLayout(today, simulate_means(today, calibration))
    if max_lag is None:
        max_lag = scenario.schedule.max_policy_lag
    allowed = _with_lag(today, min(max_lag, today.schedule.max_policy_lag))
    candidates = list(_candidate_layouts(allowed, max_lag, can_colocate=can_colocate))
    tried: list[TriedLayout] = []
    for number, candidate in enumerate(candidates, 1):
        with suppress(SpecInvalid):  # the layout breaks a rule or does not fit into memory
            tried.append(TriedLayout(candidate, simulate_means(candidate, calibration)))
        if tick is not None:
            tick(number, len(candidates))
    impossible = len(candidates) - len(tried)
    if not tried:  # no layout has room for the longest draft considered; today's has room for its own
        tried.append(TriedLayout(allowed, simulate_means(allowed, calibration)))
    best = min(tried, key=lambda one: one.means.step_s)
    prepared = prepare_scenario(best.scenario, calibration)
    low, high = _gain_quantiles(today, best.scenario, calibration)
    lengths: list[tuple[int, int, int]] = []
    # Index 0 stands for no live rollout and is left out.
    for live, k in enumerate(prepared.pace_table.lengths_B[1:], 1):
        first = lengths.pop()[0] if lengths and lengths[-1][2] == k else live
        lengths.append((first, live, k))
    groups = best.scenario.layout.attention_groups
    longest = max((math.ceil(last / groups) * (k + 1) for _, last, k in lengths if k), default=None)
    return LayoutAdvice(
        today=now,
        best=best,
        layouts_tried=len(candidates),
        layouts_impossible=impossible,
        draft_lengths=lengths,
        gain=now.means.step_s / best.means.step_s,
        gain_low=low,
        gain_high=high,
        bottleneck=_find_bottleneck(prepared, best.means),
        shares={phase: value / best.means.step_s for phase, value in best.means.phases_s.items()},
        capture_tokens=longest if scenario.cluster.gpu is not None else None,
        warnings=find_warnings(prepared),
    )


def _with_few_steps(scenario: Scenario) -> Scenario:
    """Simulate as few steps as possible: twice as many as fill the pipeline. More steps change the means little."""
    return scenario.with_fields(schedule={"steps": 2 * (scenario.schedule.max_policy_lag + 2)})


def _with_lag(scenario: Scenario, lag: int) -> Scenario:
    return _with_few_steps(scenario.with_fields(schedule={"max_policy_lag": lag}))


def _candidate_layouts(today: Scenario, max_lag: int, *, can_colocate: bool) -> Iterator[Scenario]:
    """Yield today's layout with k chosen by batch, then every other layout that the GPUs allow."""
    speculation = today.speculation
    changes: dict[str, object] = {}
    if speculation.mechanism is not Mechanism.NONE:
        changes = {"is_adaptive": True, "k": max(MAX_DRAFT_LENGTH, speculation.k)}
        if speculation.acceptance_length is not None:
            # It holds for one k only, so use the same chance at all positions instead.
            chance = solve_constant_chance(speculation.acceptance_length, speculation.k)
            changes |= {"acceptance_length": None, "chances": (chance,)}
    adaptive = today.with_fields(speculation=changes)
    yield adaptive
    total = today.cluster.gpus
    if today.cluster.gpu is None:
        for lag in range(max_lag + 1):
            yield _with_lag(adaptive, lag)
        return
    for width in TENSOR_WIDTHS:
        # Experts are divided among whole groups of tensor parallelism, so the width must divide expert parallelism.
        if today.layout.expert_parallel > 1 and today.layout.expert_parallel % width:
            continue
        wide = adaptive.with_fields(layout={"tensor_parallel": width})
        size = wide.layout.gpus_per_replica
        if can_colocate:
            together = {"colocated": True, "generation_gpus": total, "training_gpus": total}
            # The GPUs take turns, so no rollout can be sampled while the trainer works.
            yield _with_lag(wide.with_fields(layout=together), 0)
        for share in GENERATION_SHARES:
            generating = round(share * total / size) * size  # whole replicas only
            if not 0 < generating < total:
                continue
            split = {"colocated": False, "generation_gpus": generating, "training_gpus": total - generating}
            # With GPUs of its own, generation gains from lag 1. So lag 0 is tried only where 1 is not allowed.
            for lag in range(min(1, max_lag), max_lag + 1):
                yield _with_lag(wide.with_fields(layout=split), lag)


def _gain_quantiles(today: Scenario, best: Scenario, calibration: RunCalibration | None) -> tuple[float, float]:
    """Return p10 and p90 of the gain over other draws of lengths and of a roofline's efficiencies."""
    random = np.random.default_rng(today.schedule.seed)
    gains = []
    for draw in range(GAIN_DRAWS):
        how = {}
        for name, sigma in EFFICIENCY_DEVIATIONS.items():
            value = getattr(today.efficiency, name) * float(np.exp(sigma * random.standard_normal()))  # log-normal
            # Shares of a published figure cannot exceed 1.
            how[name] = min(1.0, value) if name.endswith(("bandwidth", "flops", "experts", "share")) else value
        seed = {"seed": today.schedule.seed + 1 + draw}
        drawn = [one.with_fields(efficiency=how, schedule=seed) for one in (today, best)]
        before_s, after_s = [simulate_means(one, calibration).step_s for one in drawn]
        gains.append(before_s / after_s)
    low, high = np.quantile(gains, [0.1, 0.9])
    return float(low), float(high)


def _find_bottleneck(prepared: PreparedScenario, found: StepMeans) -> str:
    """Return what limits the step: a faster one of these would shorten the step most."""
    phases = found.phases_s
    parts = {
        "trainer": phases["logprob"] + phases["train"] + phases["data"],
        "generation": phases["generation"],
        "sync": phases["prepare"],
    }
    binding = max(parts, key=lambda name: parts[name])
    scenario = prepared.scenario
    per_replica = -(-scenario.schedule.rollouts_per_step // scenario.layout.replica_count)
    wanted = min(scenario.engine.max_live_rollouts, per_replica)
    # Generation is limited by memory when the KV cache holds fewer rollouts than a replica would be given.
    return "memory" if binding == "generation" and prepared.max_live < wanted else binding
