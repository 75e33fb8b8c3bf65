"""RLJobs and clusters for tests of the operator."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from specrl_operator import kinds
from specrl_operator.api import Job, Object, read_job
from specrl_operator.children.desired import build_children
from specrl_operator.kinds import CHILD_KINDS, CLAIM_TEMPLATE, COMPUTE_DOMAIN, JOB_SET, LEADER_WORKER_SET, RLJOB, Kind
from specrl_operator.plan import job_plan
from specrl_operator.plan.decision import Decision, DesiredState, TrainerAction
from specrl_operator.plan.job_plan import JobPlan, Settings

ALL = frozenset(kind for kind in vars(kinds).values() if isinstance(kind, Kind) and kind.is_optional)
GB200 = frozenset({JOB_SET, COMPUTE_DOMAIN, CLAIM_TEMPLATE, LEADER_WORKER_SET})

RUN: Object = {
    "model": {"path": "/models/tiny", "dtype": "float32", "maxLength": 128},
    "prompts": {"source": {"generated": {"family": "ledger", "count": 8}}, "maxTokens": 80},
    "rewards": {"exact": {}},
    "generation": {"sampling": {"maxTokens": 16}},
    "trainer": {"optimizer": {"learningRate": "1e-3"}},
    "schedule": {"steps": 2, "promptsPerStep": 2, "groupSize": 2},
    "checkpoint": {"claimName": "runs"},
    "placement": {"profile": "CPU"},
}
"""The smallest spec: one replica, one rank, on CPUs."""

PAPER: Object = {
    "generation": {"replicas": 12, "gpusPerReplica": 4, "tensorParallel": 4},
    "trainer": {"numNodes": 4, "gpusPerNode": 4, "parallelism": {"tensor": 4, "data": 4}},
    "placement": {"profile": "GB200", "nvlink": "Required", "layout": "SameDomain"},
    "volumes": [{"claimName": "models", "mountPath": "/models"}],
}
"""The paper's asynchronous layout: 12 nodes for generation, 4 for training."""


LARGE: Object = {"generation": {"replicas": 3, "gpusPerReplica": 8, "tensorParallel": 8}}
"""Replicas of two nodes."""


def merge(base: Object, over: Object) -> Object:
    """Merge `over` into a copy of `base`; None removes a field."""
    found = copy.deepcopy(base)
    for name, value in over.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = merge(found[name], value)
        else:
            found[name] = copy.deepcopy(value)
    return found


def an_rljob(*changes: Object, name: str = "tiny", status: Object | None = None, **meta: Any) -> Object:
    """Build an RLJob as the API server stores it; changes are merged into its spec."""
    spec = copy.deepcopy(RUN)  # a test may change what it gets
    for change in changes:
        spec = merge(spec, change)
    metadata = {
        "name": name,
        "namespace": "rl",
        "uid": f"11111111-2222-4333-8444-{sum(name.encode()):012d}",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        **meta,
    }
    item: Object = {"apiVersion": RLJOB.api_version, "kind": RLJOB.name, "metadata": metadata, "spec": spec}
    return item if status is None else {**item, "status": status}


def a_job(*changes: Object, **more: Any) -> Job:
    """Build an RLJob and parse it."""
    return read_job(an_rljob(*changes, **more))


@dataclass(frozen=True)
class ClusterFacts:
    """The inputs of a plan besides the job: by default a cluster with JobSet, LeaderWorkerSet and NVIDIA's driver."""

    served: frozenset[Kind] = GB200
    settings: Settings = field(default_factory=Settings)


def plan_job(job: Job, facts: ClusterFacts) -> JobPlan:
    """Plan a job that has no children yet."""
    versions = frozenset(kind.api_version for kind in facts.served)
    return job_plan.plan_job(job, facts.settings, versions, {kind: [] for kind in CHILD_KINDS})


def children_of(job: Job, given_facts: ClusterFacts, state: DesiredState = DesiredState.RUNNING) -> list[Object]:
    """Build the children of a job in a state."""
    trainer = TrainerAction.CREATE if state is DesiredState.RUNNING else TrainerAction.KEEP
    replicas = job.spec.generation.replicas if state is DesiredState.RUNNING else 0
    return build_children(plan_job(job, given_facts), Decision(state, trainer, replicas))
