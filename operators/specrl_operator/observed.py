"""The observed state of a job: its trainer, replicas and pods, and readers of pod statuses. Pure.

`reconcile.py` builds one `Observed` per reconciliation; `plan` and `status` read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from specrl_operator import kinds
from specrl_operator.api import (
    FETCH_PREFIX,
    MAX_MESSAGE_LENGTH,
    TRAINER,
    Object,
    find_condition,
    has_component,
    has_elapsed,
    is_condition_true,
)
from specrl_operator.kinds import Kind

TRAINER_KINDS = (kinds.JOB_SET, kinds.JOB)
"""Kinds of a trainer. They are created and deleted, never patched."""
OUT_OF_MEMORY = "OOMKilled: it used more memory than its limit; raise limits.memory in the role's podTemplate"
FORMAT_ERROR = "exec format error"
OTHER_ARCHITECTURE = (
    f"{FORMAT_ERROR}: the image is of another architecture than the node; choose nodes of its architecture in the "
    "role's podTemplate, or build the image on such a node (docs/release.md)"
)


@dataclass(frozen=True)
class ObservedState:
    """A job's children at one moment."""

    trainer: Object | None = None
    """JobSet or Job."""
    generation: Object | None = None
    pods: tuple[Object, ...] = ()
    """The job's pods, without coordinators' that have ended. A Deployment replaces an evicted pod, but never deletes
    its object."""
    has_claim_template: bool = False
    domain: str | None = None
    """NVLink domain of the nodes that the trainer's pods are bound to; None: unknown, or not bound yet."""
    refused_pods: Mapping[str, str] = field(default_factory=dict)
    """Why the pods of a role are not created, by role."""
    creation_events: Mapping[str, Object] = field(default_factory=dict)
    """The kubelet's newest event about a pod whose containers are not created, by the pod's name; empty if it has sent
    none. Pods that are not among them were not asked about."""
    moment: datetime | None = None
    """When all this was observed."""

    def pods_of(self, component: str) -> list[Object]:
        """Return the pods of a component, sorted by name so that messages are the same every time."""
        return sorted(
            (pod for pod in self.pods if has_component(pod, component)), key=lambda pod: str(pod["metadata"]["name"])
        )

    @property
    def has_requested_parts(self) -> bool:
        """Whether the trainer or a replica has been asked for. A suspended job has replicas, but none is wanted."""
        return self.trainer is not None or self.count_wanted_replicas() > 0

    def count_wanted_replicas(self) -> int:
        """Return the number of replicas that their workload asks for; 0 without one."""
        return int((self.generation or {}).get("spec", {}).get("replicas", 0))

    @property
    def has_trainer_ended(self) -> bool:
        """Whether the trainer's JobSet or Job is finished: none of its pods runs, and none will be created."""
        status = (self.trainer or {}).get("status") or {}
        # A Job reports Complete, a JobSet Completed.
        return any(is_condition_true(status, condition) for condition in ("Failed", "Complete", "Completed"))


def list_trainers(children: Mapping[Kind, Sequence[Object]]) -> list[Object]:
    """List the trainers among a job's children, a JobSet before a Job."""
    return [item for kind in TRAINER_KINDS for item in children[kind] if has_component(item, TRAINER)]


def list_container_statuses(pod: Object) -> list[Object]:
    """Return the statuses of a pod's containers, init containers first."""
    status = pod.get("status") or {}
    found: list[Object] = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    return found


def _split_container_statuses(pod: Object) -> tuple[list[Object], list[Object]]:
    """Return the statuses of the operator's own containers, and those of others.

    Others come from podTemplate or a webhook, such as a proxy.
    """
    own: list[Object] = []
    others: list[Object] = []
    for status in list_container_statuses(pod):
        name = str(status.get("name"))
        is_own = has_component(pod, name) or name.startswith(FETCH_PREFIX)
        (own if is_own else others).append(status)
    return own, others


def find_own_exit(pod: Object) -> tuple[int | None, str]:
    """As `find_last_exit`, but of the operator's own containers alone.

    Exit codes mean something in these alone. For example, a Go program that panics exits with 2.
    """
    own, _ = _split_container_statuses(pod)
    return _find_exit(pod, own)


