"""Collects measurements of a run for `specrl simulate` and writes them to calibration.json after every step.

The observer calls it. `formats/calibration.py` defines the file.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import structlog

from specrl.files import write_text
from specrl.formats.calibration import (
    CALIBRATION,
    WARM_UP_STEPS,
    AloneCosts,
    RunCalibration,
    TrainedPhases,
    merge_step_costs,
)
from specrl.formats.reports import StepReport
from specrl.records import Group, StepCost
from specrl.spec import RunSpec

STEPS_KEPT = 200
"""Newest steps whose times and acceptance are kept."""

GROUPS_KEPT = 512
"""Newest groups whose rollout lengths and prompt lengths are kept."""

log = structlog.get_logger(__name__)


class CalibrationFile:
    """The calibration of one run, from this coordinator's start on. A write error is logged and does not stop the run.

    Times of the first WARM_UP_STEPS steps are dropped once there is a later step.
    """

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        self._spec = spec
        self._file = directory / CALIBRATION
        self._groups: deque[tuple[int, ...]] = deque(maxlen=GROUPS_KEPT)
        self._prompts: deque[int] = deque(maxlen=GROUPS_KEPT)
        self._steps: deque[TrainedPhases] = deque(maxlen=STEPS_KEPT)
        self._accepted: deque[list[float]] = deque(maxlen=STEPS_KEPT)
        self._decoding = _DecodingTotals()
        self._seen = 0
        self._cores: deque[_CoreUse] = deque(maxlen=STEPS_KEPT)
        self._is_behind = False

    def add_step(
        self,
        report: StepReport,
        groups: Sequence[Group],
        costs: Mapping[str, Sequence[StepCost]],
        replicas: int,
        busy_cores: tuple[float | None, float | None],
    ) -> None:
        """Add a step and write the file.

        costs: cumulative step costs by engine, including engines that are gone. replicas: how many are present.
        busy_cores: busy cores of this machine during generation and during training; None where not measured.
        """
        if self._seen == WARM_UP_STEPS:
            self._steps.clear()
            self._cores.clear()
            self._decoding.discard_steps()
        self._seen += 1
        for group in groups:
            self._groups.append(tuple(rollout.sampled_length for rollout in group.rollouts))
            self._prompts.append(len(group.prompt.token_ids))
        if report.accepted_per_position:
            self._accepted.append(report.accepted_per_position)
        sync = report.weight_sync
        self._steps.append(
            TrainedPhases(
                step=report.step,
                phases=report.phases,
                rollouts=report.rollouts,
                tokens=report.tokens,
                load_seconds=sync.get("pause", 0.0) + sync.get("resume", 0.0),
            )
        )
        # The first step warms the engines up, so its core times are not representative.
        generating, training = busy_cores
        if generating is not None and training is not None and self._decoding.is_warm:
            engines = replicas * self._spec.generation.tensor_parallel * self._spec.generation.threads
            others_s = (generating - engines) * report.phases.generation
            self._cores.append(_CoreUse(others_s, report.tokens, training))
        self._decoding.add_step(report, costs, max(1, replicas))
        self._write_file(self._build_calibration())

    def _build_calibration(self) -> RunCalibration:
        return RunCalibration(
            run=self._spec.name,
            hardware=f"{platform.machine()} {platform.processor()}".strip(),
            engine_steps=tuple(merge_step_costs(self._decoding.costs)),
            acceptance=tuple(_compute_conditional_acceptance(self._accepted)),
            draft_tokens=self._spec.generation.speculation.num_draft_tokens,
            groups=tuple(self._groups),
            prompt_tokens=float(np.mean(self._prompts)) if self._prompts else 0.0,
            alone=self._build_alone_costs(),
            steps=tuple(self._steps),
        )

    def _build_alone_costs(self) -> tuple[AloneCosts, ...]:
        # With a policy lag, generation and training overlap, and neither's cores can be told from the other's.
        starting_seconds = self._decoding.starting_seconds
        if self._spec.schedule.max_policy_lag or starting_seconds is None or not self._cores:
            return ()
        generation = self._spec.generation
        cores = self._cores
        others_s = sum(step.others_s for step in cores)
        tokens = sum(step.tokens for step in cores)
        found = AloneCosts(
            draft_tokens=generation.speculation.num_draft_tokens,
            starting_seconds=starting_seconds,
            cores=os.cpu_count() or 1,
            threads=generation.tensor_parallel * generation.threads,
            core_seconds=max(0.0, others_s) / max(1, tokens),
            cores_training=fmean(step.training for step in cores),
        )
        return (found,)

    def _write_file(self, found: RunCalibration) -> None:
        try:
            write_text(self._file, found.model_dump_json(by_alias=True))
        except OSError as error:
            if not self._is_behind:
                log.warning("calibration_not_written", reason=str(error))
            self._is_behind = True
        else:
            self._is_behind = False


@dataclass(frozen=True)
class _CoreUse:
    """Use of the machine's cores in one step."""

    others_s: float
    """Core-seconds of all processes but the engines during generation."""
    tokens: int
    """Tokens generated meanwhile."""
    training: float
    """Cores busy during training."""


