"""Gang schedulers, which place a job's pods together or not at all. A job has at most one. Pure.

- Kueue suspends the workloads with its label and resumes those that it admits, so the operator never writes `suspend`.
  Trainer and replicas are admitted separately, and each replica by itself: Kueue has no gang over several objects.
- NVIDIA's KAI schedules the pods of one owner as a gang.
- Volcano gets one PodGroup over the trainer and the fewest replicas that the job needs. So neither side holds GPUs
  while it waits for the other.
"""

from __future__ import annotations

from specrl.spec.cluster import Gang
from specrl_operator import kinds
from specrl_operator.api import COMPONENT_LABEL, GENERATION, TRAINER, Object
from specrl_operator.children.affinity import shares_domain
from specrl_operator.plan.job_plan import JobPlan

KUEUE_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KUEUE_TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-required-topology"
KUEUE_GROUP_ANNOTATION = "kueue.x-k8s.io/podset-group-name"
KAI_QUEUE_LABEL = "kai.scheduler/queue"
VOLCANO_GROUP_ANNOTATION = "scheduling.k8s.io/group-name"


def assign_scheduler(children: list[Object], plan: JobPlan) -> list[Object]:
    """Return the children with the labels and objects that the job's gang scheduler reads."""
    workloads = find_workloads(children)
    if plan.gang is Gang.KUEUE:
        _assign_to_kueue(workloads, plan)
    elif plan.gang is Gang.KAI:
        _assign_to_kai(workloads, plan)
    elif plan.gang is Gang.VOLCANO and workloads:
        _assign_to_volcano(workloads, plan)
        # Before the workloads whose pods are in the group.
        first = children.index(workloads[0])
        return [*children[:first], _build_pod_group(plan), *children[first:]]
    return children


def find_workloads(children: list[Object]) -> list[Object]:
    """Find the workloads of trainer and replicas among a job's children."""
    workloads = (kinds.JOB_SET, kinds.JOB, kinds.LEADER_WORKER_SET, kinds.STATEFUL_SET)
    return [
        item
        for item in children
        if item["metadata"]["labels"].get(COMPONENT_LABEL) in (TRAINER, GENERATION)
        and any(kind.is_kind_of(item) for kind in workloads)
    ]


def list_pod_templates(workload: Object) -> list[Object]:
    """List a workload's pod templates."""
    spec = workload["spec"]
    if kinds.JOB_SET.is_kind_of(workload):
        return [part["template"]["spec"]["template"] for part in spec["replicatedJobs"]]
    if kinds.LEADER_WORKER_SET.is_kind_of(workload):
        both = spec["leaderWorkerTemplate"]
        return [both["leaderTemplate"], both["workerTemplate"]]
    return [spec["template"]]


def _assign_to_kueue(workloads: list[Object], plan: JobPlan) -> None:
    """Set the queue, and a required topology for pods that share an NVLink domain."""
    for workload in workloads:
        role = workload["metadata"]["labels"][COMPONENT_LABEL]
        # Kueue refuses to scale a StatefulSet with its label, but to 0 and back (kueue #3279). With the label on the
        # pods each replica is a Workload of its own, as each group of a LeaderWorkerSet is.
        queued = list_pod_templates(workload) if kinds.STATEFUL_SET.is_kind_of(workload) else [workload]
        for item in queued:
            item["metadata"]["labels"][KUEUE_QUEUE_LABEL] = plan.job.spec.scheduling.queue_name
        shape = plan.shape_of(role)
        if shape.pods > 1 and shape.gpus_per_pod and shares_domain(plan, role):
            for template in list_pod_templates(workload):
                notes = template["metadata"].setdefault("annotations", {})
                notes[KUEUE_TOPOLOGY_ANNOTATION] = plan.job.spec.placement.topology_key
                if role == GENERATION:
                    notes[KUEUE_GROUP_ANNOTATION] = "replica"  # leader and workers in one domain


def _assign_to_kai(workloads: list[Object], plan: JobPlan) -> None:
    queue = plan.job.spec.scheduling.queue_name
    for workload in workloads:
        templates = list_pod_templates(workload)
        for template in templates:
            template["spec"]["schedulerName"] = "kai-scheduler"
        for item in (workload, *templates):
            if queue is not None:
                item["metadata"]["labels"][KAI_QUEUE_LABEL] = queue


def _assign_to_volcano(workloads: list[Object], plan: JobPlan) -> None:
    for workload in workloads:
        for template in list_pod_templates(workload):
            template["metadata"].setdefault("annotations", {})[VOLCANO_GROUP_ANNOTATION] = plan.job.name
            template["spec"]["schedulerName"] = "volcano"


def _build_pod_group(plan: JobPlan) -> Object:
    job = plan.job
    # Replicas beyond the minimum are scheduled when there is room, and must not delay the start.
    replicas = min(job.spec.failure_policy.min_generation_replicas, job.spec.generation.replicas)
    spec: Object = {"minMember": plan.trainer.pods + replicas * plan.replica.pods}
    if job.spec.scheduling.queue_name is not None:
        spec["queue"] = job.spec.scheduling.queue_name
    if job.spec.scheduling.priority_class_name is not None:
        spec["priorityClassName"] = job.spec.scheduling.priority_class_name
    return kinds.POD_GROUP.build_object({"name": job.name, "labels": job.build_labels()}, spec=spec)
