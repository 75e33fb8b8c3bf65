"""The format of calibration.json: the measurements of a run from which `specrl simulate` predicts other settings.

    engine_steps                      seconds of an engine's decoding step, by live rollouts and draft length
    acceptance, groups, steps, ...    taken from the step reports
    alone                             costs of generation and of training while the other one is idle; only with
                                      maxPolicyLag 0, where they take turns

The coordinator rewrites the file after every step, so that a run that is still going, or was killed, can be simulated.
Only `simulator` reads it. Units are seconds and tokens; keys are camelCase in the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from specrl.formats.reports import PhaseSeconds, ReportModel
from specrl.records import StepCost
from specrl.records.step_costs import LONGEST_DRAFT

CALIBRATION = "calibration.json"

WARM_UP_STEPS = 5
"""Steps after the coordinator's start whose measurements are discarded once there are newer ones. Processes touch their
memory for the first time and fill caches in them: steps of a small model take up to 50 % longer."""

Measured = Annotated[float, Field(gt=0, lt=1e12)]
# Many readers of JSON use doubles, which hold whole numbers exactly below 2**53.
Counted = Annotated[int, Field(ge=0, lt=2**53)]
Chance = Annotated[float, Field(ge=0, le=1)]


class EngineStep(ReportModel):
    """The mean over `steps` similar engine steps that only decoded (no prefill)."""

    live: Measured
    """Rollouts in the batch."""
    draft_tokens: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)]
    """Tokens drafted and verified per live rollout."""
    context: Annotated[float, Field(ge=0, lt=1e12)]
    """Tokens of a live rollout so far, including its prompt."""
    seconds: Measured
    """Wall time of one step."""
    steps: Annotated[int, Field(ge=1, lt=2**53)]
    """Number of steps that the means are over."""


class TrainedPhases(ReportModel):
    """The costs of one step of the run."""

    step: int
    phases: PhaseSeconds
    rollouts: Counted
    tokens: Counted
    """Sampled tokens, without prompts."""
    load_seconds: Annotated[float, Field(ge=0, lt=1e12)]
    """Seconds in which the replicas were paused for new weights."""


class AloneCosts(ReportModel):
    """Costs of a run with maxPolicyLag 0, in which generation and training take turns and do not share cores."""

    draft_tokens: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)]
    """Draft length k of the run file."""
    starting_seconds: Annotated[float, Field(ge=0, lt=1e12)]
    """Seconds that each rollout adds to its replica's time without decoding: prefill, transport of request and answer,
    grading."""
    cores: Annotated[int, Field(ge=1, lt=2**31)]
    """Cores of the coordinator's machine. Other processes of the run may or may not share it."""
    threads: Annotated[int, Field(ge=1, lt=2**31)]
    """Threads of all ranks of one engine, which is the number of cores that it keeps busy."""
    core_seconds: Annotated[float, Field(ge=0, lt=1e12)]
    """Core-seconds of all processes but the engines, per sampled token: detokenising, transport, storing, grading."""
    cores_training: Annotated[float, Field(ge=0, lt=2**31)]
    """Cores of the machine that were busy while the trainer trained, by any process."""


class RunCalibration(ReportModel):
    """The content of calibration.json."""

    run: str
    hardware: str
    engine_steps: tuple[EngineStep, ...] = ()
    acceptance: tuple[Chance, ...] = ()
    """For each position of a draft, the probability that its token is accepted, given that all before it were. Empty
    without speculation."""
    draft_tokens: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)] = 0
    """Draft length k of the run file."""
    groups: tuple[tuple[Measured, ...], ...] = ()
    """Sampled tokens of each rollout, by group."""
    prompt_tokens: Annotated[float, Field(ge=0, lt=1e12)] = 0.0
    """Mean tokens of a prompt."""
    alone: tuple[AloneCosts, ...] = ()
    """Empty when generation overlapped training, so that neither was measured alone. A calibration that was merged from
    several files has one entry per file."""
    steps: tuple[TrainedPhases, ...] = ()


def merge_step_costs(costs: Iterable[StepCost]) -> list[EngineStep]:
    """Merge the step costs of all replicas into one mean per bin of live rollouts, draft length and context."""
    bins: dict[tuple[int, int, int], list[StepCost]] = {}
    for cost in costs:
        # A cost without steps or time has no mean, and EngineStep requires positive values.
        if cost.steps and cost.live_sum and cost.seconds_sum:
            bins.setdefault(cost.bin_key, []).append(cost)
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
