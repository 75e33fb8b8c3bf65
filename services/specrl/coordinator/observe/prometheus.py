"""Sets the run's Prometheus metrics, from its events and its status.

Counters that alerts use are created at 0 when the run starts. `increase()` would not see the first event of a counter
that appears together with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic.alias_generators import to_snake

from specrl.coordinator.members.replica_states import TRANSITIONS, ReplicaState
from specrl.coordinator.run_events import (
    CanariesFinished,
    CanaryEnded,
    CanaryOutcome,
    CheckpointFailed,
    RunEvent,
    StepServed,
    VersionServed,
    VersionValidated,
)
from specrl.coordinator.schedule.scheduler import ScheduleOccupancy
from specrl.formats.reports import CAUSES, StatusReport, StepReport
from specrl.spec import RunSpec
from specrl.telemetry import metrics

MAX_SERIES = 32
"""Most kinds of verifier errors with a series of their own, because a verifier is user code and may raise anything. All
others count as "other"."""
OUTCOMES = ("trained", "requeued", "resumed", "poisoned", "ungraded")
WITHOUT_SIGNAL = ("trained", "left_out")
SYNC_FAILURES = ("checksum", "failed")


class RunMetrics:
    """The metrics of one run, labelled with its name."""

    def __init__(self, spec: RunSpec) -> None:
        self._run = run = spec.name
        self._shown: set[str] = set()
        self._errors: set[str] = set()
        metrics.POLICY_LAG_BOUND.labels(run).set(spec.schedule.max_policy_lag)
        metrics.POLICY_LAG.labels(run)
        # `labels` creates a series at 0 (see the module docstring).
        for cause in CAUSES:
            metrics.EXPOSED_GENERATION_SECONDS.labels(run, to_snake(cause))
        for outcome in OUTCOMES:
            metrics.ROLLOUTS.labels(run, outcome)
        for outcome in WITHOUT_SIGNAL:
            metrics.GROUPS_WITHOUT_SIGNAL.labels(run, outcome)
        for ending in CanaryOutcome:
            metrics.CANARIES.labels(run, ending.value)
        for reason in SYNC_FAILURES:
            metrics.WEIGHT_SYNC_RETRIES.labels(run, reason)
        for before, following in TRANSITIONS.items():
            for after in following:
                metrics.REPLICA_TRANSITIONS.labels(run, before.value, after.value)
        for counter in (
            *(metrics.GENERATION_UNDER_WAY_SECONDS, metrics.HIDDEN_GENERATION_SECONDS),
            *(metrics.TRAINER_RECOVERIES, metrics.CHECKPOINTS_FAILED, metrics.WEIGHT_SYNC_BYTES),
        ):
            counter.labels(run)

    def handle_event(self, event: RunEvent) -> None:
        """Update the metrics that an event changes."""
        run = self._run
        match event:
            case StepServed(report, policy_lags):
                self._record_step(report, policy_lags)
            case VersionServed(version):
                metrics.POLICY_VERSION.labels(run).set(version)
            case CanaryEnded(outcome, comparison):
                metrics.CANARIES.labels(run, outcome.value).inc()
                if comparison is not None:
                    metrics.CANARY_MEAN_ABS.labels(run).set(comparison.mean_abs)
                    metrics.CANARY_MAX_ABS.labels(run).set(comparison.max_abs)
                    metrics.CANARY_TOKENS.labels(run).inc(comparison.tokens)
            case CanariesFinished(seconds):
                metrics.CANARY_SECONDS.labels(run).observe(seconds)
            case VersionValidated(validation):
                metrics.VALIDATION_REWARD_MEAN.labels(run).set(validation.reward)
                for name, value in validation.rewards.items():
                    metrics.VALIDATION_NAMED_REWARD_MEAN.labels(run, name).set(value)
                for item in validation.pass_at:
                    for bound, value in (("estimate", item.rate), ("low", item.low), ("high", item.high)):
                        metrics.VALIDATION_PASS_RATE.labels(run, str(item.k), bound).set(value)
            case CheckpointFailed():
                metrics.CHECKPOINTS_FAILED.labels(run).inc()

    def _record_step(self, report: StepReport, policy_lags: Sequence[int]) -> None:
        run = self._run
        for phase, seconds in report.phases.model_dump().items():
            metrics.STEP_SECONDS.labels(run, phase).observe(seconds)
        for cause, seconds in report.exposed_by_cause.items():
            metrics.EXPOSED_GENERATION_SECONDS.labels(run, to_snake(cause)).inc(seconds)
        metrics.GENERATION_UNDER_WAY_SECONDS.labels(run).inc(report.generation_under_way)
        metrics.HIDDEN_GENERATION_SECONDS.labels(run).inc(report.hidden_generation)
        for lag in policy_lags:
            metrics.POLICY_LAG.labels(run).observe(lag)
        metrics.ROLLOUTS.labels(run, "trained").inc(report.rollouts)
        left_out = sum(len(places) for places in report.left_out.values())
        # Every group that is left out has no signal, so the rest was trained.
        metrics.GROUPS_WITHOUT_SIGNAL.labels(run, "left_out").inc(left_out)
        metrics.GROUPS_WITHOUT_SIGNAL.labels(run, "trained").inc(report.groups_without_signal - left_out)
        metrics.DRAFTERS_OFF.labels(run).set(report.drafters_off)
        for gauge, value in (
            (metrics.REWARD_MEAN, report.reward),
            (metrics.NO_ANSWER_SHARE, report.no_answer_share),
            (metrics.VERIFIER_ERROR_SHARE, report.verifier_error_share),
            (metrics.UNGRADED_SHARE, report.ungraded_share),
            (metrics.ACCEPTANCE_LENGTH, report.acceptance_length),
            (metrics.DRAFT_LENGTH, report.draft_length),
            (metrics.SPECULATION_GAIN, report.speculation_gain),
            (metrics.DRAFTER_LOSS, report.drafter_loss),
        ):
            if value is not None:  # otherwise the gauge keeps the value of the last step that had one
                gauge.labels(run).set(value)
        for name, mean in report.rewards.items():
            metrics.NAMED_REWARD_MEAN.labels(run, name).set(mean)
        for error, count in report.verifier_errors.items():
            # The first MAX_SERIES kinds get series; they keep them for the life of the process.
            if len(self._errors) < MAX_SERIES:
                self._errors.add(error)
            metrics.VERIFIER_ERRORS.labels(run, error if error in self._errors else "other").inc(count)
        for position, share in enumerate(report.accepted_per_position):
            metrics.ACCEPTED_SHARE.labels(run, str(position)).set(share)

    def show_status(self, status: StatusReport, occupancy: ScheduleOccupancy, minimum: int) -> None:
        """Set the gauges of the present status. Removes the series of replicas that are gone.

        minimum: fewest replicas with which the run counts as ready.
        """
        run = self._run
        replicas = status.replicas
        metrics.GROUPS_IN_FLIGHT.labels(run).set(occupancy.groups_in_flight)
        metrics.GROUPS_BUFFERED.labels(run).set(occupancy.groups_buffered)
        metrics.PAUSED.labels(run).set(status.is_paused)
        metrics.REPLICAS_MINIMUM.labels(run).set(minimum)
        for state in ReplicaState:
            metrics.REPLICAS.labels(run, state.value).set(sum(replica.state == state.value for replica in replicas))
        present = {replica.id for replica in replicas}
        for gone in self._shown - present:
            metrics.REPLICA_LIVE_ROLLOUTS.remove(run, gone)
            metrics.REPLICA_POLICY_VERSION.remove(run, gone)
        self._shown = present
        for replica in replicas:
            metrics.REPLICA_LIVE_ROLLOUTS.labels(run, replica.id).set(replica.live_rollouts)
            metrics.REPLICA_POLICY_VERSION.labels(run, replica.id).set(replica.policy_version)

    def set_demand(self, replicas: float) -> None:
        """Set how many replicas generation needs."""
        metrics.REPLICAS_DEMAND.labels(self._run).set(replicas)

    def set_drafter_lag(self, lag: int) -> None:
        """Set how many versions the oldest served drafter is behind its policy."""
        metrics.DRAFTER_VERSION_LAG.labels(self._run).set(lag)