class _DecodingTotals:
    """The engines' decoding since the end of the first step, and the rest of the generation time.

    An engine reports its costs since its own start, which may be before this coordinator's. So costs at the end of the
    first step, or of the warm-up, are subtracted.
    """

    def __init__(self) -> None:
        # The engines' costs to subtract; None before the first step has ended.
        self._before: Mapping[str, dict[tuple[int, int, int], StepCost]] | None = None
        self._newest: Mapping[str, Sequence[StepCost]] = {}
        self.costs: list[StepCost] = []
        self._decoded_s = 0.0
        self._generated_s = 0.0
        self._rollouts = 0.0

    def add_step(self, report: StepReport, costs: Mapping[str, Sequence[StepCost]], replicas: int) -> None:
        """Add a step. costs: cumulative, by engine, including engines that are gone."""
        self.costs = [cost for engine in costs.values() for cost in engine]
        self._newest = costs
        if self._before is None:
            self._before = _index_by_bin(costs)
            return
        before = self._before
        self.costs = [
            cost.minus(before.get(name, {}).get(cost.bin_key)) for name, engine in costs.items() for cost in engine
        ]
        self._decoded_s = sum(cost.seconds_sum for cost in self.costs) / replicas
        self._generated_s += report.phases.generation
        self._rollouts += report.rollouts / replicas

    def discard_steps(self) -> None:
        """Discard everything up to the newest step."""
        self._before = _index_by_bin(self._newest)
        self._decoded_s = self._generated_s = self._rollouts = 0.0

    @property
    def is_warm(self) -> bool:
        """Whether the first step has ended."""
        return self._before is not None

    @property
    def starting_seconds(self) -> float | None:
        """Seconds that each rollout adds to its replica's time without decoding; None before the second step."""
        return max(0.0, self._generated_s - self._decoded_s) / self._rollouts if self._rollouts else None


def _index_by_bin(costs: Mapping[str, Sequence[StepCost]]) -> dict[str, dict[tuple[int, int, int], StepCost]]:
    return {name: {cost.bin_key: cost for cost in engine} for name, engine in costs.items()}


def _compute_conditional_acceptance(accepted: Sequence[Sequence[float]]) -> list[float]:
    """Convert shares of drafts accepted up to each position into conditional probabilities: a_i = s_i / s_(i-1).

    accepted: shares by position, per step. Positions that a step lacks count as 0.
    """
    if not accepted:
        return []
    longest = max(len(shares) for shares in accepted)
    shares = np.mean([[*row, *[0.0] * (longest - len(row))] for row in accepted], axis=0)
    before = np.concatenate([[1.0], shares[:-1]])
    return [float(min(1.0, share / base)) if base > 0 else 0.0 for share, base in zip(shares, before, strict=True)]
