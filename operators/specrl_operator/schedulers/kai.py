"""NVIDIA's KAI scheduler: it groups pods by their owner. Pure."""

from __future__ import annotations

from specrl_operator.api import Job, Object
from specrl_operator.schedulers.templates import templates, workloads

QUEUE_LABEL = "kai.scheduler/queue"


def decorate(objects: list[Object], job: Job) -> list[Object]:
    """Scheduler and queue of every pod that takes nodes. Nothing waits in `dependsOn`, which a gang would wait for."""
    queue = job.spec.scheduling.queue_name
    for workload in workloads(objects):
        for item in (workload, *templates(workload)):
            item["metadata"]["labels"] = item["metadata"]["labels"] | ({QUEUE_LABEL: queue} if queue else {})
        for template in templates(workload):
            template["spec"]["schedulerName"] = "kai-scheduler"
    return objects
