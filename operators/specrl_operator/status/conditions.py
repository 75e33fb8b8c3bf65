"""The conditions of an RLJob, in the order in which they are shown: first its parts, then the whole job. Pure.

    Accepted -> (QuotaReserved) -> PlacementReady -> (StoreReady), CoordinatorReady, TrainerReady, GenerationReady
    -> Ready, Started, Progressing, (Suspended), (Complete | Failed)

Those in parentheses are only set where they apply. `job_status.py` calls this module.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from specrl.spec.cluster import Gang, NvLink
from specrl.spec.rljob.status import CoordinatorCondition
from specrl_operator.api import (
    GENERATION,
    ConditionState,
    Job,
    Object,
    find_condition,
    format_time,
    is_condition_true,
    parse_time,
)
from specrl_operator.observed import ObservedState
from specrl_operator.plan.acceptance import Refusal, list_notes
from specrl_operator.plan.decision import Decision
from specrl_operator.plan.job_plan import JobPlan
from specrl_operator.status.deadlines import STALL_S
from specrl_operator.status.readiness import REASONS_BY_SEVERITY, ROLE_CONDITIONS, decide_role_condition


def decide_part_conditions(
    plan: JobPlan, observed: ObservedState, refusal: Refusal | None, roles: dict[str, Object], *, is_stopped: bool
) -> dict[str, ConditionState]:
    """Decide the conditions of the job's parts. roles: replica counts by role."""
    found = {"Accepted": ConditionState(True, "Accepted", "; ".join(list_notes(plan)))}
    if refusal is not None:
        found["Accepted"] = ConditionState(False, refusal.reason, refusal.message)
    if plan.gang is Gang.KUEUE:
        found["QuotaReserved"] = _decide_quota(plan, observed)
    found["PlacementReady"] = _decide_placement(plan, observed)
    for role, counts in roles.items():
        condition = decide_role_condition(plan.job, role, observed, counts, is_stopped=is_stopped)
        found[ROLE_CONDITIONS[role]] = condition
    return found


def decide_job_conditions(
    job: Job, decision: Decision, observed: ObservedState, parts: dict[str, ConditionState], now: datetime
) -> dict[str, ConditionState]:
    """Decide the conditions of the whole job. parts: the conditions of its parts."""
    terminal = decision.terminal
    ready = _decide_ready(job, decision, parts)
    # Started latches until a suspension: startupDeadlineSeconds counts again after the job is resumed.
    is_started = ready.is_true or (is_condition_true(job.status, "Started") and not job.spec.suspend)
    found = {
        "Ready": ready,
        "Started": ConditionState(is_started, "AllPartsReady" if is_started else "PartsNotReady"),
        "Progressing": _decide_progressing(job, decision, now),
    }
    if job.spec.suspend:
        left = f"waiting for {len(observed.pods)} pods to stop" if observed.pods else ""
        found["Suspended"] = ConditionState(not left, "Suspending" if left else "PodsDeleted", left)
    elif find_condition(job.status, "Suspended"):
        found["Suspended"] = ConditionState(False, "Resumed")
    if terminal is not None:
        found[terminal.type] = ConditionState(True, terminal.reason, terminal.message)
    return found


def summarize_state(conditions: dict[str, ConditionState]) -> str:
    """Summarize the conditions in one word, for `kubectl get`."""
    for kind in ("Failed", "Complete"):
        if kind in conditions:
            return kind
    if not conditions["Accepted"].is_true:
        return "NotAccepted"
    suspended = conditions.get("Suspended")
    quota = conditions.get("QuotaReserved")
    if suspended is not None and suspended.reason != "Resumed":
        return "Suspended" if suspended.is_true else "Suspending"
    if quota is not None and quota.reason == "Pending":
        return "Queued"
    if conditions["Ready"].is_true:
        return "Running"
    return "Degraded" if conditions["Started"].is_true else "Starting"


