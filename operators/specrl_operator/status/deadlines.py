"""Times at which a job must be reconciled although no object changes: deadlines, stalls, time to live. Pure.

`reconcile.py` returns the next one as its delay.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from specrl.spec.cluster import Gang
from specrl_operator.api import GENERATION, Job, Object, is_condition_true, parse_time
from specrl_operator.observed import ObservedState
from specrl_operator.plan.decision import TRAINER_EXIT_S
from specrl_operator.plan.job_plan import JobPlan

STALL_S = 3600
"""Seconds without reported progress after which Progressing becomes False. Only reported: nothing is restarted."""


def find_start_time(plan: JobPlan, observed: ObservedState, moment: str, *, is_accepted: bool) -> str | None:
    """Return status.startTime, from which deadlines count; None while they do not count. moment: now.

    A job starts when it is accepted, and in a queue of Kueue when its first part is admitted: from then on it holds
    GPUs. A later refusal stops no deadline. They begin anew after a suspension, or when Kueue has evicted all parts.
    """
    job = plan.job
    if job.spec.suspend or (plan.gang is Gang.KUEUE and not _has_admitted_part(observed)):
        return None
    return job.status.get("startTime") or (moment if is_accepted else None)


def _has_admitted_part(observed: ObservedState) -> bool:
    """Whether Kueue lets the trainer or a replica run: it suspends the one and gates the pods of the other."""
    trainer = observed.trainer
    is_trainer_admitted = trainer is not None and not trainer.get("spec", {}).get("suspend")
    return is_trainer_admitted or any(
        not pod.get("spec", {}).get("schedulingGates") for pod in observed.pods_of(GENERATION)
    )


def find_next_deadline_s(job: Job, status: Object, now: datetime, ttl_s: int | None) -> float | None:
    """Return the seconds until the next deadline; None if there is none.

    status: the one to be written now. ttl_s: time to live of the job after its end; None: no limit.
    """
    ahead = [(moment - now).total_seconds() for moment in _list_deadlines(job, status, ttl_s) if moment > now]
    # A second late rather than early: an early reconciliation would find the deadline not yet passed.
    return min(ahead) + 1 if ahead else None


def _list_deadlines(job: Job, status: Object, ttl_s: int | None) -> list[datetime]:
    spec = job.spec
    # Timestamps, and the seconds after them.
    limits: list[tuple[str | None, float | None]] = []
    if ended := status.get("completionTime"):
        limits = [(ended, ttl_s), (ended, TRAINER_EXIT_S)]
    elif (started := status.get("startTime")) and not spec.suspend:
        limits = [(started, spec.active_deadline_seconds)]
        if not is_condition_true(status, "Started"):
            limits.append((started, spec.startup_deadline_seconds))
        limits.append(((job.status.get("progress") or {}).get("lastUpdateTime"), STALL_S))
    return [
        parse_time(since) + timedelta(seconds=limit_s)
        for since, limit_s in limits
        if since is not None and limit_s is not None
    ]
