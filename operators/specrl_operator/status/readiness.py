"""Replica counts of a job's roles, whether they suffice, and why pods are not ready. Pure.

`job_status.py` and `conditions.py` call it.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrl_operator.api import (
    COORDINATOR,
    GENERATION,
    LEADER_LABEL,
    STORE,
    TRAINER,
    ConditionState,
    Job,
    Object,
    find_condition,
)
from specrl_operator.observed import (
    ObservedState,
    find_last_exit,
    find_running_init,
    is_node_silent,
    is_pod_lost,
    is_pod_ready,
    is_stuck_in_creation,
    list_container_statuses,
)

ROLE_CONDITIONS = {
    STORE: "StoreReady",
    COORDINATOR: "CoordinatorReady",
    TRAINER: "TrainerReady",
    GENERATION: "GenerationReady",
}
"""Roles and their conditions, in the order in which they are shown. Where two parts have the same problem, the first
explains it: nothing starts without the store."""
REASONS_BY_SEVERITY = (
    "FailedCreate",
    "NodeLost",
    "ImagePullFailed",
    "ConfigurationMissing",
    "VolumeUnavailable",
    "CrashLooping",
    "Unschedulable",
    "WaitingForSandbox",
    "PodsPending",
    "PodsNotReady",
    "NotRequested",
)
"""Reasons of parts that are not ready, the most specific first. Only a coordinator whose own pod starts can end
WaitingForSandbox, so what its pod lacks comes before it. The last two explain nothing: a coordinator is not ready while
trainer or replicas are not, and nothing is queued while something else is awaited."""

REMEDIES = {
    "ImagePullFailed": "push the image, name another in the chart's values `images`, or check images.pullSecrets",
    "CrashLooping": "see `kubectl logs --previous`",
    "Unschedulable": "add or free nodes that fit, or ask for less in the spec or the role's podTemplate",
    "VolumeUnavailable": "see `kubectl describe pvc`: the claim must exist, and its StorageClass must provide a volume "
    "for a node that fits; the chart's value jobs.storeClass names the store's",
}
"""What to do about a reason whose message is Kubernetes' own."""
VOLUME_WORDS = ("persistentvolume", "persistent volume", "volume node affinity")
"""Words of the scheduler's messages about volumes (`pkg/scheduler/framework/plugins/volumebinding` of Kubernetes)."""

MAX_CAUSE = 700
"""Most characters of Kubernetes' own words in a message, so that the remedy is within MAX_MESSAGE_LENGTH."""
EVENTS_S = 20
"""Seconds on a node without containers, after which the kubelet's events about the pod are read. It retries a mount
within seconds, so most pods that are stuck have an event by then."""
MOUNT_S = 40
"""Seconds on a node without containers and without an event, after which volumes are named as the likely cause. A
mount that hangs has its first event after two minutes. With RECHECK_S, the condition is there within a minute."""
PULLING = "Pulling"
"""Reason of the kubelet's event that an image is being pulled. The pod's status has one reason for this and for
volumes that are not mounted, `ContainerCreating`."""
CREATION_FAILURES = ("FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox")
"""Reasons of events about pods whose containers cannot be created."""
MAX_EVENT = 350
"""Most characters of an event in a message, so that the remedy is within MAX_CAUSE."""
MOUNT_REMEDY = (
    "check that claims, Secrets and ConfigMaps exist, and that claims that pods on several nodes mount are "
    "ReadWriteMany; `kubectl describe pod` has all events"
)
MOUNT_HINT = f"its containers have not been created for {MOUNT_S} s: a volume cannot be mounted; {MOUNT_REMEDY}"
CONTAINER_REMEDIES = {
    "failed to create subPath directory": "the kubelet makes a run's folder on the claim as root of the node: mount "
    "the claim writable, and let root write to it (NFS: no_root_squash)",
    'failed to mkdir ""': "the node's runtime mounts no images as volumes: use containerd 2.1, CRI-O 1.31 or later, or "
    "a volume with a uri",
}
"""What to do about a container that cannot be created, by words of the kubelet (`pkg/kubelet/kubelet_pods.go`) and of
older containerd (`pkg/cri/opts/spec_linux_opts.go`), which say no cause."""

LOST_HINT = (
    "its node {node} does not answer, and it is not replaced before the node does, or is known to be off. "
    "If it is off: `kubectl taint nodes {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute`, or delete "
    "the Node object"
)
"""A kubelet that does not answer may still run the pod, so Kubernetes leaves its object and replaces nothing."""
SILENT_HINT = (
    "its node {node} does not answer, so nobody knows whether it runs. Kubernetes gives it up when its tolerations "
    "end, by default after five minutes; see `kubectl describe node {node}`"
)


