"""Which objects of a job take nodes, and the pod templates in them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from specrl_operator.api import (
    COMPONENT_LABEL,
    GENERATION,
    JOB,
    JOB_SET,
    LEADER_WORKER_SET,
    STATEFUL_SET,
    TRAINER,
    Object,
)


def workloads(objects: list[Object]) -> Iterator[Object]:
    """The trainer and the replicas."""
    kinds = (JOB_SET, JOB, LEADER_WORKER_SET, STATEFUL_SET)
    for item in objects:
        component = item["metadata"]["labels"].get(COMPONENT_LABEL)
        if component in (TRAINER, GENERATION) and any(kind.is_of(item) for kind in kinds):
            yield item


def templates(workload: Object) -> list[Object]:
    """Its pod templates."""
    spec = workload["spec"]
    if JOB_SET.is_of(workload):
        return [part["template"]["spec"]["template"] for part in spec["replicatedJobs"]]
    if LEADER_WORKER_SET.is_of(workload):
        both = spec["leaderWorkerTemplate"]
        return [both["leaderTemplate"], both["workerTemplate"]]
    return [spec["template"]]
