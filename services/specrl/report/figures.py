"""Computes the figures of one run from its step reports. Pure.

The five phases and the speed-ups are those of arXiv 2604.26779, Table 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from specrl.formats.reports import StepReport, ValidationReport
from specrl.formats.statistics.edges import EdgeMeans, compare_edges, compare_edges_by_name
from specrl.telemetry.training_figures import FIGURES

PHASES = ("data", "prepare", "generation", "logprob", "train")
OTHERS = ("validation", "checkpoint")
"""Further parts of a step, which the paper's table does not have."""

CAUSES = {
    "bufferWait": "too few rollouts were sampled",
    "syncDrain": "replicas that joined were receiving weights",
    "grading": "all rollouts were sampled, and verifiers graded the last ones",
}
"""Causes of exposed generation, as named in step reports, with their meaning."""


@dataclass(frozen=True)
class PhaseTime:
    """One phase: its mean seconds per step, and its share of the wall time, 0 to 1."""

    name: str
    mean_s: float
    share: float


@dataclass(frozen=True)
class RunFigures:
    """The figures of one run.

    reports: of its steps, ascending. Without any step, means per step are undefined. Rates are per second of wall time.
    Acceptance length, draft length and gain are None without speculation.
    """

    reports: Sequence[StepReport]

    @property
    def step_count(self) -> int:
        """Number of steps."""
        return len(self.reports)

    @cached_property
    def wall_s(self) -> float:
        """Wall seconds of all steps."""
        return sum(report.phases.wall_seconds for report in self.reports)

    @property
    def step_s(self) -> float:
        """Mean wall seconds of a step."""
        return self.wall_s / self.step_count

    @property
    def whole_step(self) -> PhaseTime:
        """The whole step, as if it were one phase."""
        return PhaseTime("step", self.step_s, 1.0)

    @cached_property
    def phase_times(self) -> tuple[PhaseTime, ...]:
        """All phases, those of the paper's table first."""
        totals = {name: sum(getattr(report.phases, name) for report in self.reports) for name in (*PHASES, *OTHERS)}
        return tuple(
            PhaseTime(name, total / self.step_count, self._per_wall_s(total)) for name, total in totals.items()
        )

    def find_phase(self, name: str) -> PhaseTime:
        """Return one phase. name: one of PHASES or OTHERS."""
        return next(phase for phase in self.phase_times if phase.name == name)

    @property
    def exposed_share(self) -> float:
        """Share of the wall time that is exposed generation, 0 to 1."""
        return self._per_wall_s(self.exposed_s)

    @property
    def exposed_s(self) -> float:
        """Seconds of the whole run that are exposed generation."""
        return sum(report.exposed_generation for report in self.reports)

    @property
    def under_way_s(self) -> float:
        """Seconds of the whole run in which at least one rollout was in flight."""
        return sum(report.generation_under_way for report in self.reports)

    @property
    def hidden_s(self) -> float:
        """Seconds of the whole run in which a rollout was in flight and the trainer did not wait for rollouts."""
        return sum(report.hidden_generation for report in self.reports)

    @property
    def generation_times(self) -> tuple[PhaseTime, ...]:
        """Exposed generation, hidden generation, and generation under way."""
        totals = {"exposed": self.exposed_s, "hidden": self.hidden_s, "under way": self.under_way_s}
        return tuple(
            PhaseTime(name, total / self.step_count, self._per_wall_s(total)) for name, total in totals.items()
        )

    @property
    def exposed_by_cause(self) -> dict[str, float]:
        """Seconds of the whole run, by cause."""
        return _sums_by_name([report.exposed_by_cause for report in self.reports])

    @property
    def rollout_count(self) -> int:
        """Number of trained rollouts."""
        return sum(report.rollouts for report in self.reports)

    @property
    def rollouts_per_s(self) -> float:
        return self._per_wall_s(self.rollout_count)

    @property
    def token_count(self) -> int:
        """Sampled tokens of the trained rollouts."""
        return sum(report.tokens for report in self.reports)

    @property
    def tokens_per_s(self) -> float:
        return self._per_wall_s(self.token_count)

    @property
    def mean_length(self) -> float:
        """Mean sampled tokens of a rollout."""
        # A run may have trained no rollout: all prompts may have failed, or all groups may have been left out.
        return self.token_count / max(self.rollout_count, 1)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification, mean over the steps with drafts."""
        return _mean_of_known(report.acceptance_length for report in self.reports)

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """For each position, the share of drafts whose token there was accepted: mean of the steps that reached it."""
        # Steps without a draft, or with shorter ones, would pull the shares down.
        drafted = [report.accepted_per_position for report in self.reports if report.acceptance_length is not None]
        totals = _sums_by_place(drafted)
        return tuple(total / sum(place < len(shares) for shares in drafted) for place, total in enumerate(totals))

    @property
    def draft_length(self) -> float | None:
        """Tokens per draft, mean over the steps with drafts."""
        return _mean_of_known(report.draft_length for report in self.reports)

    @property
    def speculation_gain(self) -> float | None:
        """Median over the steps that report a gain."""
        gains = [report.speculation_gain for report in self.reports if report.speculation_gain is not None]
        return median(gains) if gains else None

    @property
    def reward_edges(self) -> EdgeMeans:
        """Mean reward of the first and of the last steps, as in the run's summary."""
        return compare_edges([report.reward for report in self.reports if report.reward is not None])

    @property
    def training_edges(self) -> dict[str, EdgeMeans]:
        """Means of each figure of training (`telemetry/training_figures.py`) over the first and the last steps."""
        return compare_edges_by_name(FIGURES, [report.known_values() for report in self.reports])

    @property
    def policy_lags(self) -> tuple[int, ...]:
        """Number of rollouts by policy lag; empty if no rollout was trained."""
        return tuple(_sums_by_place([report.policy_lags for report in self.reports]))

    @property
    def policy_lag_max(self) -> int:
        """Largest policy lag of any rollout."""
        return max(report.policy_lag_max for report in self.reports)

    @property
    def policy_lag_mean(self) -> float:
        """Mean policy lag over all trained rollouts."""
        # Weighted by rollouts: steps have different numbers of them if groups are left out.
        return sum(report.policy_lag_mean * report.rollouts for report in self.reports) / max(self.rollout_count, 1)

    @property
    def weight_sync_s(self) -> dict[str, float]:
        """Mean seconds per step of each part of the weight update."""
        sums = _sums_by_name([report.weight_sync for report in self.reports])
        return {name: total / self.step_count for name, total in sums.items()}

    @property
    def mismatch_kl(self) -> float | None:
        """Mean KL divergence between sampler and trainer in nats, over the steps in which tokens were compared."""
        return _mean_of_known(report.mismatch_kl for report in self.reports if report.mismatch_tokens)

    def _per_wall_s(self, total: float) -> float:
        return total / self.wall_s if self.wall_s else 0.0


def all_validations(
    steps: Sequence[StepReport], validations: Sequence[ValidationReport], problems: int
) -> list[ValidationReport]:
    """Return every validation, by version. If a validation's own line is unreadable, its step's report replaces it.

    problems: number of problems per validation, which step reports do not have.
    """
    # A validation's own line has more than its step's report, so it wins.
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


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _sums_by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) for row in rows) for name in names}


def _sums_by_place[N: (int, float)](rows: Sequence[Sequence[N]]) -> list[N]:
    """Sum rows element by element. Missing elements of shorter rows count as 0."""
    longest = max(map(len, rows), default=0)
    return [sum(row[place] for row in rows if place < len(row)) for place in range(longest)]