def count_replicas(job: Job, observed: ObservedState, role: str) -> Object:
    """Count a role's pods, wanted and ready. For generation, count replicas as the scale subresource shows them."""
    pods = observed.pods_of(role)
    if role != GENERATION:
        wanted = job.spec.trainer.num_nodes if role == TRAINER else 1
        return {"replicas": wanted, "readyReplicas": sum(map(is_pod_ready, pods))}
    # A replica of several nodes has one leader pod, which serves.
    leaders = [pod for pod in pods if pod["metadata"]["labels"].get(LEADER_LABEL) == "true"]
    return {
        "replicas": len(leaders),
        "readyReplicas": sum(map(is_pod_ready, leaders)),
        "selector": job.scale_selector,
    }


def decide_role_condition(
    job: Job, role: str, observed: ObservedState, counts: Object, *, is_stopped: bool
) -> ConditionState:
    """Decide whether a role has as many ready pods as it needs."""
    needed = counts["replicas"]
    if role == GENERATION:
        needed = min(job.spec.failure_policy.min_generation_replicas, job.spec.generation.replicas)
    ready = counts["readyReplicas"]
    if is_stopped:
        return ConditionState(False, "Stopped", f"waiting for {ready} pods to stop" if ready else "")
    if ready >= needed:
        return ConditionState(True, "PodsReady", f"{ready} ready")
    refused = observed.refused_pods.get(role)
    if refused is not None:
        why = f"no pod can be created: {refused}; change what refuses it, or the role's podTemplate"
        return ConditionState(False, "FailedCreate", f"{ready} of at least {needed} ready: {why}")
    reason, why = _find_worst_problem(observed.pods_of(role), observed)
    remedy = f"; {REMEDIES[reason]}" if reason in REMEDIES else ""
    # Cut the cause rather than the remedy.
    why = why if len(why) <= MAX_CAUSE else f"{why[: MAX_CAUSE - 3]}..."
    return ConditionState(False, reason, f"{ready} of at least {needed} ready" + (f": {why}{remedy}" if why else ""))


def _find_worst_problem(pods: Sequence[Object], observed: ObservedState) -> tuple[str, str]:
    """Return the most specific reason why pods are not ready, with the pod and its message.

    The result does not depend on the order of the pods, so that the status does not change without cause.
    """
    found = [(*_find_pod_problem(pod, observed), str(pod["metadata"]["name"])) for pod in pods if not is_pod_ready(pod)]
    if not found:
        return "PodsPending", "no pods exist yet"
    reason, message, name = min(found, key=lambda it: (REASONS_BY_SEVERITY.index(it[0]), it[2]))
    return reason, f"{name}: {message}" if message else name


def _find_pod_problem(pod: Object, observed: ObservedState) -> tuple[str, str]:
    now = observed.moment
    if is_pod_lost(pod, now):
        return "NodeLost", LOST_HINT.format(node=pod.get("spec", {}).get("nodeName"))
    if is_node_silent(pod):
        return "NodeLost", SILENT_HINT.format(node=pod.get("spec", {}).get("nodeName"))
    for state in list_container_statuses(pod):
        waiting = (state.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        message = waiting.get("message", "")
        if reason in ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"):
            return "ImagePullFailed", message or str(state.get("image", ""))
        if reason in ("CreateContainerConfigError", "CreateContainerError"):
            return "ConfigurationMissing", _explain_container(message)
    # After the waiting reasons: a container in a crash loop waits, too, but its last exit says more.
    code, message = find_last_exit(pod)
    if code:
        return "CrashLooping", f"exit code {code}: {message}"
    scheduled = find_condition(pod.get("status") or {}, "PodScheduled")
    if scheduled.get("status") == "False":
        message = str(scheduled.get("message", ""))
        lacks_volume = any(words in message.lower() for words in VOLUME_WORDS)
        return "VolumeUnavailable" if lacks_volume else "Unschedulable", message
    event = observed.creation_events.get(pod["metadata"]["name"])
    if event is not None and (event or is_stuck_in_creation(pod, now, MOUNT_S)):
        return _explain_creation(event)
    if (pod.get("status") or {}).get("phase", "Pending") == "Pending":
        init = find_running_init(pod)
        return (
            "PodsPending",
            f"its init container {init} runs; `kubectl logs -c {init}` has its progress" if init else "",
        )
    return "PodsNotReady", ""


def _explain_container(message: str) -> str:
    """Return the message of a container that cannot be created, with a remedy if its words have one."""
    remedy = next((it for words, it in CONTAINER_REMEDIES.items() if words in message), "")
    return f"{message[:MAX_EVENT]}; {remedy}" if remedy else message


def _explain_creation(event: Object) -> tuple[str, str]:
    """Return reason and message of a pod whose containers are not created. event: the kubelet's; empty if none."""
    if not event:
        return "ConfigurationMissing", MOUNT_HINT
    message = " ".join(str(event.get("message", "")).split())
    if event["reason"] == PULLING:
        return "PodsPending", message
    return "ConfigurationMissing", f"{message[:MAX_EVENT]}; {MOUNT_REMEDY}"
