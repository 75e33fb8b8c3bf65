"""Kueue: a queue's label on what takes nodes, and one NVLink domain for what must not straddle. Pure.

Kueue itself suspends what carries the label and resumes what it admits, so the operator writes no `suspend`. Trainer
and replicas are admitted apart, each replica of more than one pod by itself: Kueue has no gang over different objects.
"""

from __future__ import annotations

from specrl_operator import placement
from specrl_operator.api import GENERATION, TRAINER, Job, Object
from specrl_operator.schedulers.templates import templates, workloads

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOPOLOGY_ANNOTATION = "kueue.x-k8s.io/podset-required-topology"
GROUP_ANNOTATION = "kueue.x-k8s.io/podset-group-name"


def decorate(objects: list[Object], job: Job) -> list[Object]:
    """Queue and topology."""
    queue = job.spec.scheduling.queue_name
    for workload in workloads(objects):
        workload["metadata"]["labels"] = workload["metadata"]["labels"] | {QUEUE_LABEL: queue}
        role = workload["metadata"]["labels"]["app.kubernetes.io/component"]
        shape = placement.trainer_shape(job) if role == TRAINER else placement.replica_shape(job)
        if shape.pods > 1 and shape.gpus_per_pod and placement.keeps_together(job, role):
            for template in templates(workload):
                notes = template["metadata"].setdefault("annotations", {})
                notes[TOPOLOGY_ANNOTATION] = job.spec.placement.topology_key
                if role == GENERATION:
                    notes[GROUP_ANNOTATION] = "replica"  # leader and workers in one domain
    return objects
