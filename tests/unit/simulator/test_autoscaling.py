"""Autoscaling of replicas does not oscillate, whatever a step takes. The whole loop is simulated:

    step times of `specrl simulate` -> DemandMeter -> the operator's HPA -> replicas, which take minutes to start

The HPA's object is the operator's own, and the metric the coordinator's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tests.unit.operator.builders import ClusterFacts, a_job, plan_job
from tests.unit.simulator.horizontal_autoscaler import SYNC_S, HorizontalAutoscaler
from tests.unit.simulator.scenarios import a_scenario

from specrl.coordinator.observe.exposure import DemandMeter
from specrl.simulator.pipeline import SimulationTrace
from specrl.simulator.simulate import prepare_scenario, simulate_events
from specrl_operator.children.autoscaler import HEADROOM, build_autoscaler, find_target

START_S = 400.0  # until a new replica serves: loading an engine, and the weights
STEPS = 12  # that are simulated for each number of replicas, and then repeated
MOST = 16
# An engine and a trainer of fixed pace. A new calibration of the planner does not change what is tested here.
PACE = (
    "engine.overlapsHost=false",
    "efficiency.hostStepMs=10",
    "efficiency.hostSequenceUs=80",
    "efficiency.kvRereadShare=0",
    "efficiency.eagerUsPerLayer=800",
    "efficiency.trainFlops=0.27",
    "efficiency.prepareS=1.5",
)


class StepTimes(NamedTuple):
    """Seconds of one step."""

    wall_s: float
    exposed_s: float
    under_way_s: float


class Workload(NamedTuple):
    """Overrides of a scenario. begins: replicas at the start. target_percent: of exposed generation."""

    overrides: tuple[str, ...]
    begins: int
    lag: int = 1
    target_percent: int = 10


MANY = ("schedule.promptsPerStep=128", "schedule.groupSize=16", "workload.sigma=0.6")
SHORT = (*MANY, "workload.medianTokens=150", "workload.maxTokens=1000")
MINUTES = (*MANY, "workload.medianTokens=1500", "workload.maxTokens=6000")
HOUR = (*MANY, "schedule.promptsPerStep=256", "workload.medianTokens=9000", "workload.maxTokens=32000")
WORKLOADS = {
    "half a minute": Workload(SHORT, 1),
    "minutes": Workload(MINUTES, 1),
    "minutes, with too many replicas": Workload(MINUTES, 16),
    "an hour": Workload(HOUR, 2),
    "an hour, with too many replicas": Workload(HOUR, 16),
    "few long rollouts": Workload(("workload.medianTokens=1000", "workload.sigma=1.4", "workload.maxTokens=32000"), 8),
    "in turns": Workload((*MINUTES, "schedule.maxPolicyLag=0"), 1, lag=0, target_percent=60),
}


@cache
def step_times(overrides: tuple[str, ...], replicas: int) -> tuple[StepTimes, ...]:
    """Simulate a scenario with so many replicas of one GPU. Returns its steps but the first two and the last
    two: the pipeline fills, and at the end nothing is left to generate.
    """
    gpus = (f"layout.generationGpus={replicas}", f"cluster.gpus={replicas + 8}", f"schedule.steps={STEPS}")
    trace = simulate_events(prepare_scenario(a_scenario(*PACE, *overrides, *gpus)))
    return tuple(
        StepTimes(step.wall_s, step.phases["generation"], under_way_s(trace, step.began_s, step.began_s + step.wall_s))
        for step in trace.steps[2:-2]
    )


def under_way_s(trace: SimulationTrace, began_s: float, ended_s: float) -> float:
    """Return the seconds of a span in which at least one rollout was live."""
    live: dict[int, int] = {}
    total = 0.0
    changes = [*trace.live, (ended_s, -1, 0)]
    for (at_s, replica, count), (next_s, _, _) in itertools.pairwise(changes):
        live[replica] = count
        if any(live.values()):
            total += max(0.0, min(next_s, ended_s) - max(at_s, began_s))
    return total


class Measured(NamedTuple):
    """What the coordinator exports: its demand, and the exposed percentage of the last steps."""

    demand: float | None
    exposed_percent: float


def scale(
    workload: Workload, spec: dict[str, Any], read: Callable[[Measured], float | None]
) -> list[tuple[int, float]]:
    """Simulate 60 steps under an autoscaler. Returns the replicas and the exposed share of each step."""
    autoscaler = HorizontalAutoscaler(spec)
    meter = DemandMeter()
    wanted = workload.begins
    serving = wanted
    starting: list[float] = []  # times at which new replicas begin to serve
    now_s = 0.0
    found: list[tuple[int, float]] = []
    metric: float | None = None
    recent: list[StepTimes] = []
    for number in range(60):
        times = step_times(workload.overrides, serving)
        step = times[number % len(times)]
        for sync_s in _list_syncs(now_s, now_s + step.wall_s):
            before = wanted
            wanted = autoscaler.sync(sync_s, wanted, metric)
            starting += [sync_s + START_S] * (wanted - before)
            for _ in range(before - wanted):  # the highest replica, which may be starting
                if starting:
                    starting.pop()
        now_s += step.wall_s
        found.append((serving, step.exposed_s / step.wall_s))
        phases = SimpleNamespace(wall_seconds=step.wall_s, generation=step.exposed_s)
        meter.add_step(SimpleNamespace(phases=phases, generation_under_way=step.under_way_s), serving)  # type: ignore[arg-type]
        recent = [*recent[-3:], step]
        exposed = sum(it.exposed_s for it in recent) / sum(it.wall_s for it in recent)
        metric = read(Measured(meter.demand, 100 * exposed))
        starting = [at_s for at_s in starting if at_s > now_s]
        serving = wanted - len(starting)
    return found


def _list_syncs(began_s: float, ended_s: float) -> Iterator[float]:
    first = int(began_s // SYNC_S) + 1
    return (number * SYNC_S for number in range(first, int(ended_s // SYNC_S) + 1))


def count_reversals(replicas: list[int]) -> int:
    """Count how often a series turns from growing to shrinking, or back."""
    changes = [after - before for before, after in itertools.pairwise(replicas) if after != before]
    return sum((one > 0) != (two > 0) for one, two in itertools.pairwise(changes))


def the_autoscaler(workload: Workload) -> dict[str, Any]:
    """Return the spec of the operator's HorizontalPodAutoscaler."""
    job = a_job(
        {
            "generation": {"autoscaling": {"maxReplicas": MOST, "targetExposedPercent": workload.target_percent}},
            "schedule": {"maxPolicyLag": workload.lag},
        }
    )
    wanted = job.spec.generation.autoscaling
    assert wanted is not None
    spec: dict[str, Any] = build_autoscaler(plan_job(job, ClusterFacts()), wanted)["spec"]
    return spec


