"""An RLJob's status from what is there. Pure: the same job and observation, the same status, whatever came before.

    Accepted -> (QuotaReserved) -> PlacementReady -> CoordinatorReady, TrainerReady, GenerationReady -> Ready
    Complete | Failed       each the last word: never taken back

What came before counts for three things alone: when a condition last changed, when the job started, and a last word.
Under other field managers, and untouched here: `status.progress` and the conditions RunFinished, CollectiveReady and
DrafterReady, which the coordinator writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from specrl.spec.cluster import Gang, NvLink, OnTrainerFailure
from specrl_operator import placement, schedulers
from specrl_operator.acceptance import Refusal, notes_of
from specrl_operator.api import (
    ATTEMPT_ANNOTATION,
    COMPONENT_LABEL,
    COORDINATOR,
    GENERATION,
    JOB,
    LEADER_LABEL,
    TRAINER,
    Job,
    Object,
    condition_of,
    is_true,
    read_time,
    write_time,
)
from specrl_operator.children import max_restarts
from specrl_operator.facts import Facts, Want

RUN_FINISHED, COLLECTIVE_READY = "RunFinished", "CollectiveReady"
"""Conditions that the coordinator writes."""
ORDER = (
    "Accepted",
    "QuotaReserved",
    "PlacementReady",
    "CoordinatorReady",
    "TrainerReady",
    "GenerationReady",
    "Ready",
    "Started",
    "Progressing",
    "Suspended",
    "Complete",
    "Failed",
)
ROLES = {COORDINATOR: "CoordinatorReady", TRAINER: "TrainerReady", GENERATION: "GenerationReady"}
STALL_S = 3600
"""A step that takes longer is taken for a standstill: it says so, and nothing is done about it."""
LONGEST_MESSAGE = 1024
NEEDS_USER = 2
"""Exit code of a process that a restart does not help (`SpecrlError.exit_code`)."""


@dataclass(frozen=True)
class Observed:
    """A job's children at one moment."""

    trainer: Object | None = None
    """JobSet or Job."""
    generation: Object | None = None
    pods: tuple[Object, ...] = ()
    has_claim_template: bool = False
    domain: str | None = None
    """Of the nodes that the trainer's pods are bound to."""
    refusal: Refusal | None = None
    """Why the job is not accepted, or an object that it needs could not be applied."""

    def of(self, component: str) -> list[Object]:
        """Pods of a component that are not on their way out, by name."""
        found = [pod for pod in self.pods if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == component]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))


@dataclass(frozen=True)
class Ending:
    """How a job ended: a terminal condition."""

    condition: str
    reason: str
    message: str


def ending_of(job: Job, observed: Observed, now: datetime) -> Ending | None:
    """The last word on a job, if it has been spoken; the first one stays."""
    for kind in ("Complete", "Failed"):
        if is_true(job.status, kind):
            said = condition_of(job.status, kind)
            return Ending(kind, said["reason"], said["message"])
    return next(_endings(job, observed, now), None)


def _endings(job: Job, observed: Observed, now: datetime) -> Iterator[Ending]:
    finished = condition_of(job.status, RUN_FINISHED)
    if finished.get("status") == "True":
        yield Ending("Complete", "MaxStepsReached", finished.get("message") or "all steps are trained")
    if job.spec.suspend:
        return
    for component in (COORDINATOR, TRAINER, GENERATION):
        for pod in observed.of(component):
            code, message = _last_exit(pod)
            if code == NEEDS_USER and (component != GENERATION or not is_true(job.status, "Started")):
                yield Ending("Failed", "RunRefused", f"{pod['metadata']['name']}: {message}")
    for pod in observed.of(COORDINATOR):
        restarts, (code, message) = _restarts(pod), _last_exit(pod)
        if restarts > job.spec.failure_policy.max_restarts and code not in (None, 0) and not _is_ready(pod):
            yield Ending("Failed", "BackoffLimitExceeded", f"the coordinator failed {restarts} times: {message}")
    yield from _trainer_endings(job, observed)
    if job.status.get("startTime"):
        started, spec = read_time(job.status["startTime"]), job.spec
        if spec.active_deadline_seconds is not None and now >= started + timedelta(
            seconds=spec.active_deadline_seconds
        ):
            yield Ending(
                "Failed",
                "DeadlineExceeded",
                f"the job has run for activeDeadlineSeconds={spec.active_deadline_seconds}; raise it to go on longer",
            )
        late = spec.startup_deadline_seconds
        if late is not None and not is_true(job.status, "Started") and now >= started + timedelta(seconds=late):
            yield Ending(
                "Failed",
                "StartupDeadlineExceeded",
                f"not all parts were ready within startupDeadlineSeconds={late}: "
                f"{condition_of(job.status, 'Ready').get('message') or 'see the other conditions'}",
            )


