"""RLJobs for tests of the operator, and helpers that inspect them."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.e2e import binaries
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, wait_until
from tests.e2e.harness.kubelet_process import STORAGE_CLASS
from tests.e2e.harness.nodes import OURS
from tests.requirements import KUBECTL
from tests.rljob_cases import a_job

JOB_LABEL = "specrl.dev/rljob"
COMPONENT = "app.kubernetes.io/component"
PLAYED: Object = {"spec": {"nodeSelector": {OURS: "statuses"}, "tolerations": [{"key": OURS, "operator": "Exists"}]}}
"""Pod template of pods that only need a status."""

KINDS = (
    "v1/pods",
    "v1/services",
    "v1/configmaps",
    "v1/secrets",
    "v1/serviceaccounts",
    "v1/persistentvolumeclaims",
    "apps/v1/deployments",
    "apps/v1/statefulsets",
    "batch/v1/jobs",
    "networking.k8s.io/v1/networkpolicies",
    "policy/v1/poddisruptionbudgets",
    "rbac.authorization.k8s.io/v1/roles",
    "rbac.authorization.k8s.io/v1/rolebindings",
    "autoscaling/v2/horizontalpodautoscalers",
    "resource.k8s.io/v1/resourceclaimtemplates",
    "resource.k8s.io/v1/resourceclaims",
)
"""Kinds of a job's children. Optional kinds are added if they are served."""


def gb200_job(name: str, namespace: str, replicas: int = 12, trainer_nodes: int = 4, **placement: Any) -> Object:
    """Build a job with one replica per node and four ranks per node. The coordinator's pod only gets a status."""
    job = a_job(
        {
            "generation.replicas": replicas,
            "generation.gpusPerReplica": 4,
            "generation.tensorParallel": 4,
            "trainer.numNodes": trainer_nodes,
            "trainer.gpusPerNode": 4,
            "trainer.parallelism": {"tensor": 4, "data": trainer_nodes},
            "placement": {"profile": "GB200"} | placement,
            "store": {"sqlite": {}},
            "coordinator.podTemplate": PLAYED,
        },
        name,
    )
    job["metadata"]["namespace"] = namespace
    return job


def cpu_job(name: str, namespace: str, **changes: Any) -> Object:
    """Build a job without GPUs. Its pods only get statuses."""
    played = {f"{role}.podTemplate": PLAYED for role in ("coordinator", "trainer", "generation")}
    job = a_job(played | {"store": {"sqlite": {}}} | changes, name)
    job["metadata"]["namespace"] = namespace
    return job


def make_place(admin: Api, namespace: str) -> str:
    """Let a namespace enforce Pod Security `restricted`, and create a claim for checkpoints in it. Returns its name."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    admin.patch("v1/namespaces", namespace, {"metadata": {"labels": labels}})
    admin.create(build_claim("runs", namespace))
    return namespace


def build_claim(name: str, namespace: str) -> Object:
    """Build a claim for a folder of this machine."""
    spec = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": STORAGE_CLASS["metadata"]["name"],  # type: ignore[index]
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def pods_of(api: Api, job: Object, component: str = "") -> list[Object]:
    """Return a job's pods that are not being deleted, sorted by name."""
    metadata = job["metadata"]
    labels = f"{JOB_LABEL}={metadata['name']}" + (f",{COMPONENT}={component}" if component else "")
    found = api.list("v1/pods", metadata["namespace"], labels)
    return sorted(
        (p for p in found if "deletionTimestamp" not in p["metadata"]), key=lambda p: str(p["metadata"]["name"])
    )


def cliques_of(api: Api, job: Object, racks: dict[str, str]) -> dict[str, set[str]]:
    """Return the cliques of each component's pods."""
    found: dict[str, set[str]] = defaultdict(set)
    for component in ("trainer", "generation"):
        for pod in pods_of(api, job, component):
            found[component].add(racks[pod["spec"]["nodeName"]])
    return found


def until_condition(api: Api, job: Object, kind: str, status: str = "True", reason: str = "", **wait: float) -> Object:
    """Wait until a condition has a status. Returns the job."""
    name = job["metadata"]["name"]
    namespace = job["metadata"]["namespace"]

    def there() -> Object | None:
        found = api.get(RLJOBS, name, namespace)
        said = find_condition(found, kind)
        return found if said.get("status") == status and said.get("reason", "").startswith(reason) else None

    found: Object = wait_until(there, f"{kind}={status} {reason}", explain=lambda: describe_job(api, job), **wait)
    return found


def describe_job(api: Api, job: Object) -> str:
    """Describe a job's state, for the message of a timeout."""
    found = api.get(RLJOBS, job["metadata"]["name"], job["metadata"]["namespace"])
    conditions = found.get("status", {}).get("conditions", [])
    lines = [f"{each['type']}={each['status']} {each['reason']}: {each['message']}" for each in conditions]
    lines += [
        f"{p['metadata']['name']} on {p['spec'].get('nodeName')}: {p['status'].get('phase')}" for p in pods_of(api, job)
    ]
    return "\n".join(lines)


def kubectl(api: Api, folder: Path, *arguments: str) -> str:
    """Run kubectl, and return its output. Skips the test if kubectl is missing."""
    KUBECTL.require()
    command = [binaries.find("kubectl"), "--kubeconfig", api.kubeconfig(folder / "kubeconfig"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def list_remaining_objects(api: Api, job: Object, *more: str) -> list[str]:
    """Return kind and name of all objects with the job's label or owned by the job."""
    metadata = job["metadata"]
    found = []
    for kind in (*KINDS, *more):
        for item in api.list(kind, metadata["namespace"]):
            owners = [owner["name"] for owner in item["metadata"].get("ownerReferences", [])]
            label = item["metadata"].get("labels", {}).get(JOB_LABEL)
            if label == metadata["name"] or metadata["name"] in owners:
                found.append(f"{kind} {item['metadata']['name']}")
    return found
