"""Computes the numbers of the heatmaps: speed-up over (k, acceptance), and seconds per step over (split, lag).

Called by `specrl simulate --out`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from specrl.errors import SpecInvalid
from specrl.formats.calibration import RunCalibration
from specrl.simulator.scenarios.scenario import Mechanism, Scenario
from specrl.simulator.search import GENERATION_SHARES
from specrl.simulator.simulate import NO_DRAFTS, batch_s, prepare_scenario, simulate_means

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)  # draft lengths k
CHANCES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)  # of a drafted token to be accepted
LAGS = (0, 1, 2, 3)  # policy lags, in steps

CellValues = list[list[float | None]]
CellProgress = Callable[[], None]


def map_acceptance(scenario: Scenario, calibration: RunCalibration | None, tick: CellProgress) -> CellValues:
    """Return the speed-up of rollouts by the chance that a token is accepted (rows) and k (columns).

    tick: called after every cell.
    """
    plain = batch_s(prepare_scenario(scenario.with_fields(speculation=NO_DRAFTS), calibration), batches=1)
    mechanism = scenario.speculation.mechanism
    kind = Mechanism.EAGLE3 if mechanism is Mechanism.NONE else mechanism

    def compute_speedup(chance: float, k: int) -> float:
        how = {"mechanism": kind, "k": k, "acceptance_length": None, "chances": (chance,), "is_adaptive": False}
        return plain / batch_s(prepare_scenario(scenario.with_fields(speculation=how), calibration), batches=1)

    return _compute_cells(CHANCES, LENGTHS, compute_speedup, tick)


def map_splits(scenario: Scenario, calibration: RunCalibration | None, tick: CellProgress) -> CellValues:
    """Return the seconds of a step by policy lag (rows) and the share of GPUs that generate (columns)."""
    total = scenario.cluster.gpus
    size = scenario.layout.gpus_per_replica
    if total < 2 * size:  # one replica would leave no GPUs for training
        return [[None] * len(GENERATION_SHARES) for _ in LAGS]

    def compute_step_s(lag: int, share: float) -> float:
        generating = int(np.clip(round(share * total / size), 1, total // size - 1)) * size
        split = {"colocated": False, "generation_gpus": generating, "training_gpus": total - generating}
        schedule = {"max_policy_lag": lag, "steps": 2 * (lag + 2)}
        other = scenario.with_fields(layout=split, schedule=schedule).without_failures()
        return simulate_means(other, calibration).step_s

    return _compute_cells(LAGS, GENERATION_SHARES, compute_step_s, tick)


def _compute_cells[R, C](
    rows: Sequence[R], columns: Sequence[C], compute: Callable[[R, C], float], tick: CellProgress
) -> CellValues:
    found: CellValues = [[None] * len(columns) for _ in rows]
    for values, row in zip(found, rows, strict=True):
        for place, column in enumerate(columns):
            with suppress(SpecInvalid):  # a layout that does not fit stays an empty cell
                values[place] = compute(row, column)
            tick()
    return found
