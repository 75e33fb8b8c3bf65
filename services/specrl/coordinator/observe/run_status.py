"""Builds the run's present status, and its summary at the end, from the run's events and from its live objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import structlog

from specrl.coordinator.context import RunContext
from specrl.coordinator.loop import Loop
from specrl.coordinator.run_events import (
    CanaryEnded,
    CanaryOutcome,
    CheckpointFailed,
    ReplicasScaled,
    RunEvent,
    StepServed,
    VerdictFailed,
    VersionServed,
)
from specrl.coordinator.schedule.scheduler import ScheduleOccupancy
from specrl.formats.collapse import CollapseWatch, SignalWatch
from specrl.formats.reasons import ReasonCounts
from specrl.formats.reports import (
    ReplicaReport,
    RunSummary,
    StatusReport,
    StepReport,
    ValidationReport,
    list_reward_names,
)
from specrl.formats.statistics.edges import compare_edges, compare_edges_by_name, compare_first_with_last
from specrl.formats.statistics.rounding import round_figure

log = structlog.get_logger(__name__)


class RunStatus:
    """The status of one run.

    replicas_wanted: how many replicas the launcher should keep; None in a cluster.
    problems: counters of the prompt source, notices: for the user, and isolations: of sandboxes; set by `main` before
    the run starts.
    """

    def __init__(
        self, context: RunContext, loop: Loop, reports: Sequence[StepReport], replicas_wanted: int | None = None
    ) -> None:
        """reports: of all steps so far. Counters of the whole run continue from them."""
        self._context = context
        self._loop = loop
        self._replicas_wanted = replicas_wanted
        self._served = -1
        self._canaries: Counter[CanaryOutcome] = Counter()
        self._checkpoints_failed = 0
        self._checkpoint_failure = (-1, "")  # step of the newest complete checkpoint when one failed, and why
        self._verdict_failures = ReasonCounts()
        self._summary: RunSummary | None = None
        self._given_up: list[str] = []
        self._counts = dict.fromkeys(("noAnswer", "verifierErrors", "groupsLeftOut", "stepsSkipped"), 0)
        self.problems: dict[str, int] = {"problemsSkipped": 0, "problemsRepeated": 0}
        self.notices: list[str] = []
        self.isolations: dict[str, str] = {}
        self._collapse = CollapseWatch()
        self._signal = SignalWatch()
        self._has_collapsed = self._has_lost_signal = False  # with the last step
        for report in reports:
            self._count_step(report)

    def handle_event(self, event: RunEvent) -> None:
        """Fold in an event."""
        match event:
            case VersionServed(version):
                self._served = version
            case StepServed(report):
                self._count_step(report)
                self._log_warnings(report)
            case VerdictFailed(reason, count):
                self._verdict_failures.add_failures(reason, count)
            case CanaryEnded(outcome):
                self._canaries[outcome] += 1
            case CheckpointFailed(reason):
                self._checkpoints_failed += 1
                self._checkpoint_failure = (self._context.ledger.facts.checkpoints[-1], reason)
            case ReplicasScaled(replicas):
                self._replicas_wanted = replicas

    def list_warnings(self) -> list[str]:
        """Return what the last steps show, with what to try. A collapse says all that missing signals would."""
        collapse = self._collapse.describe_collapse()
        return list(filter(None, [collapse or self._signal.advice]))

    def _log_warnings(self, report: StepReport) -> None:
        """Log what this step completes."""
        if self._has_collapsed:
            log.warning("policy_collapsed", step=report.step, reason=self._collapse.describe_collapse())
        elif self._has_lost_signal and self._collapse.collapsed_since is None:
            log.warning("signal_lost", step=report.step, reason=self._signal.advice)

    def _count_step(self, report: StepReport) -> None:
        """Count a step."""
        self._given_up += report.failed.values()
        self._counts["noAnswer"] += report.no_answer
        self._counts["verifierErrors"] += sum(report.verifier_errors.values())
        self._counts["groupsLeftOut"] += sum(len(places) for places in report.left_out.values())
        self._counts["stepsSkipped"] += report.is_skipped
        self._has_collapsed = self._collapse.add_step(report)
        self._has_lost_signal = self._signal.add_step(report)

    def summarise_steps(
        self, reports: Sequence[StepReport], validations: Sequence[ValidationReport], paths: tuple[str, str, str]
    ) -> None:
        """Compute the summary of the finished run.

        reports: of all steps. paths: of the exported policy and drafter, and of the last checkpoint.
        """
        policy_path, drafter_path, checkpoint_path = paths
        reward = compare_edges([report.reward for report in reports if report.reward is not None])
        accepted = compare_first_with_last([r.acceptance_length for r in reports if r.acceptance_length is not None])
        named = compare_edges_by_name(list_reward_names(reports), [report.rewards for report in reports])
        rewards = [report.reward for report in validations if report.is_judged]
        total = sum(report.phases.wall_seconds for report in reports)
        exposed_s = sum(report.exposed_generation for report in reports)
        self._summary = RunSummary(
            steps=len(reports),
            first_validation_reward=round_figure(rewards[0]) if len(rewards) > 1 else None,
            last_validation_reward=round_figure(rewards[-1]) if rewards else None,
            first_reward=round_figure(reward.first),
            last_reward=round_figure(reward.last),
            reward_steps=reward.steps,
            first_rewards={name: round_figure(edges.first) for name, edges in named.items() if edges.first is not None},
            last_rewards={name: round_figure(edges.last) for name, edges in named.items() if edges.last is not None},
            first_acceptance_length=round_figure(accepted.first),
            last_acceptance_length=round_figure(accepted.last),
            groups=sum(report.groups for report in reports),
            groups_without_signal=sum(report.groups_without_signal for report in reports),
            given_up=ReasonCounts(self._given_up).by_reason,
            policy_lag_max=max((report.policy_lag_max for report in reports), default=0),
            rollouts_trained=sum(report.rollouts for report in reports),
            prompts_trained=sum(report.rollouts for report in reports) // self._context.spec.schedule.group_size,
            unaccounted_rollouts=self._loop.rollouts.unaccounted_rollouts,
            exposed_generation_share=round_figure(exposed_s / total) if total else 0.0,
            exposed_generation=round_figure(exposed_s),
            generation_under_way=round_figure(sum(report.generation_under_way for report in reports)),
            hidden_generation=round_figure(sum(report.hidden_generation for report in reports)),
            weight_sync_seconds=round_figure(sum(report.phases.prepare for report in reports)),
            policy_path=policy_path,
            drafter_path=drafter_path,
            checkpoint_path=checkpoint_path,
            drafter_start=self._context.ledger.facts.drafter_start,
            best_version=self._context.ledger.facts.best_version,
        )

    def report_replicas(self) -> list[ReplicaReport]:
        """Report the present state of each replica, sorted by name."""
        given_up = self._loop.list_given_up_replicas()
        registered = self._context.registry.replicas
        missing = [
            ReplicaReport(id=name, state="givenUp", reason=reason, policy_version=-1, live_rollouts=0)
            for name, reason in given_up.items()
            if name not in registered
        ]
        found = [
            ReplicaReport(
                id=name,
                state="givenUp" if name in given_up else replica.state.value,
                reason=given_up.get(name, replica.reason),
                policy_version=replica.policy_version,
                live_rollouts=replica.inflight,
                drafter_version=replica.drafter_version,
                canary_mean_abs=replica.canary.mean_abs if replica.canary else None,
                canary_max_abs=replica.canary.max_abs if replica.canary else None,
                drafting=drafting.state if drafting else None,
                predicted_gain=drafting.predicted_gain if drafting else None,
                measured_gain=drafting.measured_gain if drafting else None,
            )
            for name, replica in registered.items()
            for drafting in [replica.status.drafting if replica.status else None]
        ]
        return sorted(found + missing, key=lambda replica: replica.id)

    def build_report(self, occupancy: ScheduleOccupancy) -> StatusReport:
        """Build the present status. occupancy: the scheduler's, passed in because it costs a pass over all groups."""
        context = self._context
        ledger = self._context.ledger
        phase = self._context.phase
        trainer = context.registry.trainer
        counters = self._loop.rollouts.counters
        # Prompts that reports name, and those whose step has no complete report yet.
        given_up = [*self._given_up, *ledger.facts.failed_prompts.values()]
        replicas_given_up = dict(self._loop.list_given_up_replicas())
        failed_after, failure = self._checkpoint_failure
        return StatusReport(
            run=context.spec.name,
            phase=phase.phase,
            detail=phase.detail,
            done=phase.done,
            total=phase.total,
            step=ledger.last_trained_step,
            steps=context.spec.schedule.steps,
            policy_version=self._served,
            replicas=self.report_replicas(),
            replica_transitions={
                f"{before.value} -> {after.value}": count
                for (before, after), count in sorted(context.registry.transitions.items())
            },
            is_paused=ledger.facts.is_paused,
            replicas_wanted=self._replicas_wanted,
            checkpoint_step=ledger.facts.checkpoints[-1],
            checkpoint_error=failure if failed_after == ledger.facts.checkpoints[-1] else "",
            is_checkpoint_requested=context.controls.is_checkpoint_requested,
            trainer=self._loop.trainer.state,
            weight_transport=trainer.weight_transport if trainer is not None else "",
            nccl_transport=trainer.nccl_transport if trainer is not None else "",
            rollouts_collected=occupancy.done,
            rollouts_grading=occupancy.grading,
            rollouts_wanted=occupancy.wanted,
            notices=self.notices,
            warnings=self.list_warnings(),
            isolations=self.isolations,
            collapsed_since=self._collapse.collapsed_since,
            counters={
                **{name: counters[name] for name in ("requeued", "resumed", "poisoned", "ungraded")},
                **self._counts,
                "unaccountedRollouts": self._loop.rollouts.unaccounted_rollouts,
                "failedPrompts": len(given_up),
                "replicasGivenUp": len(replicas_given_up),
                "trainerRecoveries": self._loop.trainer.recoveries,
                "canariesSkipped": self._canaries[CanaryOutcome.SKIPPED],
                "canariesDisagreed": self._canaries[CanaryOutcome.DISAGREED],
                "storeRetries": ledger.retry_count,
                "checkpointsFailed": self._checkpoints_failed,
                **self.problems,
            },
            verdict_failures=self._verdict_failures.by_reason,
            given_up=ReasonCounts(given_up).by_reason,
            replicas_given_up=replicas_given_up,
            error=phase.error or None,
            needs_user=phase.needs_user,
            summary=self._summary,
        )
