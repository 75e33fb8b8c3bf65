"""Pods of Kubernetes' own test program, agnhost, as the restricted profile demands them."""

from __future__ import annotations

from typing import Any

from tests.cluster.harness.kubectl import Kubectl
from tests.e2e.harness.api import Api, Object, wait_until

AGNHOST = "specrl.test/agnhost:1"
START_S = 300.0  # for a pod to start on a busy machine


def create_restricted_namespace(api: Api, name: str) -> None:
    """Create a namespace that admits only pods of the restricted profile."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    wait_until(lambda: api.find("v1/serviceaccounts", "default", name), "default service account")


def build_pod(name: str, namespace: str, *arguments: str, **changes: Any) -> Object:
    """Build a pod with one container, `main`. Keywords go into the container, or else into the spec."""
    container: Object = {
        "name": "main",
        "image": AGNHOST,
        "imagePullPolicy": "IfNotPresent",
        "args": list(arguments),
        "resources": {"requests": {"cpu": "20m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    in_container = {*container, "env", "ports", "volumeMounts", "readinessProbe", "livenessProbe", "startupProbe"}
    container |= {key: value for key, value in changes.items() if key in in_container}
    spec: Object = {
        "containers": [container],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec |= {key: value for key, value in changes.items() if key not in in_container and key != "labels"}
    metadata = {"name": name, "namespace": namespace, "labels": changes.get("labels", {"app": name})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def build_server(name: str, namespace: str, **changes: Any) -> Object:
    """Build a pod that serves HTTP on port 8080, named `http`, and is Ready when it answers."""
    probe = {"httpGet": {"path": "/hostname", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 30}
    serving: dict[str, Any] = {
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": probe,
        "livenessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 5, "timeoutSeconds": 30},
        "startupProbe": probe | {"failureThreshold": 120},
    }
    return build_pod(name, namespace, "netexec", "--http-port=8080", "--udp-port=-1", **serving | changes)


def connect(kubectl: Kubectl, namespace: str, pod: str, target: str) -> str:
    """Open a TCP connection from a pod. Returns an empty string, or why it failed: REFUSED, TIMEOUT, DNS."""
    command = ["exec", "--namespace", namespace, pod, "--", "/agnhost", "connect", target, "--timeout=5s"]
    done = kubectl.run(*command, check=False)
    return done.stderr.splitlines()[0] if done.returncode != 0 else ""


def run_to_end(api: Api, pod: Object) -> Object:
    """Create a pod that does not restart, and wait until it has ended. Returns the state of its container."""
    pod["spec"]["restartPolicy"] = "Never"
    api.create(pod)
    return wait_for_end(api, pod)


def wait_for_end(api: Api, pod: Object) -> Object:
    """Wait until a pod's container has ended. Returns `terminated` of its state."""

    def ended() -> Object | None:
        return state_of(api, pod).get("terminated")

    found: Object = wait_until(ended, "the container has ended", timeout_s=START_S, explain=lambda: describe(api, pod))
    return found


def wait_until_ready(api: Api, pod: Object) -> Object:
    """Wait until a pod is Ready. Returns it."""

    def ready() -> Object | None:
        found = _read(api, pod)
        return found if any(c["type"] == "Ready" and c["status"] == "True" for c in _conditions(found)) else None

    found: Object = wait_until(ready, "the pod is Ready", timeout_s=START_S, explain=lambda: describe(api, pod))
    return found


def state_of(api: Api, pod: Object) -> Object:
    """Return the state of a pod's container: waiting, running or terminated."""
    statuses: list[Object] = _read(api, pod)["status"].get("containerStatuses") or [{}]
    state: Object = statuses[0].get("state", {})
    return state


def describe(api: Api, pod: Object) -> str:
    """Describe a pod's state and its events."""
    found = _read(api, pod)
    events = api.list("v1/events", found["metadata"]["namespace"])
    lines = [
        f"{e['reason']}: {e['message']}" for e in events if e["involvedObject"]["name"] == found["metadata"]["name"]
    ]
    return "\n".join([str(found["status"]), *lines])


def _read(api: Api, pod: Object) -> Object:
    return api.get("v1/pods", pod["metadata"]["name"], pod["metadata"]["namespace"])


def _conditions(pod: Object) -> list[Object]:
    found: list[Object] = pod.get("status", {}).get("conditions") or []
    return found
