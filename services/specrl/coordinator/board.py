"""What people see of a run: keeps the status, turns trained steps into reports, writes them down, counts metrics.

The loop tells it what happened; the REST page, `metrics.jsonl`, `status.json` and Prometheus show it. Nothing reads it
to decide anything.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from specrl.batching import has_signal
from specrl.coordinator.agreement import Comparison
from specrl.coordinator.calibration import CalibrationFile
from specrl.coordinator.curves import Curves, CurvesReport
from specrl.coordinator.edges import compare_edges, compare_first_with_last
from specrl.coordinator.exported import Exported, by_cause
from specrl.coordinator.exposure import RECENT_STEPS, Exposure, exposure
from specrl.coordinator.progress import Progress
from specrl.coordinator.reasons import Reasons
from specrl.coordinator.registry import Registry
from specrl.coordinator.report import (
    DrafterStart,
    Phase,
    ReplicaReport,
    StageSeconds,
    Status,
    StepReport,
    Summary,
    ValidationReport,
)
from specrl.coordinator.report_files import ReportFiles
from specrl.coordinator.store import REPORTS_KEPT
from specrl.coordinator.store_link import StoreLink
from specrl.coordinator.targets import TargetGroup, target_groups
from specrl.records import NO_DRAFTER, Batch, GradedRollout, Group, SpeculationCounters, TrainMetrics
from specrl.spec import RunSpec

if TYPE_CHECKING:
    from specrl.coordinator.rollouts import RolloutStage
    from specrl.coordinator.scheduler import Scheduler
    from specrl.coordinator.sync import Transfer
    from specrl.coordinator.trainer_link import TrainerLink

log = structlog.get_logger(__name__)

DRAFTER_START = "drafterStart"
"""Fact of the store: how the drafter was initialised, once the checkpoint that holds it is complete."""

FAILED_PROMPTS = "failedPrompts"
"""Fact of the store: the reason of every prompt that was given up and is not settled, by group id. Those of settled
ones are in the reports of their steps, so that the fact does not grow with the run."""

VALIDATIONS = "validations"
"""Fact of the store: the first validation and the newest."""

VALIDATIONS_KEPT = REPORTS_KEPT

PAUSED = "paused"
"""Fact of the store: whether people have paused the run (controls.py)."""

CHECKPOINTS = "checkpoints"
"""Fact of the store: the steps of the last two complete checkpoints, the older first."""

MOST_ERRORS = 16
"""Kinds of a verifier's errors that a step's report names."""


@dataclass(frozen=True)
class TrainedStep:
    """What a step trained on, and what the trainer says of it.

    progress: how far the stream is settled with it. overtaken: (own step, index) of prompts that it left behind.
    """

    batch: Batch
    groups: Sequence[Group]
    metrics: TrainMetrics
    progress: Progress
    overtaken: Sequence[tuple[int, int]]


class Board:
    """Status and reports of one run."""

    def __init__(self, spec: RunSpec, directory: Path, registry: Registry, store: StoreLink) -> None:
        self._spec, self._registry, self._store = spec, registry, store
        self._files = ReportFiles(directory)
        self._exported = Exported(spec)
        self._calibration = CalibrationFile(spec, directory)
        self._phase, self._detail, self._done, self._total = Phase.WAITING, "starting", 0, 0
        self._served = -1
        self._counted = SpeculationCounters()
        self._ungraded = 0
        self._canary, self._canary_seconds = Comparison(), 0.0
        self._catching_up_seconds = 0.0
        self._canaries: Counter[str] = Counter()
        self._withheld: StepReport | None = None
        self._checkpoints_failed = 0
        self._problems = {"problemsSkipped": 0, "problemsRepeated": 0}
        self._replicas_wanted: int | None = None
        self._error, self._needs_user = "", False
        self._verdict_failures = Reasons()
        self._summary: Summary | None = None
        self._parts: tuple[Scheduler[GradedRollout], RolloutStage, TrainerLink] | None = None
        self._published = store.trained()
        self._files.append(self.reports(after=self._files.last_step))
        self._files.append_validations(self.validations())
        reports = self._all_reports()
        self._curves = Curves(reports)
        self._recent = deque(reports, maxlen=RECENT_STEPS)
        settled = {group for report in reports for group in report.failed}
        self._given_up = [reason for report in reports for reason in report.failed.values()]
        self._left_out = sum(_count_left_out(report) for report in reports)
        self._steps_skipped = sum(report.is_skipped for report in reports)
        self._verdicts = {"noAnswer": 0, "verifierErrors": 0}
        for report in reports:
            self._count_verdicts(report)
        self._failed = {g: reason for g, reason in (store.fact(FAILED_PROMPTS) or {}).items() if g not in settled}

    def watch(self, scheduler: Scheduler[GradedRollout], stage: RolloutStage, link: TrainerLink) -> None:
        """Show these parts of the run in the status."""
        self._parts = scheduler, stage, link

    def prompts_read(self, skipped: int, repeated: int) -> None:
        """Problems that the run's source was read without, and those whose question it has more than once."""
        self._problems = {"problemsSkipped": skipped, "problemsRepeated": repeated}

    def scaled(self, replicas: int) -> None:
        """The launcher is to keep so many replicas."""
        self._replicas_wanted = replicas

    # -- what the loop tells -------------------------------------------------------------------------------------

    def say(self, phase: Phase, detail: str, done: int = 0, total: int = 0) -> None:
        """What is going on, in words, with progress where it can be counted."""
        moved = phase is not self._phase
        self._phase, self._detail, self._done, self._total = phase, detail, done, total
        if moved:
            self._files.write_status(self.status())

    async def drafter_initialised(self, report: DrafterStart) -> None:
        """The drafter is initialised, and the checkpoint that holds it is complete."""
        await self._store.set_fact(DRAFTER_START, report.model_dump(by_alias=True))

    def begin_training(self) -> None:
        """Acceptance is counted from here on: what an untrained drafter guessed before belongs to no step."""
        self._counted = self._registry.speculation()
        self._canary, self._canary_seconds = Comparison(), 0.0
        self.say(Phase.TRAINING, "training")

    def checkpoint_failed(self, reason: str) -> None:
        """A checkpoint was not written; the run goes on from the one before."""
        self._checkpoints_failed += 1
        self._exported.checkpoint_failed()
        log.error("checkpoint_failed", reason=reason)

    def leave_out(self, counters: SpeculationCounters) -> None:
        """Count these towards no step's acceptance: what replicas did while a canary ran, running rollouts included."""
        self._counted = self._counted.plus(counters)

    def canary_compared(self, comparison: Comparison) -> None:
        """One replica's canary was held against the trainer."""
        self._canary = self._canary.plus(comparison)
        self._exported.canary_compared(comparison)

    def canary_ended(self, outcome: str) -> None:
        """One replica's canary ended: agreed, disagreed, skipped or lost."""
        self._canaries[outcome] += 1
        self._exported.canary_ended(outcome)

    def canary_took(self, seconds: float) -> None:
        """The trainer waited so long for the canary of an update."""
        self._canary_seconds += seconds
        self._exported.canary_took(seconds)

    def verdict_failed(self, reason: str) -> None:
        """The verifier has not judged an answer, for this reason; or a tool has failed before it could."""
        self._verdict_failures.add(reason)

    def caught_up(self, seconds: float) -> None:
        """Replicas that joined were given weights for so long, while the trainer waited for rollouts."""
        self._catching_up_seconds += seconds

    def version_served(self, transfer: Transfer) -> None:
        """Every live replica serves the policy and the drafter of `transfer`."""
        self._served = transfer.policy_version
        oldest = min((replica.drafter_version for replica in self._registry.serving()), default=NO_DRAFTER)
        self._exported.version_served(self._served, None if oldest == NO_DRAFTER else self._served - oldest)

    async def step_trained(self, step: TrainedStep, stages: StageSeconds) -> None:
        """Record a step as trained, durably, with what is known of it; `step_served` completes the report."""
        report = self._report(step, stages, SpeculationCounters())
        report = report.model_copy(update={"failed": self._failed_of(step)})
        await self._store.finish_step(step.batch.step, report.model_dump(by_alias=True), step.overtaken)

    async def step_served(
        self,
        step: TrainedStep,
        transfer: Transfer,
        stages: StageSeconds,
        busy_cores: tuple[float | None, float | None],
        *,
        is_validating: bool,
    ) -> None:
        """Report a step whose version is served; while that is being validated, the report waits for its reward.

        busy_cores: of this machine, while the trainer waited for rollouts and while it trained.
        """
        counters = self._registry.speculation()
        since, self._counted = counters.minus(self._counted), counters
        canary, self._canary = self._canary, Comparison()
        canary_seconds, self._canary_seconds = self._canary_seconds, 0.0
        catching_up_seconds, self._catching_up_seconds = self._catching_up_seconds, 0.0
        ungraded = self._parts[1].counters["ungraded"] if self._parts else 0
        ungraded_since, self._ungraded = ungraded - self._ungraded, ungraded
        report = self._report(step, stages, since).model_copy(
            update={
                "ungraded": ungraded_since,
                **self._validated(step.batch.step),
                "weight_sync": transfer.seconds,
                "checksum": transfer.digest,
                "drafter_version": transfer.drafter_version,
                "canary_mean_abs": canary.mean_abs if canary.tokens else None,
                "canary_max_abs": canary.max_abs if canary.tokens else None,
                "canary_tokens": canary.tokens,
                "canary_seconds": canary_seconds,
                "exposed_by_cause": by_cause(stages.generation, catching_up_seconds),
                "failed": self._failed_of(step),
                **self._drafting(since),
            }
        )
        self._exported.step(report, step.batch.policy_lags)
        replicas = sum(replica.status is not None for replica in self._registry.replicas.values())
        self._calibration.step_ended(report, step.groups, self._registry.step_costs(), replicas, busy_cores)
        if is_validating:
            await self._store.set_report(report.step, report.model_dump(by_alias=True))
            self._withheld = report
        else:
            await self._publish(report)
        self._left_out += _count_left_out(report)
        self._steps_skipped += report.is_skipped
        self._count_verdicts(report)
        if report.failed:
            self._given_up += report.failed.values()
            self._failed = {group: reason for group, reason in self._failed.items() if group not in report.failed}
            await self._store.set_fact(FAILED_PROMPTS, self._failed)

    def _count_verdicts(self, report: StepReport) -> None:
        self._verdicts["noAnswer"] += report.no_answer
        self._verdicts["verifierErrors"] += sum(report.verifier_errors.values())

    def _report(self, step: TrainedStep, stages: StageSeconds, since: SpeculationCounters) -> StepReport:
        report = _report(step, stages, since)
        has_reference = self._spec.trainer.loss.reference_kl is not None
        return report.model_copy(update={"reference_kl": step.metrics.reference_kl if has_reference else None})

    def _failed_of(self, step: TrainedStep) -> dict[str, str]:
        """Prompts that the step settled without training them, with the reason of each."""
        if not self._failed or self._parts is None:
            return {}
        trained = {group.prompt.position for group in step.groups}
        untrained = [self._parts[0].shape.group_id(p) for p in step.batch.positions if p not in trained]
        return {group: self._failed[group] for group in untrained if group in self._failed}

    def _drafting(self, since: SpeculationCounters) -> dict[str, float | None]:
        """What the replicas' draft lengths have been doing."""
        found = [replica.status.drafting for replica in self._registry.serving() if replica.status]
        gains = [item.measured_gain for item in found if item is not None and item.measured_gain is not None]
        return {
            "draft_length": since.draft_tokens / since.drafts if since.drafts else None,
            "speculation_gain": _mean(gains),
            "drafters_resting": sum(item is not None and item.state != "drafting" for item in found),
        }

    async def validated(self, report: ValidationReport | None) -> None:
        """Keep a validation; None when it was lost with its replicas."""
        if report is not None:
            for reason, count in report.failures.items():
                self._verdict_failures.add(reason, count)
            first, newer = self._validations()[:1], self._validations()[1:]
            kept = [*first, *newer[2 - VALIDATIONS_KEPT :], report.model_dump(by_alias=True)]
            await self._store.set_fact(VALIDATIONS, kept)
            self._exported.validated(report)
            self._files.append_validations(self.validations())
        if self._withheld is not None:
            withheld, self._withheld = self._withheld, None
            await self._publish(withheld.model_copy(update=self._validated(withheld.policy_version)))

    @property
    def is_ready(self) -> bool:
        """Whether the run goes on by itself: it has begun, has not failed, and its state can be written."""
        return self._phase not in (Phase.WAITING, Phase.FAILED) and self.is_writable

    @property
    def is_writable(self) -> bool:
        """Whether the store is there."""
        return not self._store.away_because

    def is_validated(self, version: int) -> bool:
        """Whether the reward of `version` is known already."""
        return bool(self._validated(version))

    async def prompt_failed(self, group: str, reason: str) -> None:
        """A prompt was given up: its samples were refused for this reason. Durable when this returns."""
        self._failed = self._failed | {group: reason}
        await self._store.set_fact(FAILED_PROMPTS, self._failed)

    def finish(self, policy_path: str, drafter_path: str, checkpoint_path: str) -> None:
        """The run is over; sum it up."""
        reports = self._all_reports()
        reward = compare_edges([report.reward for report in reports if report.reward is not None])
        accepted = compare_first_with_last([r.acceptance_length for r in reports if r.acceptance_length is not None])
        validations = [report.reward for report in self.validations()]
        total = sum(report.stages.total for report in reports)
        self._summary = Summary(
            steps=len(reports),
            first_validation_reward=validations[0] if len(validations) > 1 else None,
            last_validation_reward=validations[-1] if validations else None,
            first_reward=reward.first,
            last_reward=reward.last,
            reward_steps=reward.steps,
            first_acceptance_length=accepted.first,
            last_acceptance_length=accepted.last,
            groups=sum(report.groups for report in reports),
            groups_without_signal=sum(report.groups_without_signal for report in reports),
            given_up=Reasons(self._given_up).counts,
            policy_lag_max=max((report.policy_lag_max for report in reports), default=0),
            rollouts_trained=sum(report.rollouts for report in reports),
            prompts_trained=sum(report.rollouts for report in reports) // self._spec.schedule.group_size,
            discarded_for_age=self._parts[1].discarded if self._parts else 0,
            exposed_generation_share=sum(r.exposed_generation for r in reports) / total if total else 0.0,
            policy_path=policy_path,
            drafter_path=drafter_path,
            checkpoint_path=checkpoint_path,
            drafter_start=self._store.fact(DRAFTER_START),
        )
        self.say(Phase.FINISHED, "finished")

    def fail(self, error: str, *, needs_user: bool) -> None:
        """The run cannot go on. needs_user: nor could it after a restart, until its user has repaired something."""
        self._error, self._needs_user = error, needs_user
        self.say(Phase.FAILED, "failed")

    # -- what people ask -----------------------------------------------------------------------------------------

    def reports(self, after: int = 0) -> list[StepReport]:
        """Reports of steps > `after`, as far as they are complete and the store keeps them."""
        reports = [StepReport.model_validate(report) for report in self._store.reports(after)]
        return [report for report in reports if report.step <= self._published]

    def page(self, after: int, limit: int) -> list[StepReport]:
        """The first `limit` reports of steps > `after`: the newest are in the store, those before in metrics.jsonl."""
        kept = [report for report in self._store.reports(after) if report["step"] <= self._published]
        first = kept[0]["step"] if kept else self._published + 1
        older = self._files.page(after, first, limit) if after + 1 < first else []
        return older + [StepReport.model_validate(report) for report in kept[: limit - len(older)]]

    def curves(self, first: int, last: int | None, points: int) -> CurvesReport:
        """Numbers of the steps from `first` to `last` (None: the newest), in at most `points` points."""
        return self._curves.report(first, last, points)

    def exposure(self) -> Exposure:
        """Exposed generation over the last steps."""
        return exposure([*self._recent], self._spec, len(self._registry.serving()))

    def progress(self, prompts_per_step: int) -> Progress:
        """How far the stream is settled, by the newest trained step's report, complete or not."""
        step = self._store.trained()
        begun = self._store.begun_after()
        if step == begun.step:
            return begun
        report = StepReport.model_validate(self._store.reports(after=step - 1)[-1])
        return Progress.reported(step, report.cursor, report.ahead, prompts_per_step)

    def newest_report(self) -> StepReport | None:
        """Of the last step that is complete; None before the first."""
        found = self.reports(after=self._published - 1) if self._published else []
        return found[-1] if found else None

    def validations(self) -> list[ValidationReport]:
        """All validations so far."""
        return [ValidationReport.model_validate(report) for report in self._validations()]

    def targets(self, own_scheme: str, own_address: str) -> list[TargetGroup]:
        """Where metrics of the run's processes are scraped."""
        return target_groups(self._spec.name, own_scheme, own_address, self._registry)

    def status(self) -> Status:
        """The run at this moment."""
        replicas = [
            ReplicaReport(
                id=replica.replica_id,
                state=replica.state.value,
                reason=replica.reason,
                policy_version=replica.policy_version,
                live_rollouts=replica.inflight,
                drafter_version=replica.drafter_version,
                canary_mean_abs=replica.canary.mean_abs if replica.canary else None,
                canary_max_abs=replica.canary.max_abs if replica.canary else None,
                drafting=drafting.state if drafting else None,
                predicted_gain=drafting.predicted_gain if drafting else None,
                measured_gain=drafting.measured_gain if drafting else None,
            )
            for _, replica in sorted(self._registry.replicas.items())
            for drafting in [replica.status.drafting if replica.status else None]
        ]
        status = Status(
            run=self._spec.name,
            phase=self._phase,
            detail=self._present_detail(),
            done=self._done,
            total=self._total,
            step=self._store.trained(),
            steps=self._spec.schedule.steps,
            policy_version=self._served,
            replicas=replicas,
            replica_transitions={
                f"{before.value} -> {after.value}": count
                for (before, after), count in sorted(self._registry.transitions.items())
            },
            is_paused=bool(self._store.fact(PAUSED)),
            replicas_wanted=self._replicas_wanted,
            checkpoint_step=(self._store.fact(CHECKPOINTS) or [0])[-1],
            verdict_failures=self._verdict_failures.counts,
            given_up=Reasons([*self._given_up, *self._failed.values()]).counts,
            error=self._error or None,
            needs_user=self._needs_user,
            summary=self._summary,
        )
        if self._parts is None:
            return status
        scheduler, stage, link = self._parts
        occupancy = scheduler.occupancy()
        self._exported.groups(occupancy.groups_in_flight, occupancy.groups_buffered)
        self._exported.replicas(replicas)
        self._exported.paused(status.is_paused)
        counters = {name: stage.counters[name] for name in ("requeued", "resumed", "poisoned", "ungraded")}
        counters |= {
            **self._verdicts,
            "discardedForAge": stage.discarded,
            "failedPrompts": len(self._given_up) + len(self._failed),
            "groupsLeftOut": self._left_out,
            "stepsSkipped": self._steps_skipped,
            "trainerRecoveries": link.recoveries,
            "canariesSkipped": self._canaries["skipped"],
            "canariesDisagreed": self._canaries["disagreed"],
            "storeRetries": self._store.retries,
            "checkpointsFailed": self._checkpoints_failed,
            **self._problems,
        }
        return status.model_copy(
            update={
                "trainer": link.state,
                "rollouts_collected": occupancy.done,
                "rollouts_wanted": occupancy.wanted,
                "counters": counters,
            }
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _present_detail(self) -> str:
        """What is going on, in words; what holds the run up comes before what it was doing."""
        if self._store.away_because:
            return f"waiting for the store: {self._store.away_because}"
        is_going = self._phase in (Phase.WAITING, Phase.INITIALISING, Phase.TRAINING)
        return f"paused; {self._detail}" if is_going and self._store.fact(PAUSED) else self._detail

    async def _publish(self, report: StepReport) -> None:
        await self._store.set_report(report.step, report.model_dump(by_alias=True))
        self._published = report.step
        self._curves.add(report)
        self._recent.append(report)
        self._files.append(self.reports(after=self._files.last_step))
        self._files.write_status(self.status())

    def _all_reports(self) -> list[StepReport]:
        """Of all steps: what the store keeps no longer is read from metrics.jsonl."""
        kept = self.reports()
        return (self._files.before(kept[0].step) if kept else []) + kept

    def _validations(self) -> list[dict[str, Any]]:
        return self._store.fact(VALIDATIONS) or []

    def _validated(self, version: int) -> dict[str, float | None]:
        """What a step's report says of its version's validation; nothing before it."""
        found = next((report for report in self.validations() if report.policy_version == version), None)
        if found is None:
            return {}
        return {
            "validation_reward": found.reward,
            "validation_low": found.reward_low,
            "validation_high": found.reward_high,
        }


def _count_left_out(report: StepReport) -> int:
    return sum(len(places) for places in report.left_out.values())


def _left_out(step: TrainedStep) -> dict[str, list[int]]:
    """Places of groups that are not in the batch, by the one reward of all of their rollouts."""
    trained = {item.rollout.group_id for item in step.batch.rollouts}
    found: dict[str, list[int]] = {}
    for group in step.groups:
        if group.group_id not in trained:
            found.setdefault(f"{group.rewards_G[0]:g}", []).append(group.prompt.position)
    return found


def count_errors(errors: Sequence[str]) -> dict[str, int]:
    """How often each occurs; the rarest together as "other", so that there are at most MOST_ERRORS names."""
    counts = Counter(errors).most_common()
    if len(counts) <= MOST_ERRORS:
        return dict(counts)
    named = counts[: MOST_ERRORS - 1]
    return dict(named) | {"other": len(errors) - sum(count for _, count in named)}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _error(values: Sequence[float]) -> float | None:
    """Standard error of their mean."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _report(step: TrainedStep, stages: StageSeconds, since: SpeculationCounters) -> StepReport:
    lags = step.batch.policy_lags
    rewards = [float(value) for group in step.groups for value in group.rewards_G]
    verdicts = [reward for group in step.groups for reward in group.rewards]
    lengths = [item.rollout.sampled_length for item in step.batch.rollouts]
    trained = step.metrics
    return StepReport(
        step=step.batch.step,
        policy_version=step.batch.step,
        stages=stages,
        exposed_generation=stages.generation,
        reward=_mean(rewards),
        reward_error=_error([float(np.mean(group.rewards_G)) for group in step.groups]),
        groups=len(step.groups),
        rollouts=len(lengths),
        tokens=sum(lengths),
        mean_length=_mean(lengths) or 0.0,
        tool_calls=_mean([len(item.rollout.outputs) for item in step.batch.rollouts]) or 0.0,
        acceptance_length=since.acceptance_length,
        accepted_per_position=[count / since.drafts for count in since.accepted_per_position] if since.drafts else [],
        policy_lag_max=max(lags, default=0),
        policy_lag_mean=_mean(lags) or 0.0,
        policy_lags=np.bincount(lags).tolist() if lags else [],
        cursor=step.progress.cursor,
        ahead=sorted(step.progress.ahead),
        left_out=_left_out(step),
        groups_without_signal=sum(not has_signal(group.rewards_G) for group in step.groups),
        verdicts=len(verdicts),
        no_answer=sum(reward.lacks_answer for reward in verdicts),
        verifier_errors=count_errors([reward.error for reward in verdicts if reward.error]),
        is_skipped=trained.is_skipped,
        updates=trained.updates,
        loss=trained.loss,
        grad_norm=trained.grad_norm,
        learning_rate=trained.learning_rate,
        entropy=trained.entropy,
        clip_fraction=trained.clip_fraction,
        clip_fraction_high=trained.clip_fraction_high,
        importance_capped_fraction=trained.importance_capped_fraction,
        masked_fraction=trained.masked_fraction,
        importance_weight_mean=trained.importance_weight_mean,
        effective_sample_size=trained.effective_sample_size,
        mismatch_mean_abs=trained.mismatch_mean_abs,
        mismatch_max_abs=trained.mismatch_max_abs,
        mismatch_kl=trained.mismatch_kl,
        mismatch_tokens=trained.mismatch_tokens,
        drafter_loss=trained.drafter.loss if trained.drafter else None,
        drafter_acceptance=list(trained.drafter.acceptance_per_position) if trained.drafter else [],
    )
