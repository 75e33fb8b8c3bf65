"""Builds the report of a step. Called by the loop; `StepTally` also by the canary.

A report is stored twice. `build_trained_report` makes the first version when the step is trained. When its policy
version is served, the loop adds the fields of `StepTally.take_report_fields` and replaces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrl.batching import has_signal
from specrl.coordinator.members.agreement import LogprobComparison
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.stopwatch import Lap
from specrl.formats.reports import CAUSES, SourceReport, StepReport
from specrl.formats.statistics.rounding import round_figure
from specrl.records import Batch, Group, SpeculationCounters, TrainMetrics
from specrl.rewards.verifier_set import average_named_rewards
from specrl.telemetry.training_figures import FIGURES

MAX_ERRORS = 16
"""Kinds of verifier errors that one report names. Bounds the report's size, which is stored for every step."""


@dataclass(frozen=True)
class TrainedStep:
    """The batch of a step, its groups, and the trainer's metrics. groups: also those that the batch leaves out."""

    batch: Batch
    groups: Sequence[Group]
    metrics: TrainMetrics


class StepTally:
    """Counts events between two served steps, for the report of the next one."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._counted = SpeculationCounters()
        self._ungraded = 0
        self._reset_step_counts()

    def _reset_step_counts(self) -> None:
        self._canary = LogprobComparison()
        self._canary_s = 0.0
        self._catching_up_s = 0.0

    def discard_counts(self) -> None:
        """Forget all counts so far. Drafts of a drafter that was not yet initialised belong to no step."""
        self._counted = self._registry.sum_speculation_counters()
        self._reset_step_counts()

    def exclude_counters(self, counters: SpeculationCounters) -> None:
        """Exclude these counters from the acceptance of the step: they were counted while a canary ran.

        Engines count all rollouts together, so those that run beside a canary are excluded with it.
        """
        self._counted = self._counted.plus(counters)

    def add_canary(self, comparison: LogprobComparison) -> None:
        """Add one replica's comparison with the trainer."""
        self._canary = self._canary.plus(comparison)

    def add_canary_seconds(self, seconds: float) -> None:
        """Add seconds that the trainer waited for the canaries of one update."""
        self._canary_s += seconds

    def add_catching_up_seconds(self, seconds: float) -> None:
        """Add seconds in which joining replicas received weights while the trainer waited for rollouts."""
        self._catching_up_s += seconds

    def take_report_fields(self, lap: Lap, ungraded: int) -> dict[str, Any]:
        """Return the counted fields of the step's report, and start counting for the next step.

        lap: of the step. ungraded: rollouts that could not be graded since the
        coordinator started.
        """
        counters = self._registry.sum_speculation_counters()
        since = counters.minus(self._counted)
        canary = self._canary
        fields = {
            "acceptance_length": since.acceptance_length,
            "accepted_per_position": since.acceptance_by_position,
            "draft_length": since.draft_tokens / since.drafts if since.drafts else None,
            "ungraded": ungraded - self._ungraded,
            "canary_mean_abs": canary.mean_abs if canary.tokens else None,
            "canary_max_abs": canary.max_abs if canary.tokens else None,
            "canary_tokens": canary.tokens,
            "canary_seconds": self._canary_s,
            "exposed_by_cause": split_exposed_seconds(lap, self._catching_up_s),
            **self._drafting_fields(),
        }
        self._counted = counters
        self._ungraded = ungraded
        self._reset_step_counts()
        return fields

    def _drafting_fields(self) -> dict[str, float | None]:
        """Fields about adaptive draft length, from the newest status of each replica."""
        found = [replica.status.drafting for replica in self._registry.serving_replicas() if replica.status]
        gains = [item.measured_gain for item in found if item is not None and item.measured_gain is not None]
        return {
            "speculation_gain": _mean_or_none(gains),
            "drafters_off": sum(item is not None and item.state != "drafting" for item in found),
        }


def describe_lap(lap: Lap) -> dict[str, Any]:
    """Return the fields of a step's report that say how long the step took."""
    return {
        "phases": lap.phases,
        "exposed_generation": lap.phases.generation,
        "generation_under_way": lap.generation_under_way_s,
        "hidden_generation": lap.hidden_generation_s,
    }


