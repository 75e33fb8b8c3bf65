"""A run's figures as Prometheus metrics: what the board learns, counted. Nothing reads them to decide anything.

Counters that alerts ask for exist from the start, at 0: `increase()` would not see the event with which one appears.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrl.coordinator.agreement import Comparison
from specrl.coordinator.replica_states import NEXT, ReplicaState
from specrl.coordinator.report import ReplicaReport, StepReport, ValidationReport
from specrl.spec import RunSpec
from specrl.telemetry import metrics

MOST_SERIES = 32
"""Kinds of a verifier's errors that have series of their own; all others are counted as "other"."""
OUTCOMES = ("trained", "requeued", "resumed", "poisoned", "ungraded")
WITHOUT_SIGNAL = ("trained", "left_out")
CANARY_OUTCOMES = ("agreed", "disagreed", "skipped", "lost")
SYNC_FAILURES = ("checksum", "failed")
CAUSES = ("buffer_wait", "sync_drain")


class Exported:
    """The metrics of one run, under its name."""

    def __init__(self, spec: RunSpec) -> None:
        self._run = run = spec.name
        self._shown: set[str] = set()
        self._errors: set[str] = set()
        minimum = min(spec.failure_policy.min_generation_replicas, spec.generation.replicas)
        metrics.REPLICAS_MINIMUM.labels(run).set(minimum)
        metrics.POLICY_LAG_BOUND.labels(run).set(spec.schedule.max_policy_lag)
        metrics.POLICY_LAG.labels(run)
        for cause in CAUSES:
            metrics.EXPOSED_GENERATION_SECONDS.labels(run, cause)
        for outcome in OUTCOMES:
            metrics.ROLLOUTS.labels(run, outcome)
        for outcome in WITHOUT_SIGNAL:
            metrics.GROUPS_WITHOUT_SIGNAL.labels(run, outcome)
        for outcome in CANARY_OUTCOMES:
            metrics.CANARIES.labels(run, outcome)
        for reason in SYNC_FAILURES:
            metrics.WEIGHT_SYNC_RETRIES.labels(run, reason)
        for before, following in NEXT.items():
            for after in following:
                metrics.REPLICA_TRANSITIONS.labels(run, before.value, after.value)
        for counter in (metrics.TRAINER_RECOVERIES, metrics.CHECKPOINTS_FAILED, metrics.WEIGHT_SYNC_BYTES):
            counter.labels(run)

    def step(self, report: StepReport, policy_lags: Sequence[int]) -> None:
        """A step is trained and served."""
        run = self._run
        for phase, seconds in report.stages.model_dump().items():
            metrics.STEP_SECONDS.labels(run, phase).observe(seconds)
        for cause, seconds in report.exposed_by_cause.items():
            metrics.EXPOSED_GENERATION_SECONDS.labels(run, cause).inc(seconds)
        for lag in policy_lags:
            metrics.POLICY_LAG.labels(run).observe(lag)
        metrics.ROLLOUTS.labels(run, "trained").inc(report.rollouts)
        left_out = sum(len(places) for places in report.left_out.values())
        metrics.GROUPS_WITHOUT_SIGNAL.labels(run, "left_out").inc(left_out)
        metrics.GROUPS_WITHOUT_SIGNAL.labels(run, "trained").inc(report.groups_without_signal - left_out)
        if report.mismatch_tokens:
            metrics.SAMPLER_MISMATCH_KL.labels(run).set(report.mismatch_kl)
        metrics.DRAFTERS_RESTING.labels(run).set(report.drafters_resting)
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
            if value is not None:
                gauge.labels(run).set(value)
        for error, count in report.verifier_errors.items():
            if len(self._errors) < MOST_SERIES:
                self._errors.add(error)
            metrics.VERIFIER_ERRORS.labels(run, error if error in self._errors else "other").inc(count)
        for position, share in enumerate(report.accepted_per_position):
            metrics.ACCEPTED_SHARE.labels(run, str(position)).set(share)

    def replicas(self, replicas: Sequence[ReplicaReport]) -> None:
        """The replicas at this moment; series of those that are gone go, too."""
        run = self._run
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

    def paused(self, is_paused: bool) -> None:
        """Whether people have the run paused."""
        metrics.PAUSED.labels(self._run).set(is_paused)

    def groups(self, in_flight: int, buffered: int) -> None:
        """Groups begun and not complete, and complete ones that wait for their step."""
        metrics.GROUPS_IN_FLIGHT.labels(self._run).set(in_flight)
        metrics.GROUPS_BUFFERED.labels(self._run).set(buffered)

    def version_served(self, policy_version: int, drafter_lag: int | None) -> None:
        """Every live replica serves a version. drafter_lag: of the oldest drafter among them; None without any."""
        metrics.POLICY_VERSION.labels(self._run).set(policy_version)
        if drafter_lag is not None:
            metrics.DRAFTER_VERSION_LAG.labels(self._run).set(drafter_lag)

    def canary_compared(self, comparison: Comparison) -> None:
        """One replica's canary was held against the trainer."""
        metrics.CANARY_MEAN_ABS.labels(self._run).set(comparison.mean_abs)
        metrics.CANARY_MAX_ABS.labels(self._run).set(comparison.max_abs)
        metrics.CANARY_TOKENS.labels(self._run).inc(comparison.tokens)

    def canary_ended(self, outcome: str) -> None:
        """One of CANARY_OUTCOMES."""
        metrics.CANARIES.labels(self._run, outcome).inc()

    def canary_took(self, seconds: float) -> None:
        """The trainer waited so long for the canaries of an update."""
        metrics.CANARY_SECONDS.labels(self._run).observe(seconds)

    def validated(self, report: ValidationReport) -> None:
        """A version was validated."""
        metrics.VALIDATION_REWARD_MEAN.labels(self._run).set(report.reward)
        for item in report.pass_at:
            for bound, value in (("estimate", item.rate), ("low", item.low), ("high", item.high)):
                metrics.VALIDATION_PASS_RATE.labels(self._run, str(item.k), bound).set(value)

    def checkpoint_failed(self) -> None:
        """The trainer could not write one."""
        metrics.CHECKPOINTS_FAILED.labels(self._run).inc()


def by_cause(exposed_s: float, catching_up_s: float) -> Mapping[str, float]:
    """Seconds of exposed generation by cause. catching_up_s: of them, with weights on their way to who joined."""
    drained = min(exposed_s, catching_up_s)
    return dict(zip(CAUSES, (exposed_s - drained, drained), strict=True))
