"""Kubernetes events: one for all children that a reconciliation created, one per changed condition, and one for each
restart of the trainer and each change of the number of replicas. Pure.

Invariant: the same event always gets the same name, so the API server rejects repetitions. `reconcile.py` creates them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from specrl_operator import kinds
from specrl_operator.api import MANAGER, MAX_MESSAGE_LENGTH, Job, Object, find_condition
from specrl_operator.kinds import Kind

EVENT_REASONS = {
    "Accepted": {"True": "Accepted", "False": "NotAccepted"},
    "QuotaReserved": {"True": "QuotaReserved", "False": "WaitingForQuota"},
    "Ready": {"True": "Ready", "False": "NotReady"},
    "Suspended": {"True": "Suspended", "False": "Suspending"},
    "Complete": {"True": "Completed"},
    "Failed": {"True": "Failed"},
}
"""Reason of the event when a condition changes to a status. Other changes create no event."""
WARNINGS = ("NotAccepted", "Failed")


def build_created_event(job: Job, made: Sequence[tuple[Kind, str]]) -> Object:
    """Build one event for all children that were created: each event costs a request, and a job has a dozen."""
    names = ", ".join(f"{kind.name} {name}" for kind, name in made)
    return _build_event(job, "Created", f"created {names}", "Normal", names)


def build_scaled_event(job: Job, before: int, after: int) -> Object:
    """Build the event that the operator asked for another number of replicas."""
    what = f"scaling from {before} to {after} replicas"
    return _build_event(job, "Scaled", what, "Normal", f"{job.generation} {before} {after}")


def build_status_events(job: Job, status: Object) -> Iterator[Object]:
    """Build an event for each condition that differs from the job's previous status, and for a trainer's restart.

    In the first status of all, conditions are False because nothing has started. Only a refusal is an event then.
    """
    for condition in status["conditions"]:
        before = find_condition(job.status, condition["type"])
        reasons = EVENT_REASONS.get(condition["type"], {})
        reason = reasons.get(condition["status"])
        if reason is None or before.get("status") == condition["status"]:
            continue
        if not before and condition["status"] == "False" and reason != "NotAccepted":
            continue
        # Suspended becomes False after a resumption, but also when the pods of a new suspension still run.
        if condition["type"] == "Suspended" and condition["reason"] == "Resumed":
            reason = "Resumed"
        message = condition["message"] or condition["reason"]
        yield _build_event(
            job, reason, message, "Warning" if reason in WARNINGS else "Normal", condition["lastTransitionTime"]
        )
    restarts = status.get("restarts", 0)
    if restarts > (job.status.get("restarts") or 0):
        what = f"the trainer failed and restarts from the newest checkpoint: restart {restarts}"
        yield _build_event(job, "TrainerRestarted", what, "Warning", str(restarts))


def _build_event(job: Job, reason: str, message: str, severity: str, once: str) -> Object:
    """Build an event. once: with job and reason it determines the event's name."""
    mark = hashlib.sha256(f"{job.uid} {reason} {once}".encode()).hexdigest()[:16]
    return kinds.EVENT.build_object(
        {"name": f"{job.name}.{mark}", "namespace": job.namespace},
        type=severity,
        reason=reason,
        action=reason,
        note=message[:MAX_MESSAGE_LENGTH],
        reportingController="specrl.dev/operator",
        reportingInstance=MANAGER,
        regarding=kinds.RLJOB.build_reference(name=job.name, namespace=job.namespace, uid=job.uid),
    )