def find_last_exit(pod: Object) -> tuple[int | None, str]:
    """Return the exit code and message of the first container that exited, in its current or previous run.

    The operator's own containers come first. (None, "") if no container has exited. An init container that has done its
    work does not count.
    """
    own, others = _split_container_statuses(pod)
    return _find_exit(pod, [*own, *others])


def _find_exit(pod: Object, containers: Sequence[Object]) -> tuple[int | None, str]:
    """Return the exit code and message of the first of a pod's containers that exited."""
    init = (pod.get("status") or {}).get("initContainerStatuses") or []
    done = [it for it in init if ((it.get("state") or {}).get("terminated") or {}).get("exitCode") == 0]
    for container in (it for it in containers if it not in done):
        # The previous run counts, too: a container in a crash loop is `waiting` or `running` most of the time.
        for name in ("state", "lastState"):
            ended: dict[str, Any] | None = (container.get(name) or {}).get("terminated")
            if ended is not None:
                if ended.get("reason") == "OOMKilled":  # the log's end does not know
                    return int(ended.get("exitCode", 0)), OUT_OF_MEMORY
                lines = [line for line in str(ended.get("message") or ended.get("reason") or "").splitlines() if line]
                # With FallbackToLogsOnError the message is the log's end. The error is in its last lines.
                message = " ".join(lines[-8:])[-MAX_MESSAGE_LENGTH:]
                return int(ended.get("exitCode", 0)), OTHER_ARCHITECTURE if FORMAT_ERROR in message else message
    return None, ""


def is_pod_ready(pod: Object) -> bool:
    """Whether a pod is ready and not being deleted."""
    return is_condition_true(pod.get("status") or {}, "Ready") and "deletionTimestamp" not in pod["metadata"]


LOST_S = 60
"""Seconds after the end of its grace period, after which the kubelet of a pod does not answer."""


def has_pod_ended(pod: Object) -> bool:
    """Whether a pod has ended for good: all its containers have, and the kubelet restarts none."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_pod_lost(pod: Object, now: datetime | None) -> bool:
    """Whether a pod's kubelet has not reported its end, long after it had to end. now: None if it is not known."""
    if has_pod_ended(pod):
        return False  # somebody's finalizer keeps its object
    # The API server sets deletionTimestamp to the end of the grace period.
    return now is not None and has_elapsed(pod["metadata"].get("deletionTimestamp"), LOST_S, now)


def is_node_silent(pod: Object) -> bool:
    """Whether the node controller has marked a pod as not ready because its node does not answer.

    It changes no other condition. The kubelet derives Ready from ContainersReady, and from gates, which a
    podTemplate may add.
    """
    status = pod.get("status") or {}
    is_marked = find_condition(status, "Ready").get("status") == "False"
    has_gates = bool((pod.get("spec") or {}).get("readinessGates"))
    return is_marked and is_condition_true(status, "ContainersReady") and not has_gates


def find_running_init(pod: Object) -> str:
    """Return the name of the init container that runs; empty if none does."""
    init = (pod.get("status") or {}).get("initContainerStatuses") or []
    return next((str(it["name"]) for it in init if "running" in (it.get("state") or {})), "")


def is_stuck_in_creation(pod: Object, now: datetime | None, limit_s: float) -> bool:
    """Whether a pod has been on its node for limit_s, and the kubelet has created none of its containers."""
    if find_running_init(pod):
        return False
    reasons = [((it.get("state") or {}).get("waiting") or {}).get("reason") for it in list_container_statuses(pod)]
    is_creating = "ContainerCreating" in reasons or "PodInitializing" in reasons
    scheduled = find_condition(pod.get("status") or {}, "PodScheduled")
    return is_creating and now is not None and has_elapsed(scheduled.get("lastTransitionTime"), limit_s, now)


def count_container_restarts(pod: Object) -> int:
    """Count the kubelet's restarts of a pod's own containers."""
    own, _ = _split_container_statuses(pod)
    return sum(int(container.get("restartCount", 0)) for container in own)