def _trainer_endings(job: Job, observed: Observed) -> Iterator[Ending]:
    trainer = observed.trainer
    if trainer is None or not is_true(trainer.get("status", {}), "Failed"):
        return
    if JOB.is_of(trainer) and attempt_of(trainer) < max_restarts(job):
        return
    why = next((message for pod in observed.of(TRAINER) for code, message in [_last_exit(pod)] if code), "")
    said = condition_of(trainer["status"], "Failed").get("message") or "its pods failed"
    only = job.spec.failure_policy.on_trainer_failure is OnTrainerFailure.FAIL
    reason = "TrainerFailed" if only else "BackoffLimitExceeded"
    yield Ending("Failed", reason, f"the trainer failed: {said}" + (f"; {why}" if why else ""))


def attempt_of(trainer: Object) -> int:
    """Which start of a trainer a Job is, from 0."""
    return int((trainer["metadata"].get("annotations") or {}).get(ATTEMPT_ANNOTATION, "0"))


def attempts(job: Job, observed: Observed) -> int:
    """The start that a trainer without JobSet is at, or due for: one more than that of a Job that has failed."""
    trainer, counted = observed.trainer, int(job.status.get("restarts") or 0)
    if trainer is None or not JOB.is_of(trainer):
        return counted
    at = attempt_of(trainer)
    failed = is_true(trainer.get("status", {}), "Failed")
    return max(counted, at + 1 if failed and at < max_restarts(job) else at)


def want_of(job: Job, facts: Facts, observed: Observed, ending: Ending | None) -> Want:
    """How much of the job is to run now."""
    if ending is not None and ending.condition == "Complete":
        return Want.ENDED
    if ending is not None or job.spec.suspend:
        return Want.SAVING if observed.of(COORDINATOR) else Want.STOPPED
    waits = placement.has_domain(job, facts) and not observed.has_claim_template
    if waits and observed.trainer is None and observed.generation is None:
        return Want.WAITING
    return Want.RUNNING


def has_trainer_ended(observed: Observed) -> bool:
    """Whether the trainer's object says that nothing of it runs any more, nor will."""
    status = (observed.trainer or {}).get("status") or {}
    return is_true(status, "Failed") or is_true(status, "Complete") or is_true(status, "Completed")


def summarize(job: Job, facts: Facts, observed: Observed, now: datetime) -> Object:
    """The whole status but for what the coordinator writes."""
    ending = ending_of(job, observed, now)
    found: dict[str, tuple[bool, str, str]] = {}

    def say(kind: str, is_so: bool, reason: str, message: str = "") -> None:
        found[kind] = (is_so, reason, message)

    refusal = observed.refusal
    notes = "; ".join(notes_of(job, facts))
    say("Accepted", refusal is None, refusal.reason if refusal else "Runnable", refusal.message if refusal else notes)
    is_stopped = job.spec.suspend or ending is not None
    if schedulers.gang_of(job) is Gang.KUEUE:
        waiting = _waiting_for_quota(observed)
        say("QuotaReserved", not waiting, "Pending" if waiting else "Admitted", waiting)
    say("PlacementReady", *_placed(job, facts, observed))
    roles = {role: _role(job, observed, role) for role in ROLES}
    for role, kind in ROLES.items():
        say(kind, *_readiness(job, role, observed, roles[role], is_stopped))
    missing = [kind for kind in ORDER[:6] if kind in found and not found[kind][0]]
    missing.sort(key=lambda kind: _rank(found[kind][1]))
    if ending is not None:
        say("Ready", False, ending.reason, ending.message)
    elif job.spec.suspend:
        say("Ready", False, "Suspended", "spec.suspend is true")
    elif missing:
        say("Ready", False, found[missing[0]][1], f"{missing[0]}: {found[missing[0]][2]}")
    else:
        say("Ready", True, "AllPartsReady")
    is_started = found["Ready"][0] or (is_true(job.status, "Started") and not job.spec.suspend)
    say("Started", is_started, "AllPartsWereReady" if is_started else "NotYet")
    say("Progressing", *_progress(job, now, is_stopped))
    if job.spec.suspend:
        left = f"{len(observed.pods)} pods left" if observed.pods else ""
        say("Suspended", not left, "Suspending" if left else "AllPodsGone", left)
    elif condition_of(job.status, "Suspended"):
        say("Suspended", False, "Resumed")
    if ending is not None:
        say(ending.condition, True, ending.reason, ending.message)
    more = {"restarts": _all_restarts(job, observed), **roles}
    if where := _where(job, facts, observed):
        more["placement"] = where
    return _assembled(job, found, more, now)


