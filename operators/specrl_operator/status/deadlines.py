"""Times at which a job must be reconciled although no object changes: deadlines, stalls, time to live. Pure.

`reconcile.py` returns the next one as its delay.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from specrl_operator.api import Job, Object, is_condition_true, parse_time
from specrl_operator.plan.decision import TRAINER_EXIT_S

STALL_S = 3600
"""Seconds without reported progress after which Progressing becomes False. Only reported: nothing is restarted."""


def find_next_deadline_s(job: Job, status: Object, now: datetime) -> float | None:
    """Return the seconds until the next deadline; None if there is none. status: the one to be written now."""
    ahead = [(moment - now).total_seconds() for moment in _list_deadlines(job, status) if moment > now]
    # A second late rather than early: an early reconciliation would find the deadline not yet passed.
    return min(ahead) + 1 if ahead else None


def _list_deadlines(job: Job, status: Object) -> list[datetime]:
    spec = job.spec
    # Timestamps, and the seconds after them.
    limits: list[tuple[str | None, float | None]] = []
    if ended := status.get("completionTime"):
        limits = [(ended, spec.ttl_seconds_after_finished), (ended, TRAINER_EXIT_S)]
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
