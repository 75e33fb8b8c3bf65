"""RLJobs and clusters for tests of the operator."""

from __future__ import annotations

import copy
from typing import Any

from specrl_operator.api import (
    CLAIM_TEMPLATE,
    COMPUTE_DOMAIN,
    JOB_SET,
    LEADER_WORKER_SET,
    OPTIONAL,
    RLJOB,
    Job,
    Object,
    read_job,
)
from specrl_operator.facts import Facts, Settings

ALL = frozenset(OPTIONAL)
GB200 = frozenset({JOB_SET, COMPUTE_DOMAIN, CLAIM_TEMPLATE, LEADER_WORKER_SET})

RUN: Object = {
    "model": {"path": "/models/tiny", "dtype": "float32", "maxLength": 128},
    "prompts": {"source": {"generated": {"family": "ledger", "count": 8}}, "maxTokens": 80},
    "rewards": {"exact": {}},
    "generation": {"sampling": {"maxTokens": 16}},
    "trainer": {"optimizer": {"learningRate": "1e-3"}},
    "schedule": {"steps": 2, "promptsPerStep": 2, "groupSize": 2},
    "checkpoint": {"claimName": "runs"},
}
"""The smallest spec: one replica, one rank, on CPUs."""

PAPER: Object = {
    "generation": {"replicas": 12, "gpusPerReplica": 4, "tensorParallel": 4},
    "trainer": {"numNodes": 4, "gpusPerNode": 4, "parallelism": {"tensor": 4, "data": 4}},
    "placement": {"profile": "GB200", "nvlink": "Required", "layout": "SameDomain"},
    "volumes": [{"claimName": "models", "mountPath": "/models"}],
}
"""12 nodes generate, 4 train: the paper's asynchronous layout."""


LARGE: Object = {"generation": {"replicas": 3, "gpusPerReplica": 8, "tensorParallel": 8}}
"""Replicas of two nodes."""


def merge(base: Object, over: Object) -> Object:
    """`base` with `over` merged into it; None removes."""
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
    """An RLJob as the API server keeps it; changes are merged into its spec."""
    spec = RUN
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
    """The same, read."""
    return read_job(an_rljob(*changes, **more))


def facts(served: frozenset[Any] = GB200, **more: Any) -> Facts:
    """What a cluster with JobSet, LWS and NVIDIA's DRA driver offers."""
    return Facts(Settings(), served, **more)
