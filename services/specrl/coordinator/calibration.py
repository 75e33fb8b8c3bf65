"""What a run has measured that a simulation needs, in one file beside it: calibration.json.

    step costs     what a step of the engines took, by live rollouts and drafted tokens (from the replicas)
    acceptance, the lengths of every group, prompts, and the stages of every step (from the reports)
    alone          with maxPolicyLag 0, what generation and training are like while the other stands still

Written again after every step, so that a run which is under way, or was killed, can be simulated too. `simulator` and
nothing else reads it. Seconds, tokens; camelCase in the file.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import structlog
from pydantic import Field

from specrl.coordinator.report import Report, StageSeconds, StepReport
from specrl.files import write_text
from specrl.records import Group, StepCost
from specrl.records.step_costs import LONGEST_DRAFT
from specrl.spec import RunSpec

STEPS_KEPT = 200
"""Of the stages and the acceptance: the newest steps."""

WARM_UP_STEPS = 5
"""Of this coordinator, in which every process touches memory for the first time and fills its caches: a step of a small
model takes up to a half more for a while. What was measured in them stands until there is anything else."""

GROUPS_KEPT = 512
"""Of the newest groups: the lengths of their rollouts, and their prompts'."""

Measured = Annotated[float, Field(gt=0, lt=1e12)]
Counted = Annotated[int, Field(ge=0, lt=2**53)]
Chance = Annotated[float, Field(ge=0, le=1)]

log = structlog.get_logger(__name__)


class EngineStep(Report):
    """Mean over `steps` like steps of an engine, in which nothing but decoding was done."""

    live: Measured
    draft_tokens: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)]
    """Drafted and verified for each live rollout."""
    context: Annotated[float, Field(ge=0, lt=1e12)]
    """Tokens of a live rollout so far, its prompt included."""
    seconds: Measured
    steps: Annotated[int, Field(ge=1, lt=2**53)]


class TrainedStages(Report):
    """One step of the run."""

    step: int
    stages: StageSeconds
    rollouts: Counted
    tokens: Counted
    """Sampled, prompts not included."""
    load_seconds: Annotated[float, Field(ge=0, lt=1e12)]
    """In which replicas stood still for new weights."""


class Alone(Report):
    """Of a run in which generation and training take turns: its maxPolicyLag is 0."""

    draft_tokens: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)]
    """k of the run file."""
    starting_seconds: Annotated[float, Field(ge=0, lt=1e12)]
    """What each rollout adds to its replica's time in which nothing is decoded: its prompt is read, its request and
    its answer are on their way, its verdict is given."""
    cores: Annotated[int, Field(ge=1, lt=2**31)]
    """Of the coordinator's machine, which other parts of the run may share, or not."""
    threads: Annotated[int, Field(ge=1, lt=2**31)]
    """That an engine computes with: the cores that it keeps busy."""
    core_seconds: Annotated[float, Field(ge=0, lt=1e12)]
    """Of all other processes, for each token that is sampled: it is decoded to text, sent, kept, graded."""
    cores_training: Annotated[float, Field(ge=0, lt=2**31)]
    """Busy while the trainer trained, whoever kept them so."""


class Calibration(Report):
    """The file."""

    run: str
    hardware: str
    engine_steps: tuple[EngineStep, ...] = ()
    acceptance: tuple[Chance, ...] = ()
    """Chance of each position that its token is accepted when those before it were; empty without speculation."""
    draft_tokens: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)] = 0
    """k of the run file."""
    groups: tuple[tuple[Measured, ...], ...] = ()
    """Sampled tokens of each rollout of a prompt."""
    prompt_tokens: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    alone: tuple[Alone, ...] = ()
    """Empty: not known, since generation went on beside other stages. Of several files that are read as one, each's."""
    steps: tuple[TrainedStages, ...] = ()


