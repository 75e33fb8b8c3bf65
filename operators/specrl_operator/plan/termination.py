"""Find a job's terminal condition, Complete or Failed. Pure.

Invariant: a terminal condition is never taken back. `decision.py` calls this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from specrl.spec.cluster import OnTrainerFailure
from specrl.spec.rljob.status import CoordinatorCondition
from specrl_operator import kinds
from specrl_operator.api import (
    COORDINATOR,
    GENERATION,
    MAX_MESSAGE_LENGTH,
    TRAINER,
    Job,
    find_condition,
    has_elapsed,
    is_condition_true,
)
from specrl_operator.observed import (
    ObservedState,
    count_container_restarts,
    find_last_exit,
    find_own_exit,
    is_pod_ready,
)
from specrl_operator.plan.job_plan import JobPlan
from specrl_operator.plan.restarts import read_attempt

NEEDS_USER_EXIT_CODE = 2
"""Exit code for errors that only the user can fix, so that a restart does not help (`SpecrlError.exit_code`)."""


@dataclass(frozen=True)
class TerminalCondition:
    """Complete or Failed, and why."""

    type: str
    reason: str
    message: str


def find_terminal_condition(plan: JobPlan, observed: ObservedState, now: datetime) -> TerminalCondition | None:
    """Return the terminal condition that the job has or gets now; None while it goes on."""
    for kind in ("Complete", "Failed"):
        if is_condition_true(plan.job.status, kind):
            condition = find_condition(plan.job.status, kind)
            return TerminalCondition(kind, condition["reason"], condition["message"])
    found = next(_find_terminal(plan, observed, now), None)
    return found if found is None or found.type == "Complete" else _say_how_to_continue(plan.job, found)


def _say_how_to_continue(job: Job, failed: TerminalCondition) -> TerminalCondition:
    """Add to the message of a failed run that has trained a step where a new job finds its checkpoints."""
    claim = job.spec.checkpoint.claim_name
    if claim is None or not (job.status.get("progress") or {}).get("step"):
        return failed
    hint = f"; continue it in a new RLJob with checkpoint.from: {{claimName: {claim}, folder: {job.run_name}}}"
    return replace(failed, message=failed.message[: MAX_MESSAGE_LENGTH - len(hint)] + hint)


def _find_terminal(plan: JobPlan, observed: ObservedState, now: datetime) -> Iterator[TerminalCondition]:
    """Yield every reason to end the job now, the most specific first."""
    finished = find_condition(plan.job.status, CoordinatorCondition.RUN_FINISHED)
    if finished.get("status") == "True":
        yield TerminalCondition("Complete", "MaxStepsReached", finished.get("message") or "all steps are trained")
    if plan.job.spec.suspend:
        return  # exit codes of pods that were stopped, and deadlines, do not fail a suspended job
    yield from _find_refused_run(plan.job, observed)
    yield from _find_crashed_coordinator(plan.job, observed)
    yield from _find_failed_trainer(plan, observed)
    yield from _find_missed_deadline(plan.job, now)


def _find_refused_run(job: Job, observed: ObservedState) -> Iterator[TerminalCondition]:
    """Find processes that exited with NEEDS_USER.

    A replica's exit counts only until the run has started once. Later the run goes on with its other replicas.
    """
    for component in (COORDINATOR, TRAINER, GENERATION):
        for pod in observed.pods_of(component):
            if component == COORDINATOR and "deletionTimestamp" in pod["metadata"]:
                continue  # a node that was cut off held it, and it ended because a newer one has taken the run over
            code, message = find_own_exit(pod)
            if code == NEEDS_USER_EXIT_CODE and (
                component != GENERATION or not is_condition_true(job.status, "Started")
            ):
                yield TerminalCondition("Failed", "RunRefused", f"{pod['metadata']['name']}: {message}")


def _find_crashed_coordinator(job: Job, observed: ObservedState) -> Iterator[TerminalCondition]:
    for pod in observed.pods_of(COORDINATOR):
        restarts = count_container_restarts(pod)
        code, message = find_own_exit(pod)
        # Ready again means that the last restart helped, whatever the count.
        if restarts > job.spec.failure_policy.max_restarts and code not in (None, 0) and not is_pod_ready(pod):
            why = f"the coordinator crashed and was restarted {restarts} times, more than maxRestarts allows: {message}"
            yield TerminalCondition("Failed", "BackoffLimitExceeded", why)


def _find_failed_trainer(plan: JobPlan, observed: ObservedState) -> Iterator[TerminalCondition]:
    trainer = observed.trainer
    if trainer is None or not is_condition_true(trainer.get("status", {}), "Failed"):
        return
    if kinds.JOB.is_kind_of(trainer) and read_attempt(trainer) < plan.max_restarts:
        return  # restarted by `count_restarts` and `decision.py`; a JobSet fails only after its own restarts
    why = next((message for pod in observed.pods_of(TRAINER) for code, message in [find_last_exit(pod)] if code), "")
    said = find_condition(trainer["status"], "Failed").get("message") or "its pods failed"
    only = plan.job.spec.failure_policy.on_trainer_failure is OnTrainerFailure.FAIL
    reason = "TrainerFailed" if only else "BackoffLimitExceeded"
    yield TerminalCondition("Failed", reason, f"the trainer failed: {said}" + (f"; {why}" if why else ""))


def _find_missed_deadline(job: Job, now: datetime) -> Iterator[TerminalCondition]:
    started = job.status.get("startTime")
    limit_s = job.spec.active_deadline_seconds
    if has_elapsed(started, limit_s, now):
        yield TerminalCondition(
            "Failed",
            "DeadlineExceeded",
            f"the job ran longer than activeDeadlineSeconds={limit_s}; raise it to let a new job run longer",
        )
    limit_s = job.spec.startup_deadline_seconds
    if has_elapsed(started, limit_s, now) and not is_condition_true(job.status, "Started"):
        yield TerminalCondition(
            "Failed",
            "StartupDeadlineExceeded",
            f"the job was not ready within startupDeadlineSeconds={limit_s}: "
            f"{find_condition(job.status, 'Ready').get('message') or 'see the other conditions'}",
        )