def _decide_quota(plan: JobPlan, observed: ObservedState) -> ConditionState:
    """Decide whether Kueue has admitted everything."""
    if _waits_for_sandbox(plan, observed):
        return ConditionState(False, "NotRequested", "nothing is queued yet; see PlacementReady")
    waiting = []
    # Kueue suspends a JobSet or Job until it is admitted, and holds plain pods back by a scheduling gate.
    if observed.trainer is None or observed.trainer.get("spec", {}).get("suspend"):
        waiting.append("the trainer")
    gated = [pod for pod in observed.pods_of(GENERATION) if pod.get("spec", {}).get("schedulingGates")]
    if gated:
        waiting.append(f"{len(gated)} replica pods")
    if waiting:
        return ConditionState(False, "Pending", f"waiting for quota: {' and '.join(waiting)}")
    return ConditionState(True, "Admitted")


def _waits_for_sandbox(plan: JobPlan, observed: ObservedState) -> bool:
    """Whether trainer and replicas are not asked for until the coordinator has tried the sandbox (`decision.py`)."""
    return plan.awaits_sandbox and not observed.has_requested_parts


def _decide_placement(plan: JobPlan, observed: ObservedState) -> ConditionState:
    if _waits_for_sandbox(plan, observed):
        why = "trainer and replicas wait until the coordinator has tried the sandbox of the policy's programs"
        return ConditionState(False, "WaitingForSandbox", why)
    if plan.has_compute_domain:
        if observed.has_claim_template:
            return ConditionState(True, "ClaimTemplateExists")
        why = f"waiting for NVIDIA's DRA driver to create the ResourceClaimTemplate {plan.claim_template}"
        return ConditionState(False, "WaitingForComputeDomain", why)
    if plan.job.spec.placement.nvlink is NvLink.REQUIRED:
        return ConditionState(False, "MultiNodeNVLinkUnavailable", "see condition Accepted")
    return ConditionState(True, "NotRequired")


def _decide_ready(job: Job, decision: Decision, parts: dict[str, ConditionState]) -> ConditionState:
    """Decide whether the job is ready; if not, with the reason of the part that explains most."""
    if decision.terminal is not None:
        return ConditionState(False, decision.terminal.reason, decision.terminal.message)
    if job.spec.suspend:
        return ConditionState(False, "Suspended", "spec.suspend is true")
    missing = [kind for kind, condition in parts.items() if not condition.is_true]
    if not missing:
        return ConditionState(True, "AllPartsReady")
    # Reasons outside of REASONS_BY_SEVERITY come first, such as those of Accepted or PlacementReady: they are why pods
    # do not exist at all.
    worst = min(
        missing,
        key=lambda kind: (
            REASONS_BY_SEVERITY.index(parts[kind].reason) if parts[kind].reason in REASONS_BY_SEVERITY else -1
        ),
    )
    return ConditionState(False, parts[worst].reason, f"{worst}: {parts[worst].message}")


def _decide_progressing(job: Job, decision: Decision, now: datetime) -> ConditionState:
    """Decide whether steps are being trained, from the progress that the coordinator reports."""
    progress = job.status.get("progress") or {}
    if job.spec.suspend or decision.terminal is not None:
        return ConditionState(False, "Stopped")
    if not progress.get("lastUpdateTime"):
        return ConditionState(False, "NoStepTrained", "the coordinator has not reported progress yet")
    broken = find_condition(job.status, CoordinatorCondition.COLLECTIVE_READY)
    step = progress.get("step", 0)
    if broken.get("status") == "False":
        return ConditionState(False, broken.get("reason", "CollectiveFailed"), broken.get("message", ""))
    if progress.get("paused"):
        return ConditionState(
            False, "Paused", f"a user paused the run after step {step}; resume it with `specrl resume`"
        )
    since = parse_time(progress["lastUpdateTime"])
    if now - since >= timedelta(seconds=STALL_S):
        why = f"the coordinator has reported no progress since step {step} at {format_time(since)}; see its log"
        return ConditionState(False, "Stalled", why)
    return ConditionState(True, "StepsTrained")
