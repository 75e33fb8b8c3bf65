"""Kubernetes events: one for all children that a look has made, one for each condition that turns. Pure.

Their reasons are all here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from specrl_operator.api import EVENT, MANAGER, RLJOB, Job, Kind, Object, condition_of
from specrl_operator.status import COLLECTIVE_READY, LONGEST_MESSAGE, RUN_FINISHED

KIND = EVENT
OTHERS_WRITE = (RUN_FINISHED, COLLECTIVE_READY)
"""Conditions of other field managers."""
TOLD = {
    "Accepted": {"True": "Accepted", "False": "NotAccepted"},
    "QuotaReserved": {"True": "QuotaReserved", "False": "WaitingForQuota"},
    "Ready": {"True": "Ready", "False": "NotReady"},
    "Suspended": {"True": "Suspended", "False": "Suspending"},
    "Complete": {"True": "Complete"},
    "Failed": {"True": "Failed"},
}
"""Conditions whose turns are told, and the reasons under which."""
WARNINGS = ("NotAccepted", "Failed")


def created(job: Job, made: Sequence[tuple[Kind, str]]) -> Object:
    """Children were made. One event for all: each costs a request, and a job has a dozen children."""
    names = ", ".join(f"{kind.name} {name}" for kind, name in made)
    return _event(job, "Created", f"created {names}", "Normal", names)


def transitions(job: Job, status: Object) -> Iterator[Object]:
    """What turns with a status that replaces the job's. The first status of all tells no `False` but a refusal."""
    for condition in status["conditions"]:
        before = condition_of(job.status, condition["type"])
        reasons = TOLD.get(condition["type"], {})
        reason = reasons.get(condition["status"])
        if reason is None or before.get("status") == condition["status"]:
            continue
        if not before and condition["status"] == "False" and reason != "NotAccepted":
            continue
        if condition["type"] == "Suspended" and condition["reason"] == "Resumed":
            reason = "Resumed"
        message = condition["message"] or condition["reason"]
        yield _event(
            job, reason, message, "Warning" if reason in WARNINGS else "Normal", condition["lastTransitionTime"]
        )


def _event(job: Job, reason: str, message: str, severity: str, once: str) -> Object:
    """`once`: two events that are told for the same thing get the same name, and the second is refused."""
    mark = hashlib.sha256(f"{job.uid} {reason} {once}".encode()).hexdigest()[:16]
    return KIND.object(
        {"name": f"{job.name}.{mark}", "namespace": job.namespace},
        type=severity,
        reason=reason,
        action=reason,
        note=message[:LONGEST_MESSAGE],
        reportingController="specrl.dev/operator",
        reportingInstance=MANAGER,
        regarding={
            "apiVersion": RLJOB.api_version,
            "kind": RLJOB.name,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
    )
