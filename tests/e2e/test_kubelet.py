"""Tests of our kubelet, which runs pods as local processes, with the real API server, scheduler and controllers.

Each test checks a behaviour of Kubernetes that tests of the operator rely on.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.harness.api import Api, Object, is_condition_true, wait_until
from tests.e2e.harness.kubelet_process import KubeletProcess
from tests.e2e.pods import a_pod

PYTHON = sys.executable

pytestmark = pytest.mark.usefixtures("cpu_nodes")


def test_pod_finds_its_environment_and_volumes(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    metadata = {"name": "settings", "namespace": namespace}
    admin.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"run.yaml": "steps: 3\n"}})
    admin.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"password": "tea"}})
    shell = (
        "echo $PLACE $PASSWORD $ALL; hostname; cat /etc/specrl/run.yaml; cat /etc/specrl/run.yaml/x 2> /dev/null;"
        " touch /etc/specrl/new || echo read only; echo kept > /data/a && cat /data/a; cat /podinfo/name; echo;"
        " touch /outside || echo root is read only; test -s $TOKEN && echo token"
    )
    env = [
        {"name": "PLACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "settings", "key": "password"}}},
        {"name": "ALL", "value": "$(PLACE)-$(NOWHERE)-$$(PLACE)"},
        {"name": "TOKEN", "value": "/var/run/secrets/kubernetes.io/serviceaccount/token"},
    ]
    own_name = {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}
    volumes = [
        {"name": "settings", "configMap": {"name": "settings"}},
        {"name": "data", "emptyDir": {}},
        {"name": "info", "downwardAPI": {"items": [own_name]}},
    ]
    mounts = [
        {"name": "settings", "mountPath": "/etc/specrl", "readOnly": True},
        {"name": "data", "mountPath": "/data"},
        {"name": "info", "mountPath": "/podinfo"},
    ]
    closed = {"readOnlyRootFilesystem": True}
    pod = a_pod(
        "looks-around", namespace, ["bash", "-c", shell], restartPolicy="Never", env=env, securityContext=closed
    )
    pod["spec"]["containers"][0]["volumeMounts"] = mounts
    pod["spec"]["volumes"] = volumes
    admin.create(pod)
    _until_phase(admin, "looks-around", namespace, "Succeeded")
    output = kubelet.log(namespace, "looks-around", "main")
    said = [line for line in output.splitlines() if not line.startswith("touch:")]
    expected = f"{namespace} tea {namespace}-$(NOWHERE)-$(PLACE)|looks-around|steps: 3|read only|kept|looks-around"
    assert "|".join(said) == expected + "|root is read only|token"
    assert not Path("/etc/specrl").exists(), "the machine's own files are untouched"
    assert admin.logs("looks-around", namespace, "main") == output, "kubectl logs shows the same"


def test_token_in_a_pod_is_its_service_accounts(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    code = (
        "import os, ssl, urllib.request as u\n"
        "d = '/var/run/secrets/kubernetes.io/serviceaccount/'\n"
        "url = f\"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}\"\n"
        "path = '/apis/authentication.k8s.io/v1/selfsubjectreviews'\n"
        'body = b\'{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}\'\n'
        "headers = {'Authorization': 'Bearer ' + open(d + 'token').read(), 'Content-Type': 'application/json'}\n"
        "request = u.Request(url + path, body, headers)\n"
        "print(u.urlopen(request, context=ssl.create_default_context(cafile=d + 'ca.crt')).read().decode())\n"
    )
    admin.create(a_pod("asks", namespace, [PYTHON, "-c", code], restartPolicy="Never"))
    _until_phase(admin, "asks", namespace, "Succeeded", lambda: kubelet.log(namespace, "asks", "main"))
    assert f"system:serviceaccount:{namespace}:default" in kubelet.log(namespace, "asks", "main")


def test_deployment_serves_under_its_services_name(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    port = 8080
    labels = {"app": "web"}
    probe = {"httpGet": {"path": "/etc/hostname", "port": "http"}, "periodSeconds": 1}
    template = a_pod("", namespace, [PYTHON, "-m", "http.server", str(port), "--directory", "/"], labels)
    container = template["spec"]["containers"][0]
    container["readinessProbe"] = probe
    container["ports"] = [{"name": "http", "containerPort": port}]
    template["spec"]["terminationGracePeriodSeconds"] = 1
    admin.create(_workload("Deployment", "web", template, replicas=2))
    ports = [{"port": port}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": namespace}}
    admin.create(service | {"spec": {"selector": labels, "ports": ports}})
    wait_until(lambda: _deployment_is_available(admin, "web", namespace, 2), "two pods are available")
    addresses = {pod["status"]["podIP"] for pod in admin.list("v1/pods", namespace)}
    assert len(addresses) == 2, "the same port of 0.0.0.0 twice: each pod has a network of its own"
    ask = f"import urllib.request as u; print(u.urlopen('http://web.{namespace}.svc.cluster.local:{port}/').status)"
    admin.create(a_pod("client", namespace, [PYTHON, "-c", ask], restartPolicy="Never"))
    _until_phase(admin, "client", namespace, "Succeeded", lambda: kubelet.log(namespace, "client", "main"))
    assert kubelet.log(namespace, "client", "main") == "200\n"


def test_job_retries_and_reports_exit_codes(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    last_words = "echo it broke > /dev/termination-log; exit 41"
    template = a_pod("", namespace, ["bash", "-c", last_words], restartPolicy="Never")
    admin.create(_job("breaks", namespace, template, backoffLimit=1))
    wait_until(lambda: is_condition_true(admin.get("batch/v1/jobs", "breaks", namespace), "Failed"), "the job gives up")
    pods = admin.list("v1/pods", namespace, "job-name=breaks")
    assert len(pods) == 2
    for pod in pods:
        ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (ended["exitCode"], ended["message"]) == (41, "it broke\n")


def test_container_is_restarted_with_a_back_off(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    volumes = [{"name": "data", "emptyDir": {}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    shell = "echo again >> /data/runs; test $(wc -l < /data/runs) = 3 || exit 9"
    spec = {"restartPolicy": "OnFailure", "volumes": volumes, "volumeMounts": mounts}
    admin.create(a_pod("third-time", namespace, ["bash", "-c", shell], **spec))
    pod = _until_phase(admin, "third-time", namespace, "Succeeded")
    status = pod["status"]["containerStatuses"][0]
    assert status["restartCount"] == 2
    assert status["lastState"]["terminated"]["exitCode"] == 9


def test_stateful_set_scales_and_its_pods_have_names(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    labels = {"app": "replica"}
    sleep = "trap 'exit 0' TERM; sleep 600 & wait"
    template = a_pod("", namespace, ["bash", "-c", sleep], labels)
    manifest = _workload("StatefulSet", "replica", template, replicas=2)
    manifest["spec"]["serviceName"] = "replica"
    admin.create(manifest)
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "replica", "namespace": namespace}}
    admin.create(service | {"spec": {"clusterIP": "None", "selector": labels}})
    wait_until(lambda: _names(admin, namespace, "app=replica") == ["replica-0", "replica-1"], "two replicas")
    admin.scale("apps/v1/statefulsets", "replica", namespace, 3)
    wait_until(lambda: len(_names(admin, namespace, "app=replica")) == 3, "three replicas")
    wait_until(lambda: is_condition_true(admin.get("v1/pods", "replica-2", namespace), "Ready"), "the third is ready")
    ask = "import socket; print(socket.gethostbyname('replica-2.replica'))"
    admin.create(a_pod("client", namespace, [PYTHON, "-c", ask], restartPolicy="Never"))
    _until_phase(admin, "client", namespace, "Succeeded", lambda: kubelet.log(namespace, "client", "main"))
    third = admin.get("v1/pods", "replica-2", namespace)
    assert kubelet.log(namespace, "client", "main") == third["status"]["podIP"] + "\n"
    admin.scale("apps/v1/statefulsets", "replica", namespace, 1)
    wait_until(lambda: _names(admin, namespace, "app=replica") == ["replica-0"], "the newest go first")


def test_deleted_pod_drains_within_its_grace_period(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    shell = "trap 'sleep 1; echo drained; exit 0' TERM; echo up; sleep 600 & wait"
    admin.create(a_pod("drains", namespace, ["bash", "-c", shell], terminationGracePeriodSeconds=60))
    wait_until(lambda: kubelet.log(namespace, "drains", "main") == "up\n", "it is up")
    admin.delete("v1/pods", "drains", namespace)
    assert admin.find("v1/pods", "drains", namespace) is not None, "it is there while it drains"
    wait_until(lambda: admin.find("v1/pods", "drains", namespace) is None, "it is gone")
    assert kubelet.log(namespace, "drains", "main") == "up\ndrained\n"


def test_pod_that_does_not_listen_is_killed_when_the_grace_period_is_over(
    admin: Api, kubelet: KubeletProcess, namespace: str
) -> None:
    """A program that is process 1 ignores SIGTERM unless it handles it, as in a cluster."""
    admin.create(a_pod("deaf", namespace, ["sleep", "7531"], terminationGracePeriodSeconds=1))
    _until_phase(admin, "deaf", namespace, "Running")
    wait_until(lambda: _processes("sleep", "7531"), "its process is there")
    admin.delete("v1/pods", "deaf", namespace)
    wait_until(lambda: admin.find("v1/pods", "deaf", namespace) is None, "it is gone")
    assert _processes("sleep", "7531") == []


def test_a_liveness_probe_restarts_a_hanging_container(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    probe = {"exec": {"command": ["test", "!", "-e", "/data/hangs"]}, "periodSeconds": 1, "failureThreshold": 2}
    shell = "rm -f /data/hangs; sleep 2; touch /data/hangs; trap 'exit 5' TERM; sleep 600 & wait"
    spec: dict[str, Any] = {"volumes": [{"name": "data", "emptyDir": {}}], "livenessProbe": probe}
    spec["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    admin.create(a_pod("hangs", namespace, ["bash", "-c", shell], **spec))
    wait_until(lambda: _restarts(admin, "hangs", namespace) >= 1, "it is started again")
    status = admin.get("v1/pods", "hangs", namespace)["status"]["containerStatuses"][0]
    assert status["lastState"]["terminated"]["exitCode"] == 5


def test_a_killed_program_is_reported_as_killed(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    admin.create(a_pod("victim", namespace, ["sleep", "7532"], restartPolicy="Never"))
    for process in wait_until(lambda: _processes("sleep", "7532"), "its process is there"):
        process.send_signal(signal.SIGKILL)
    pod = _until_phase(admin, "victim", namespace, "Failed")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137


def test_a_pod_waits_for_the_objects_that_it_mounts(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    volumes = [{"name": "late", "configMap": {"name": "late"}}]
    mounts = [{"name": "late", "mountPath": "/late"}]
    spec = {"restartPolicy": "Never", "volumes": volumes, "volumeMounts": mounts}
    admin.create(a_pod("waits", namespace, ["cat", "/late/word"], **spec))
    wait_until(
        lambda: "late not found" in str(admin.get("v1/pods", "waits", namespace)["status"]), "it says what it lacks"
    )
    metadata = {"name": "late", "namespace": namespace}
    admin.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"word": "here"}})
    _until_phase(admin, "waits", namespace, "Succeeded")
    assert kubelet.log(namespace, "waits", "main") == "here"


def test_claim_outlives_the_pod_that_wrote_to_it(admin: Api, kubelet: KubeletProcess, namespace: str) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": "checkpoints", "namespace": namespace}
    admin.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim})
    volumes = [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}]
    spec: dict[str, Any] = {"restartPolicy": "Never", "volumes": volumes}
    spec["volumeMounts"] = [{"name": "checkpoints", "mountPath": "/checkpoints", "subPath": "run"}]
    admin.create(a_pod("writes", namespace, ["bash", "-c", "echo 7 > /checkpoints/step"], **spec))
    _until_phase(admin, "writes", namespace, "Succeeded")
    admin.delete("v1/pods", "writes", namespace)
    admin.create(a_pod("reads", namespace, ["cat", "/checkpoints/step"], **spec))
    _until_phase(admin, "reads", namespace, "Succeeded")
    assert kubelet.log(namespace, "reads", "main") == "7\n"


def _until_phase(api: Api, name: str, namespace: str, phase: str, explain: Callable[[], str] = lambda: "") -> Object:
    def reached() -> Object | None:
        pod = api.get("v1/pods", name, namespace)
        return pod if pod["status"]["phase"] == phase else None

    found: Object = wait_until(
        reached, f"{name} is {phase}", explain=lambda: f"{api.get('v1/pods', name, namespace)['status']}\n{explain()}"
    )
    return found


def _workload(kind: str, name: str, pod: Object, replicas: int) -> Object:
    """Build a workload with pods like `pod`, in its namespace."""
    labels = pod["metadata"]["labels"]
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": pod["metadata"]["namespace"]},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod["spec"]},
        },
    }


def _job(name: str, namespace: str, template: Object, **spec: Any) -> Object:
    metadata = {"name": name, "namespace": namespace}
    body = {"template": {"spec": template["spec"]}} | spec
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body}


def _deployment_is_available(api: Api, name: str, namespace: str, replicas: int) -> bool:
    return bool(api.get("apps/v1/deployments", name, namespace)["status"].get("availableReplicas", 0) == replicas)


def _names(api: Api, namespace: str, labels: str) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in api.list("v1/pods", namespace, labels))


def _restarts(api: Api, name: str, namespace: str) -> int:
    statuses = api.get("v1/pods", name, namespace)["status"].get("containerStatuses") or [{}]
    return int(statuses[0].get("restartCount", 0))


def _processes(*command: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == list(command)]
