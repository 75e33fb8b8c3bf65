"""The numbers of the heatmaps: speed-ups over (k, acceptance), and seconds of a step over (split, lag)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from specrl.coordinator.calibration import Calibration
from specrl.errors import SpecInvalid
from specrl.simulator.scenario import Mechanism, Scenario
from specrl.simulator.search import SHARES
from specrl.simulator.simulate import NO_DRAFTS, batch_s, means, prepare, run

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
CHANCES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
LAGS = (0, 1, 2, 3)

Map = list[list[float | None]]
Tick = Callable[[], None]


def over_acceptance(scenario: Scenario, calibration: Calibration | None, tick: Tick) -> Map:
    """Rollout speed-up by chance that a token is accepted (rows) and k (columns)."""
    plain = batch_s(prepare(scenario.with_(speculation=NO_DRAFTS), calibration), batches=1)
    mechanism = scenario.speculation.mechanism
    kind = Mechanism.EAGLE3 if mechanism is Mechanism.NONE else mechanism
    found: Map = []
    for chance in CHANCES:
        row: list[float | None] = []
        for k in LENGTHS:
            how = {"mechanism": kind, "k": k, "acceptance_length": None, "chances": (chance,), "is_adaptive": False}
            row.append(_or_none(partial(_speedup, plain, scenario.with_(speculation=how), calibration)))
            tick()
        found.append(row)
    return found


def over_splits(scenario: Scenario, calibration: Calibration | None, tick: Tick) -> Map:
    """Seconds of a step by policy lag (rows) and the share of GPUs that generate (columns)."""
    total, size = scenario.cluster.gpus, scenario.layout.gpus_per_replica
    found: Map = []
    if total < 2 * size:  # one replica and nobody to train: nothing to split
        return [[None] * len(SHARES) for _ in LAGS]
    for lag in LAGS:
        row: list[float | None] = []
        for share in SHARES:
            generating = int(np.clip(round(share * total / size), 1, total // size - 1)) * size
            split = {"colocated": False, "generation_gpus": generating, "training_gpus": total - generating}
            other = scenario.with_(layout=split, schedule={"max_policy_lag": lag, "steps": 2 * (lag + 2)}).alone()
            row.append(_or_none(partial(_step_s, other, calibration)))
            tick()
        found.append(row)
    return found


def _speedup(plain_s: float, scenario: Scenario, calibration: Calibration | None) -> float:
    return plain_s / batch_s(prepare(scenario, calibration), batches=1)


def _step_s(scenario: Scenario, calibration: Calibration | None) -> float:
    prepared = prepare(scenario, calibration)
    return means(prepared, run(prepared)).step_s


def _or_none(compute: Callable[[], float]) -> float | None:
    try:
        return compute()
    except SpecInvalid:  # it does not fit: an empty cell
        return None
