"""The figures of one run, from its steps. Pure. Table 1 of arXiv 2604.26779 has its five stages and its speed-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from specrl.coordinator.edges import compare_edges
from specrl.coordinator.report import StepReport, ValidationReport

STAGES = ("data", "prepare", "generation", "logprob", "train")
OTHERS = ("validation", "checkpoint")
"""What else a step may wait for; the paper's table has neither."""

CAUSES = {
    "buffer_wait": "too few rollouts were finished",
    "sync_drain": "replicas that joined were given weights",
}
"""Of exposed generation, as each step reports them."""


@dataclass(frozen=True)
class Stage:
    """Mean wall seconds of a step, and share of all wall seconds, 0 to 1."""

    name: str
    mean_s: float
    share: float


@dataclass(frozen=True)
class Figures:
    """Rates are per second of wall time. Acceptance and draft length are None without speculation."""

    steps: int
    wall_s: float
    step_s: float
    stages: tuple[Stage, ...]
    exposed_share: float
    exposed_by_cause: dict[str, float]
    """Seconds of the run; empty in reports of versions that did not tell causes apart."""
    rollouts: int
    rollouts_per_s: float
    tokens_per_s: float
    mean_length: float
    acceptance_length: float | None
    accepted_per_position: tuple[float, ...]
    draft_length: float | None
    speculation_gain: float | None
    """Median over the steps that report one."""
    first_reward: float | None
    last_reward: float | None
    """Means over the first and over the last `reward_steps` steps, as in the run's summary."""
    reward_steps: int
    """0: too few steps to compare; first_reward is None then, and last_reward that of the only step."""
    policy_lags: tuple[int, ...]
    """Rollouts by lag; empty in reports of versions that knew the mean and the largest alone."""
    policy_lag_max: int
    policy_lag_mean: float
    weight_sync_s: dict[str, float]
    """Mean seconds of a step by stage of the update."""
    mismatch_kl: float | None

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def figures(steps: Sequence[StepReport]) -> Figures:
    """steps: at least one, ascending."""
    wall_s = sum(report.stages.total for report in steps)
    seconds = {name: sum(getattr(report.stages, name) for report in steps) for name in (*STAGES, *OTHERS)}
    drafted = [report for report in steps if report.acceptance_length is not None]
    rewards = [report.reward for report in steps if report.reward is not None]
    rollouts = sum(report.rollouts for report in steps)
    reward = compare_edges(rewards)
    compared = [report.mismatch_kl for report in steps if report.mismatch_tokens]
    return Figures(
        steps=len(steps),
        wall_s=wall_s,
        step_s=wall_s / len(steps),
        stages=tuple(
            Stage(name, total / len(steps), total / wall_s if wall_s else 0.0) for name, total in seconds.items()
        ),
        exposed_share=sum(report.exposed_generation for report in steps) / wall_s if wall_s else 0.0,
        exposed_by_cause={
            cause: sum(report.exposed_by_cause.get(cause, 0.0) for report in steps)
            for cause in dict.fromkeys(cause for report in steps for cause in report.exposed_by_cause)
        },
        rollouts=rollouts,
        rollouts_per_s=rollouts / wall_s if wall_s else 0.0,
        tokens_per_s=sum(report.tokens for report in steps) / wall_s if wall_s else 0.0,
        mean_length=sum(report.tokens for report in steps) / max(rollouts, 1),
        acceptance_length=mean([report.acceptance_length for report in drafted if report.acceptance_length]),
        accepted_per_position=_means([report.accepted_per_position for report in drafted]),
        draft_length=mean([report.draft_length for report in steps if report.draft_length is not None]),
        speculation_gain=_median([r.speculation_gain for r in steps if r.speculation_gain is not None]),
        first_reward=reward.first,
        last_reward=reward.last,
        reward_steps=reward.steps,
        policy_lags=tuple(int(count) for count in _sums([report.policy_lags for report in steps])),
        policy_lag_max=max(report.policy_lag_max for report in steps),
        policy_lag_mean=sum(report.policy_lag_mean * report.rollouts for report in steps) / max(rollouts, 1),
        weight_sync_s={
            name: mean([report.weight_sync.get(name, 0.0) for report in steps]) or 0.0
            for name in dict.fromkeys(name for report in steps for name in report.weight_sync)
        },
        mismatch_kl=mean(compared),
    )


def all_validations(
    steps: Sequence[StepReport], validations: Sequence[ValidationReport], problems: int
) -> list[ValidationReport]:
    """Every validation, by version. One whose line cannot be read is that of its step's report.

    problems: how many a validation had, for these.
    """
    known = {report.policy_version: report for report in validations}
    for step in steps:
        if step.validation_reward is not None and step.policy_version not in known:
            known[step.policy_version] = ValidationReport(
                policy_version=step.policy_version,
                reward=step.validation_reward,
                reward_low=step.validation_low,
                reward_high=step.validation_high,
                problems=problems,
                seconds=0.0,
            )
    return [known[version] for version in sorted(known)]


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _median(values: Sequence[float]) -> float | None:
    return float(median(values)) if values else None


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    """By place; shorter rows count as 0 where they end."""
    length = max((len(row) for row in rows), default=0)
    return [sum(row[place] for row in rows if place < len(row)) for place in range(length)]


def _means(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(total / len(rows) for total in _sums(rows))
