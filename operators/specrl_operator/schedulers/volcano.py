"""Volcano: one PodGroup over the trainer and as many replicas as the job needs, so that neither waits alone. Pure."""

from __future__ import annotations

from specrl_operator import placement
from specrl_operator.api import POD_GROUP, Job, Object
from specrl_operator.schedulers.templates import templates, workloads

GROUP_ANNOTATION = "scheduling.k8s.io/group-name"


def decorate(objects: list[Object], job: Job) -> list[Object]:
    """The PodGroup, before what is in it, and every pod's way into it."""
    taking = list(workloads(objects))
    if not taking:
        return objects
    for workload in taking:
        for template in templates(workload):
            template["metadata"].setdefault("annotations", {})[GROUP_ANNOTATION] = job.name
            template["spec"]["schedulerName"] = "volcano"
    replicas = min(job.spec.failure_policy.min_generation_replicas, job.spec.generation.replicas)
    members = placement.trainer_shape(job).pods + replicas * placement.replica_shape(job).pods
    group = POD_GROUP.object({"name": job.name, "labels": job.labels()}, spec={"minMember": members})
    if job.spec.scheduling.queue_name is not None:
        group["spec"]["queue"] = job.spec.scheduling.queue_name
    if job.spec.scheduling.priority_class_name is not None:
        group["spec"]["priorityClassName"] = job.spec.scheduling.priority_class_name
    first = objects.index(taking[0])
    return [*objects[:first], group, *objects[first:]]
