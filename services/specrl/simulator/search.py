"""The best layout of the same cluster: splits, lags and widths, each simulated, with k chosen by the batch.

What is not searched is what the simulator cannot judge: more policy lag costs learning, so no more of it is recommended
than the run has, or than is allowed; GPUs are those of the cluster. With a calibration of processors alone the layout
stays: how a trainer's seconds scale with its ranks was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from specrl.coordinator.calibration import Calibration
from specrl.errors import SpecInvalid
from specrl.simulator.scenario import Mechanism, Scenario
from specrl.simulator.simulate import Means, Prepared, means, prepare, run

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of the GPUs that generate."""

WIDTHS = (1, 2, 4, 8)
"""GPUs of tensor parallelism."""

MOST_DRAFTED = 8

DRAWS = 8
"""Of lengths and efficiencies, for the uncertainty of the gain."""

DOUBT = {
    "memory_bandwidth": 0.1,
    "flops": 0.15,
    "train_flops": 0.2,
    "train_flops_experts": 0.3,
    "host_step_ms": 0.3,
    "host_sequence_us": 0.3,
    "speculation_step_ms": 0.3,
    "draft_pass_ms": 0.3,
    "eager_us_per_layer": 0.3,
    "prepare_s": 0.3,
}
"""Standard deviations of efficiencies, as shares of themselves: about what separates one good stack from another."""

Tick = Callable[[int, int], None]
"""Called with layouts tried, and how many there are."""


@dataclass(frozen=True)
class Tried:
    """One layout: its scenario and means; None where it is impossible."""

    scenario: Scenario
    means: Means | None


@dataclass(frozen=True)
class Advice:
    """What to change, what it brings, what then binds. Gains: today's step over the recommended one."""

    today: Tried
    best: Tried
    tried: list[Tried]
    draft_lengths: list[tuple[int, int, int]]
    """(first live batch of a replica, last, tokens drafted)."""
    gain: float
    gain_low: float
    gain_high: float
    binds: str
    shares: dict[str, float]
    """Of the recommended step, by stage."""
    capture_tokens: int | None
    """Query tokens that CUDA graphs should cover; None without speculation."""

    def as_json(self) -> dict[str, object]:
        """What `specrl plan --json` prints."""
        best, layout = self.best.scenario, self.best.scenario.layout
        assert self.best.means is not None
        return {
            "draft_lengths": [{"from": low, "to": high, "k": k} for low, high, k in self.draft_lengths],
            "generation_gpus": layout.generation_gpus,
            "training_gpus": layout.training_gpus,
            "colocated": layout.colocated,
            "max_policy_lag": best.schedule.max_policy_lag,
            "replicas": layout.replicas,
            "tensor_parallel": layout.tensor_parallel,
            "capture_tokens": self.capture_tokens,
            "step_s": self.best.means.step_s,
            "gain": self.gain,
            "gain_p10": self.gain_low,
            "gain_p90": self.gain_high,
            "binds": self.binds,
            "layouts_tried": len(self.tried),
        }


def search(
    scenario: Scenario, calibration: Calibration | None = None, max_lag: int | None = None, tick: Tick | None = None
) -> Advice:
    """Try every layout. Raises SpecInvalid when today's own is impossible."""
    today = _with_steps(scenario)
    now = Tried(today, _means(prepare(today, calibration)))
    candidates = list(_candidates(today, scenario.schedule.max_policy_lag if max_lag is None else max_lag))
    tried: list[Tried] = []
    for candidate in candidates:
        tried.append(_try(candidate, calibration))
        if tick is not None:
            tick(len(tried), len(candidates))
    best = min(tried, key=lambda one: one.means.step_s if one.means is not None else float("inf"))
    assert best.means is not None  # today's layout is among the candidates
    prepared = prepare(best.scenario, calibration)
    low, high = _doubt(today, best.scenario, calibration)
    lengths = [(*_ends(run_), k) for k, run_ in groupby(enumerate(prepared.pace.lengths_B), lambda it: it[1])]
    lengths = [(max(1, first), last, k) for first, last, k in lengths if last >= 1]
    longest = max((last * (k + 1) for _, last, k in lengths if k), default=None)
    assert now.means is not None
    return Advice(
        today=now,
        best=best,
        tried=tried,
        draft_lengths=lengths,
        gain=now.means.step_s / best.means.step_s,
        gain_low=low,
        gain_high=high,
        binds=_binds(prepared, best.means),
        shares={stage: value / best.means.step_s for stage, value in best.means.stages_s.items()},
        capture_tokens=longest if scenario.cluster.gpu is not None else None,
    )