def _where(job: Job, facts: Facts, observed: Observed) -> Object:
    where: Object = {} if observed.domain is None else {"domain": observed.domain}
    if job.spec.placement.nvlink is not NvLink.DISABLED:
        where["multiNodeNVLink"] = "Active" if placement.is_nvlink_active(job, facts) else "Inactive"
    return where


def _placed(job: Job, facts: Facts, observed: Observed) -> tuple[bool, str, str]:
    if placement.has_domain(job, facts):
        if observed.has_claim_template:
            return True, "ClaimTemplateExists", ""
        template = placement.claim_template(job)
        return False, "WaitingForComputeDomain", f"the ComputeDomain's ResourceClaimTemplate {template} is not there"
    if job.spec.placement.nvlink is NvLink.REQUIRED:
        return False, "MultiNodeNVLinkUnavailable", "see condition Accepted"
    return True, "NothingNeeded", ""


def _assembled(job: Job, found: dict[str, tuple[bool, str, str]], more: Object, now: datetime) -> Object:
    """The status of these conditions, in their order; `more` is the rest of it."""
    moment = write_time(now)
    conditions = []
    for kind in ORDER:
        if kind not in found:
            continue
        is_so, reason, message = found[kind]
        said, before = "True" if is_so else "False", condition_of(job.status, kind)
        since = before["lastTransitionTime"] if before.get("status") == said else moment
        conditions.append(
            {
                "type": kind,
                "status": said,
                "reason": reason,
                "message": _cut(message),
                "lastTransitionTime": since,
                "observedGeneration": job.generation,
            }
        )
    status: Object = {
        "observedGeneration": job.generation,
        "state": _state(found),
        "conditions": conditions,
        **more,
    }
    is_begun = found["Accepted"][0] and not job.spec.suspend
    if is_begun or any(kind in found for kind in ("Complete", "Failed")):
        status["startTime"] = job.status.get("startTime") or moment
    if any(kind in found for kind in ("Complete", "Failed")):
        status["completionTime"] = job.status.get("completionTime") or moment
    return status


def _state(found: dict[str, tuple[bool, str, str]]) -> str:
    """One word for people, from the conditions alone."""

    def holds(kind: str) -> bool | None:
        return found[kind][0] if kind in found else None

    for kind in ("Failed", "Complete"):
        if holds(kind):
            return kind
    if not holds("Accepted"):
        return "NotAccepted"
    if holds("Suspended") is not None and found["Suspended"][1] != "Resumed":
        return "Suspended" if holds("Suspended") else "Suspending"
    if holds("QuotaReserved") is False:
        return "Queued"
    if holds("Ready"):
        return "Running"
    return "Degraded" if holds("Started") else "Starting"


def _role(job: Job, observed: Observed, role: str) -> Object:
    """Replica counts of a role, from its pods; of the replicas, what the scale subresource shows."""
    wanted = {COORDINATOR: 1, TRAINER: job.spec.trainer.num_nodes, GENERATION: job.spec.generation.replicas}[role]
    pods = observed.of(role)
    if role != GENERATION:
        return {"replicas": wanted, "readyReplicas": sum(map(_is_ready, pods))}
    leaders = [pod for pod in pods if pod["metadata"]["labels"].get(LEADER_LABEL) == "true"]
    return {
        "replicas": len(leaders),
        "readyReplicas": sum(map(_is_ready, leaders)),
        "selector": job.scale_selector,
    }


def _readiness(job: Job, role: str, observed: Observed, counts: Object, is_stopped: bool) -> tuple[bool, str, str]:
    wanted = counts["replicas"]
    if role == GENERATION:
        wanted = min(job.spec.failure_policy.min_generation_replicas, job.spec.generation.replicas)
    ready = counts["readyReplicas"]
    if is_stopped:
        return False, "Stopped", f"{ready} pods left" if ready else ""
    if ready >= wanted:
        return True, "PodsReady", f"{ready} ready"
    reason, why = _trouble(observed.of(role))
    return False, reason, f"{ready} of at least {wanted} ready" + (f": {why}" if why else "")


def _trouble(pods: Sequence[Object]) -> tuple[str, str]:
    """The worst of what keeps pods from being ready, and of which pod; the same whatever their order."""
    found = [(*_trouble_of(pod), str(pod["metadata"]["name"])) for pod in pods if not _is_ready(pod)]
    if not found:
        return "PodsPending", "no pods yet"
    reason, message, name = min(found, key=lambda it: (_WORST.index(it[0]), it[2]))
    return reason, f"{name}: {message}" if message else name


_WORST = (
    "ImagePullFailed",
    "ConfigurationMissing",
    "CrashLooping",
    "InsufficientCapacity",
    "PodsPending",
    "PodsNotReady",
)