@pytest.mark.parametrize("name", WORKLOADS)
def test_replicas_settle(name: str) -> None:
    workload = WORKLOADS[name]
    found = scale(workload, the_autoscaler(workload), lambda measured: measured.demand)
    replicas = [count for count, _ in found]
    assert count_reversals(replicas) <= 1, replicas
    assert len(set(replicas[40:])) == 1, replicas
    exposed = sum(share for _, share in found[40:]) / 20
    settled = replicas[-1]
    target = workload.target_percent / 100
    assert exposed <= 1.2 * target or settled == MOST, (exposed, replicas)
    # Half as many would not do.
    fewer = step_times(workload.overrides, max(1, settled // 2))
    without = sum(step.exposed_s for step in fewer) / sum(step.wall_s for step in fewer)
    assert without > target, (without, replicas)


def test_steps_of_all_lengths_are_simulated() -> None:
    lengths = {name: step_times(load.overrides, load.begins)[0].wall_s for name, load in WORKLOADS.items()}
    assert min(lengths.values()) < 60, lengths
    assert max(lengths.values()) > 1800, lengths


def test_an_autoscaler_on_the_exposed_percentage_would_oscillate() -> None:
    """The first rule: the percentage of exposed generation against its target.

    At 0 it cannot tell how much of generation is hidden. So it removes replicas until the trainer waits, and then adds
    too many.
    """
    turns = {}
    for name, workload in WORKLOADS.items():
        spec = the_autoscaler(workload)
        target = {"type": "Value", "value": str(workload.target_percent)}
        spec["metrics"][0]["external"]["target"] = target
        found = scale(workload, spec, lambda measured: measured.exposed_percent)
        turns[name] = count_reversals([count for count, _ in found])
    assert max(turns.values()) >= 4, turns


def test_the_target_follows_from_the_share_that_training_may_wait() -> None:
    trainer_s = 90.0
    generation_s = trainer_s * find_target(10, 1) / HEADROOM
    assert (generation_s - trainer_s) / generation_s == pytest.approx(0.1)  # they overlap
    generation_s = trainer_s * find_target(10, 0)
    assert generation_s / (generation_s + trainer_s) == pytest.approx(0.1)  # they take turns