def build_trained_report(
    step: TrainedStep, lap: Lap, failed: Mapping[str, str], sources: Sequence[str] = ()
) -> StepReport:
    """Build the report of a step that is trained and not yet served.

    lap: its seconds so far. failed: reasons of the prompts that the step gives up, by group id.
    sources: names of the run's training sources; empty if it has one.
    """
    lags = step.batch.policy_lags
    rewards = [float(value) for group in step.groups for value in group.rewards_G]
    verdicts = [reward for group in step.groups for reward in group.rewards]
    lengths = [item.rollout.sampled_length for item in step.batch.rollouts]
    trained = step.metrics
    return StepReport(
        step=step.batch.step,
        policy_version=step.batch.step,  # training step s makes version s
        **describe_lap(lap),
        reward=round_figure(_mean_or_none(rewards)),
        # Computed from the groups' means, because rewards of one prompt are not independent of each other.
        reward_error=round_figure(_standard_error([float(np.mean(group.rewards_G)) for group in step.groups])),
        rewards=average_named_rewards(verdicts),
        sources=_report_sources(step.groups, sources),
        groups=len(step.groups),
        rollouts=len(lengths),
        tokens=sum(lengths),
        mean_length=_mean_or_none(lengths) or 0.0,
        tool_calls=_mean_or_none([len(item.rollout.outputs) for item in step.batch.rollouts]) or 0.0,
        acceptance_length=None,  # like all fields of StepTally: known when the version is served
        policy_lag_max=max(lags, default=0),
        policy_lag_mean=_mean_or_none(lags) or 0.0,
        policy_lags=np.bincount(lags).tolist() if lags else [],
        failed=dict(failed),
        left_out=_positions_left_out(step),
        groups_without_signal=sum(not has_signal(group.rewards_G) for group in step.groups),
        verdicts=len(verdicts),
        no_answer=sum(reward.lacks_answer for reward in verdicts),
        verifier_errors=count_errors([reward.error for reward in verdicts if reward.error]),
        is_skipped=trained.is_skipped,
        updates=trained.updates,
        **dict.fromkeys(FIGURES) | trained.known_values(),
        drafter_loss=trained.drafter.loss if trained.drafter else None,
        drafter_acceptance=list(trained.drafter.acceptance_per_position) if trained.drafter else [],
    )


def _report_sources(groups: Sequence[Group], sources: Sequence[str]) -> dict[str, SourceReport]:
    by_source = {name: [group for group in groups if group.prompt.source == name] for name in sources}
    return {
        name: SourceReport(
            reward=round_figure(float(np.mean([value for group in found for value in group.rewards_G]))),
            groups=len(found),
            groups_without_signal=sum(not has_signal(group.rewards_G) for group in found),
        )
        for name, found in by_source.items()
        if found
    }


def split_exposed_seconds(lap: Lap, catching_up_s: float) -> dict[str, float]:
    """Split the seconds of exposed generation by cause. catching_up_s: joining replicas received weights meanwhile."""
    exposed_s = lap.phases.generation
    drained = min(exposed_s, catching_up_s)
    graded = min(exposed_s - drained, lap.grading_s)
    return dict(zip(CAUSES, (exposed_s - drained - graded, drained, graded), strict=True))


def count_errors(errors: Sequence[str]) -> dict[str, int]:
    """Count each error. Beyond MAX_ERRORS names, the rarest are counted together as "other"."""
    counts = Counter(errors).most_common()
    if len(counts) <= MAX_ERRORS:
        return dict(counts)
    named = counts[: MAX_ERRORS - 1]
    return dict(named) | {"other": len(errors) - sum(count for _, count in named)}


def _positions_left_out(step: TrainedStep) -> dict[str, list[int]]:
    """Positions of the groups that the batch leaves out, by the reward that all rollouts of the group have."""
    trained = {item.rollout.group_id for item in step.batch.rollouts}
    found: dict[str, list[int]] = {}
    for group in step.groups:
        if group.group_id not in trained:  # then all of its rewards are equal, and the first stands for all
            found.setdefault(f"{group.rewards_G[0]:g}", []).append(group.prompt.position)
    return found


def _mean_or_none(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None with fewer than two values."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