def _rank(reason: str) -> int:
    """How much a part's reason explains: a coordinator is not ready because the others are not."""
    return _WORST.index(reason) if reason in _WORST else -1


def _trouble_of(pod: Object) -> tuple[str, str]:
    for state in _containers(pod):
        waiting = (state.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"):
            return "ImagePullFailed", message or str(state.get("image", ""))
        if reason in ("CreateContainerConfigError", "CreateContainerError"):
            return "ConfigurationMissing", message
    code, message = _last_exit(pod)
    if code:
        return "CrashLooping", f"exit code {code}: {message}"
    scheduled = condition_of(pod.get("status") or {}, "PodScheduled")
    if scheduled.get("status") == "False":
        return "InsufficientCapacity", str(scheduled.get("message", ""))
    if (pod.get("status") or {}).get("phase", "Pending") == "Pending":
        return "PodsPending", ""
    return "PodsNotReady", ""


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    found: list[Object] = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    return found


def _last_exit(pod: Object) -> tuple[int | None, str]:
    """Exit code and last words of a pod's container, of this run of it or the one before; (None, "") without any."""
    for container in _containers(pod):
        for name in ("state", "lastState"):
            ended: dict[str, Any] | None = (container.get(name) or {}).get("terminated")
            if ended is not None:
                words = [line for line in str(ended.get("message") or ended.get("reason") or "").splitlines() if line]
                return int(ended.get("exitCode", 0)), " ".join(words[-8:])[-LONGEST_MESSAGE:]
    return None, ""


def _is_ready(pod: Object) -> bool:
    return is_true(pod.get("status") or {}, "Ready") and "deletionTimestamp" not in pod["metadata"]


def _restarts(pod: Object) -> int:
    return sum(int(container.get("restartCount", 0)) for container in _containers(pod))


def _all_restarts(job: Job, observed: Observed) -> int:
    """Restarts of the trainer: those that JobSet counts, or those that the operator made."""
    trainer = observed.trainer
    if trainer is not None and not JOB.is_of(trainer):
        counted = int((trainer.get("status") or {}).get("restarts", 0))
        return max(counted, int(job.status.get("restarts") or 0))
    return attempts(job, observed)


def _waiting_for_quota(observed: Observed) -> str:
    """What Kueue has not admitted yet; empty when that is nothing."""
    waiting = []
    if observed.trainer is None or observed.trainer.get("spec", {}).get("suspend"):
        waiting.append("the trainer")
    gated = [pod for pod in observed.of(GENERATION) if pod.get("spec", {}).get("schedulingGates")]
    if gated:
        waiting.append(f"{len(gated)} pods of replicas")
    return f"{' and '.join(waiting)} wait for quota" if waiting else ""


def _progress(job: Job, now: datetime, is_stopped: bool) -> tuple[bool, str, str]:
    progress = job.status.get("progress") or {}
    if is_stopped:
        return False, "Stopped", ""
    if not progress.get("lastUpdateTime"):
        return False, "NoStepYet", "the coordinator has not reported"
    broken = condition_of(job.status, COLLECTIVE_READY)
    if broken.get("status") == "False":
        return False, broken.get("reason", "CollectiveFailed"), broken.get("message", "")
    if progress.get("paused"):
        return False, "Paused", f"people have paused the run after step {progress.get('step', 0)}; resume it"
    since = read_time(progress["lastUpdateTime"])
    if now - since >= timedelta(seconds=STALL_S):
        return False, "Stalled", f"nothing new since step {progress.get('step', 0)} at {write_time(since)}"
    return True, "StepsAreTrained", ""


def _cut(message: str) -> str:
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 3] + "..."


def next_moment(job: Job, status: Object, now: datetime) -> float | None:
    """Seconds until time alone changes something: a deadline, a standstill, the end of a finished job. None: never."""
    moments = []
    spec = job.spec
    ended = status.get("completionTime")
    if ended is not None:
        if spec.ttl_seconds_after_finished is not None:
            moments.append(read_time(ended) + timedelta(seconds=spec.ttl_seconds_after_finished))
        moments.append(read_time(ended) + timedelta(seconds=TRAINER_END_S))
    elif status.get("startTime") and not spec.suspend:
        started = read_time(status["startTime"])
        limits = [spec.active_deadline_seconds]
        limits += [] if is_true(status, "Started") else [spec.startup_deadline_seconds]
        moments += [started + timedelta(seconds=limit) for limit in limits if limit is not None]
        last = (job.status.get("progress") or {}).get("lastUpdateTime")
        if last:
            moments.append(read_time(last) + timedelta(seconds=STALL_S))
    ahead = [(moment - now).total_seconds() for moment in moments if moment > now]
    return min(ahead) + 1 if ahead else None


TRAINER_END_S = 300
"""What a trainer whose run is complete may take to end by itself before it is removed."""
