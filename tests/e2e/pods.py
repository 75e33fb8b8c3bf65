"""Build small pods for tests of the harness."""

from __future__ import annotations

from typing import Any

from tests.e2e.harness.api import Object
from tests.e2e.harness.nodes import OURS


def a_pod(name: str, namespace: str, command: list[str], labels: dict[str, str] | None = None, **spec: Any) -> Object:
    """Build a pod with one container `main` that runs as a process. Keywords go into the container or the spec."""
    in_container = {"env", "envFrom", "volumeMounts", "readinessProbe", "livenessProbe", "startupProbe", "lifecycle"}
    in_container |= {"ports", "securityContext", "workingDir"}
    container = {"name": "main", "image": "python", "command": command}
    container |= {key: value for key, value in spec.items() if key in in_container}
    rest = {key: value for key, value in spec.items() if key not in in_container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {"containers": [container], "nodeSelector": {OURS: "processes"}} | rest,
    }


def gpu_pod(name: str, namespace: str, labels: dict[str, str] | None = None, gpus: int = 4, **spec: Any) -> Object:
    """Build a pod for GB200 nodes, which only gets a status."""
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "kubernetes.io/arch", "operator": "Exists"}]
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}}
    container = {"name": "main", "image": "none", "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {"containers": [container], "tolerations": tolerations} | spec,
    }
