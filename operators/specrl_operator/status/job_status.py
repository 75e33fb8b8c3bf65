"""Build an RLJob's status from its plan, the decision and the observed pods. Pure.

    Accepted -> (QuotaReserved) -> PlacementReady -> (StoreReady), CoordinatorReady, TrainerReady, GenerationReady
    -> Ready
    Complete | Failed       terminal: never taken back

The previous status matters only for what must be remembered: transition times, start and completion time, restarts, and
the conditions Started, Suspended, Complete and Failed.

The coordinator writes `status.progress` and the conditions RunFinished, CollectiveReady and DrafterReady under its own
field manager. `build_status` leaves them out, so that server-side apply does not touch them.
"""

from __future__ import annotations

from datetime import datetime

from specrl.spec.cluster import NvLink
from specrl.spec.rljob.status import MULTI_NODE_NVLINK, CoordinatorCondition, MultiNodeNvLink
from specrl_operator.api import MAX_MESSAGE_LENGTH, STORE, ConditionState, Job, Object, find_condition, format_time
from specrl_operator.observed import ObservedState
from specrl_operator.plan.acceptance import Refusal
from specrl_operator.plan.decision import Decision
from specrl_operator.plan.job_plan import JobPlan
from specrl_operator.plan.restarts import count_restarts
from specrl_operator.status.conditions import decide_job_conditions, decide_part_conditions, summarize_state
from specrl_operator.status.deadlines import find_start_time
from specrl_operator.status.readiness import ROLE_CONDITIONS, count_replicas


def build_status(
    plan: JobPlan, decision: Decision, observed: ObservedState, refusal: Refusal | None, now: datetime
) -> Object:
    """Build the whole status except for what the coordinator writes.

    refusal: why the job is not accepted, or why an object that it needs could not be applied.
    """
    job = plan.job
    is_ended = decision.terminal is not None
    shown = [role for role in ROLE_CONDITIONS if role != STORE or plan.has_own_store]
    roles = {role: count_replicas(job, observed, role) for role in shown}
    is_stopped = job.spec.suspend or is_ended
    conditions = decide_part_conditions(plan, observed, refusal, roles, is_stopped=is_stopped)
    conditions |= decide_job_conditions(job, decision, observed, conditions, now)
    moment = format_time(now)
    status: Object = {
        "observedGeneration": job.generation,
        "state": summarize_state(conditions),
        "conditions": [_build_condition(job, kind, condition, moment) for kind, condition in conditions.items()],
        "restarts": count_restarts(plan, observed),
        **roles,
    }
    if placement := _describe_placement(plan, observed):
        status["placement"] = placement
    if is_ended:
        status["startTime"] = job.status.get("startTime") or moment
        status["completionTime"] = job.status.get("completionTime") or moment
    elif started := find_start_time(plan, observed, moment, is_accepted=refusal is None):
        status["startTime"] = started  # left out while it does not count, which removes it
    return status


def build_invalid_status(before: Object, generation: int, reason: str, message: str, now: datetime) -> Object:
    """Build the status of a job that cannot be reconciled: Accepted becomes False, the rest stays as it was."""
    # The operator's own conditions are kept: leaving them out of an apply would remove them.
    kept = [it for it in _list_own_conditions(before) if it["type"] != "Accepted"]
    accepted = find_condition(before, "Accepted")
    moment = accepted["lastTransitionTime"] if accepted.get("status") == "False" else format_time(now)
    refused = {
        "type": "Accepted",
        "status": "False",
        "reason": reason,
        "message": message[:MAX_MESSAGE_LENGTH],
        "lastTransitionTime": moment,
        "observedGeneration": generation,
    }
    return _strip_status(before) | {
        "observedGeneration": generation,
        "state": before.get("state", "NotAccepted") if kept else "NotAccepted",
        "conditions": [refused, *kept],
    }


def is_same_status(before: Object, after: Object) -> bool:
    """Whether two statuses are equal, ignoring what the coordinator writes and the order of conditions."""
    both = [
        _strip_status(status) | {"conditions": {it["type"]: it for it in _list_own_conditions(status)}}
        for status in (before, after)
    ]
    return both[0] == both[1]


def _strip_status(status: Object) -> Object:
    """Return the fields that the operator writes, without conditions."""
    return {name: value for name, value in status.items() if name not in ("progress", "conditions")}


def _list_own_conditions(status: Object) -> list[Object]:
    """List the conditions that the operator writes."""
    return [it for it in status.get("conditions") or [] if it["type"] not in CoordinatorCondition]


def _build_condition(job: Job, kind: str, condition: ConditionState, moment: str) -> Object:
    """Build a condition as in metav1.Condition. lastTransitionTime only changes with the status."""
    before = find_condition(job.status, kind)
    message = condition.message
    status = "True" if condition.is_true else "False"
    return {
        "type": kind,
        "status": status,
        "reason": condition.reason,
        "message": message if len(message) <= MAX_MESSAGE_LENGTH else message[: MAX_MESSAGE_LENGTH - 3] + "...",
        "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == status else moment,
        "observedGeneration": job.generation,
    }


def _describe_placement(plan: JobPlan, observed: ObservedState) -> Object:
    found: Object = {} if observed.domain is None else {"domain": observed.domain}
    if plan.job.spec.placement.nvlink is not NvLink.DISABLED:
        transport = (plan.job.status.get("progress") or {}).get("ncclTransport", "")
        if not plan.has_compute_domain or (transport and MULTI_NODE_NVLINK not in transport):
            found["multiNodeNVLink"] = MultiNodeNvLink.INACTIVE
        else:
            found["multiNodeNVLink"] = MultiNodeNvLink.ACTIVE if transport else MultiNodeNvLink.UNKNOWN
    return found
