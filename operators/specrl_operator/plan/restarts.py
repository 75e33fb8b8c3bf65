"""Count the trainer's restarts: JobSet's own, or the operator's where the trainer is a Job. Pure.

A Job carries the number of its attempt, from 0, as an annotation. After a failure the next number is written to the
RLJob's status first. Then the Job is deleted, and created again with that number. Each restart is therefore counted
once, even if the operator dies in between.
"""

from __future__ import annotations

from specrl_operator import kinds
from specrl_operator.api import ATTEMPT_ANNOTATION, Job, Object, is_condition_true
from specrl_operator.observed import ObservedState
from specrl_operator.plan.job_plan import JobPlan


def read_attempt(trainer: Object) -> int:
    """Read the attempt of a trainer's Job, from 0."""
    return int((trainer["metadata"].get("annotations") or {}).get(ATTEMPT_ANNOTATION, "0"))


def read_restarts(job: Job) -> int:
    """Read the restarts that the job's status counts."""
    return int(job.status.get("restarts") or 0)


def count_restarts(plan: JobPlan, observed: ObservedState) -> int:
    """Count the trainer's restarts, including one that is due now. The count never falls."""
    trainer = observed.trainer
    recorded = read_restarts(plan.job)
    if trainer is None:
        return recorded
    status = trainer.get("status") or {}
    if not kinds.JOB.is_kind_of(trainer):
        # A new JobSet, as after a suspension, counts from 0 again.
        return max(int(status.get("restarts", 0)), recorded)
    attempt = read_attempt(trainer)
    is_due = is_condition_true(status, "Failed") and attempt < plan.max_restarts
    return max(recorded, attempt + 1 if is_due else attempt)