def _ends(batches: Iterator[tuple[int, int]]) -> tuple[int, int]:
    found = [place for place, _ in batches]
    return found[0], found[-1]


def _with_steps(scenario: Scenario) -> Scenario:
    """Few steps say as much as many, once the pipeline is full."""
    return scenario.with_(schedule={"steps": 2 * (scenario.schedule.max_policy_lag + 2)})


def _candidates(today: Scenario, max_lag: int) -> Iterator[Scenario]:
    """Today's layout with k by the batch, and every other that the GPUs allow."""
    speculation = today.speculation
    changes: dict[str, object] = {}
    if speculation.mechanism is not Mechanism.NONE:
        reach = {"is_adaptive": True}
        if speculation.chances is not None:
            changes = reach | {"k": max(MOST_DRAFTED, speculation.k)}
        else:
            changes = _as_chance(today) | reach
    adaptive = today.with_(speculation=changes)
    yield adaptive
    total = today.cluster.gpus
    if today.cluster.gpu is None:
        for lag in range(max_lag + 1):
            yield _with_steps(adaptive.with_(schedule={"max_policy_lag": lag}))
        return
    widths = [
        width for width in WIDTHS if today.layout.expert_parallel == 1 or today.layout.expert_parallel % width == 0
    ]
    for width in widths:
        layout = today.layout.model_copy(update={"tensor_parallel": width})
        step = layout.gpus_per_replica
        together = {"tensor_parallel": width, "colocated": True, "generation_gpus": total, "training_gpus": total}
        yield _with_steps(adaptive.with_(layout=together, schedule={"max_policy_lag": 0}))
        for share in SHARES:
            generating = round(share * total / step) * step
            if not 0 < generating < total:
                continue
            split = {
                "tensor_parallel": width,
                "colocated": False,
                "generation_gpus": generating,
                "training_gpus": total - generating,
            }
            for lag in range(1, max_lag + 1):
                yield _with_steps(adaptive.with_(layout=split, schedule={"max_policy_lag": lag}))


def _as_chance(today: Scenario) -> dict[str, object]:
    from specrl.simulator.acceptance import constant_chance

    speculation = today.speculation
    assert speculation.acceptance_length is not None  # rules.py
    chance = constant_chance(speculation.acceptance_length, speculation.k)
    return {"k": max(MOST_DRAFTED, speculation.k), "acceptance_length": None, "chances": (chance,)}


def _try(scenario: Scenario, calibration: Calibration | None) -> Tried:
    try:
        return Tried(scenario, _means(prepare(scenario, calibration)))
    except SpecInvalid:
        return Tried(scenario, None)


def _means(prepared: Prepared) -> Means:
    return means(prepared, run(prepared))


def _doubt(today: Scenario, best: Scenario, calibration: Calibration | None) -> tuple[float, float]:
    """p10 and p90 of the gain over other lengths and, where a roofline is used, other efficiencies."""
    random = np.random.default_rng(today.schedule.seed)
    gains = []
    for draw in range(DRAWS):
        how = {
            name: min(1.0, value) if name.endswith(("bandwidth", "flops", "experts")) else value
            for name, value in (
                (name, getattr(today.efficiency, name) * float(np.exp(sigma * random.standard_normal())))
                for name, sigma in DOUBT.items()
            )
        }
        seconds = []
        for scenario in (today, best):
            other = scenario.with_(efficiency=how, schedule={"seed": today.schedule.seed + 1 + draw})
            seconds.append(_means(prepare(other, calibration)).step_s)
        gains.append(seconds[0] / seconds[1])
    low, high = np.quantile(gains, [0.1, 0.9])
    return float(low), float(high)


def _binds(prepared: Prepared, found: Means) -> str:
    """What a faster one of would shorten the step most."""
    stages = found.stages_s
    parts = {
        "trainer": stages["logprob"] + stages["train"] + stages["data"],
        "generation": stages["generation"],
        "sync": stages["prepare"],
    }
    binding = max(parts, key=lambda name: parts[name])
    scenario = prepared.scenario
    rollouts = scenario.schedule.prompts_per_step * scenario.schedule.group_size
    wanted = min(scenario.engine.max_live_rollouts, -(-rollouts // scenario.layout.replicas))
    return "memory" if binding == "generation" and prepared.max_live < wanted else binding