class CalibrationFile:
    """Collects what a coordinator sees, from its start on, and writes it. A disk that refuses costs the file alone."""

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        self._spec, self._file = spec, directory / "calibration.json"
        self._groups: deque[tuple[int, ...]] = deque(maxlen=GROUPS_KEPT)
        self._prompts: deque[int] = deque(maxlen=GROUPS_KEPT)
        self._steps: deque[TrainedStages] = deque(maxlen=STEPS_KEPT)
        self._accepted: deque[list[float]] = deque(maxlen=STEPS_KEPT)
        self._decoding = _Decoding()
        self._seen = 0
        self._cores: deque[_Cores] = deque(maxlen=STEPS_KEPT)
        self._is_behind = False

    def step_ended(
        self,
        report: StepReport,
        groups: Sequence[Group],
        costs: Mapping[str, Sequence[StepCost]],
        replicas: int,
        busy_cores: tuple[float | None, float | None],
    ) -> None:
        """Take up a step, and write.

        costs: by engine, from its start on, those that are gone included. replicas: that are there. busy_cores: of this
        machine, as `Alone`.
        """
        if self._seen == WARM_UP_STEPS:
            self._steps.clear()
            self._cores.clear()
            self._decoding.begin_anew()
        self._seen += 1
        for group in groups:
            self._groups.append(tuple(rollout.sampled_length for rollout in group.rollouts))
            self._prompts.append(len(group.prompt.token_ids))
        if report.accepted_per_position:
            self._accepted.append(report.accepted_per_position)
        sync = report.weight_sync
        self._steps.append(
            TrainedStages(
                step=report.step,
                stages=report.stages,
                rollouts=report.rollouts,
                tokens=report.tokens,
                load_seconds=sync.get("pause", 0.0) + sync.get("resume", 0.0),
            )
        )
        generating, training = busy_cores
        if generating is not None and training is not None and self._decoding.is_warm:
            engines = replicas * self._spec.generation.threads
            others_s = (generating - engines) * report.stages.generation
            self._cores.append(_Cores(others_s, report.tokens, training))
        self._decoding.step_ended(report, costs, max(1, replicas))
        self._write(self._found())

    def _found(self) -> Calibration:
        return Calibration(
            run=self._spec.name,
            hardware=f"{platform.machine()} {platform.processor()}".strip(),
            engine_steps=tuple(merged(self._decoding.costs)),
            acceptance=tuple(_conditional(self._accepted)),
            draft_tokens=self._spec.generation.speculation.num_draft_tokens,
            groups=tuple(self._groups),
            prompt_tokens=float(np.mean(self._prompts)) if self._prompts else 0.0,
            alone=self._alone(),
            steps=tuple(self._steps),
        )

    def _alone(self) -> tuple[Alone, ...]:
        starting_seconds = self._decoding.starting_seconds
        if self._spec.schedule.max_policy_lag or starting_seconds is None or not self._cores:
            return ()
        generation, cores = self._spec.generation, self._cores
        others_s, tokens = sum(step.others_s for step in cores), sum(step.tokens for step in cores)
        found = Alone(
            draft_tokens=generation.speculation.num_draft_tokens,
            starting_seconds=starting_seconds,
            cores=os.cpu_count() or 1,
            threads=generation.threads,
            core_seconds=max(0.0, others_s) / max(1, tokens),
            cores_training=fmean(step.training for step in cores),
        )
        return (found,)

    def _write(self, found: Calibration) -> None:
        try:
            write_text(self._file, found.model_dump_json(by_alias=True))
        except OSError as error:
            if not self._is_behind:
                log.warning("calibration_not_written", reason=str(error))
            self._is_behind = True
        else:
            self._is_behind = False


@dataclass(frozen=True)
class _Cores:
    """Of a step: core-seconds of all but the engines while they generated its tokens, cores busy while it trained."""

    others_s: float
    tokens: int
    training: float


class _Decoding:
    """What engines decoded since the first step ended, which warms them up, and what else there was of generation.

    Costs of an engine are from its start on, which may be before this coordinator's.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, dict[tuple[int, int, int], StepCost]] | None = None
        self._newest: Mapping[str, Sequence[StepCost]] = {}
        self.costs: list[StepCost] = []
        self._decoded_s = 0.0
        self._generated_s = 0.0
        self._rollouts = 0.0

    def step_ended(self, report: StepReport, costs: Mapping[str, Sequence[StepCost]], replicas: int) -> None:
        """costs: by engine, from its start on, those that are gone included."""
        self.costs, self._newest = [cost for engine in costs.values() for cost in engine], costs
        if self._before is None:
            self._before = _by_bin(costs)
            return
        before = self._before
        self.costs = [
            cost.minus(before.get(name, {}).get(cost.bin)) for name, engine in costs.items() for cost in engine
        ]
        self._decoded_s = sum(cost.seconds_sum for cost in self.costs) / replicas
        self._generated_s += report.stages.generation
        self._rollouts += report.rollouts / replicas

    def begin_anew(self) -> None:
        """Forget all up to the newest step."""
        self._before = _by_bin(self._newest)
        self._decoded_s = self._generated_s = self._rollouts = 0.0

    @property
    def is_warm(self) -> bool:
        """Whether the first step has ended."""
        return self._before is not None

    @property
    def starting_seconds(self) -> float | None:
        """Of a rollout; None before the second step."""
        return max(0.0, self._generated_s - self._decoded_s) / self._rollouts if self._rollouts else None


def _by_bin(costs: Mapping[str, Sequence[StepCost]]) -> dict[str, dict[tuple[int, int, int], StepCost]]:
    return {name: {cost.bin: cost for cost in engine} for name, engine in costs.items()}


def merged(costs: Iterable[StepCost]) -> list[EngineStep]:
    """Like steps of all replicas as one, by live rollouts and draft length."""
    bins: dict[tuple[int, int, int], list[StepCost]] = {}
    for cost in costs:
        if cost.steps and cost.live_sum and cost.seconds_sum:
            bins.setdefault(cost.bin, []).append(cost)
    found = []
    for key in sorted(bins):
        like = bins[key]
        steps = sum(cost.steps for cost in like)
        found.append(
            EngineStep(
                live=sum(cost.live_sum for cost in like) / steps,
                draft_tokens=like[0].draft_tokens,
                context=sum(cost.context_sum for cost in like) / steps,
                seconds=sum(cost.seconds_sum for cost in like) / steps,
                steps=steps,
            )
        )
    return found


def _conditional(accepted: Sequence[Sequence[float]]) -> list[float]:
    """a_i of the mean shares of drafts whose token i was accepted: each over the one before."""
    if not accepted:
        return []
    longest = max(len(shares) for shares in accepted)
    shares = np.mean([[*row, *[0.0] * (longest - len(row))] for row in accepted], axis=0)
    before = np.concatenate([[1.0], shares[:-1]])
    return [float(min(1.0, share / base)) if base > 0 else 0.0 for share, base in zip(shares, before, strict=True)]
