"""Pods on a real kubelet: what the restricted profile asks for, and what a container runtime makes of it."""

from __future__ import annotations

import contextlib
import ssl

import httpx2
import pytest
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.node import NODE, Node
from tests.cluster.harness.pods import build_pod, build_server, run_to_end, wait_for_end, wait_until_ready
from tests.e2e.harness.api import Api, Refused, is_condition_true


def test_node_is_ready_with_a_real_runtime(admin: Api) -> None:
    (node,) = admin.list("v1/nodes")
    assert is_condition_true(node, "Ready")
    info = node["status"]["nodeInfo"]
    assert info["containerRuntimeVersion"].startswith("containerd://")
    assert info["kubeletVersion"] == admin.send_request("GET", "/version")["gitVersion"]


def test_a_restricted_pod_passes_its_probes_and_has_logs_and_exec(admin: Api, namespace: str, kubectl: Kubectl) -> None:
    pod = build_server("server", namespace)
    admin.create(pod)
    ready = wait_until_ready(admin, pod)
    assert ready["spec"]["nodeName"] == NODE
    assert ready["status"]["containerStatuses"][0]["restartCount"] == 0
    assert "Started HTTP server on port 8080" in admin.logs("server", namespace, "main")
    said = kubectl.run("exec", "--namespace", namespace, "server", "--", "/agnhost", "connect", "127.0.0.1:8080")
    assert said.stdout == ""


def test_a_container_has_no_capabilities_a_filter_and_a_read_only_root(admin: Api, namespace: str, node: Node) -> None:
    """What the processes of the pod really have, as the kernel says."""
    pod = build_server("server", namespace)
    admin.create(pod)
    wait_until_ready(admin, pod)
    found = node.run("sh", "-c", "grep -E '^(Uid|CapBnd|NoNewPrivs|Seccomp):' /proc/$(pgrep -o agnhost)/status").stdout
    status = dict(line.split(":") for line in found.splitlines())
    assert {key: value.split()[0] for key, value in status.items()} == {
        "Uid": "65532",
        "CapBnd": "0000000000000000",
        "NoNewPrivs": "1",
        "Seccomp": "2",  # a filter
    }


def test_the_root_of_a_container_cannot_be_written(admin: Api, namespace: str) -> None:
    ended = run_to_end(admin, build_pod("writer", namespace, "mounttest", "--new_file_0644=/file"))
    assert ended["exitCode"] == 1
    assert "read-only file system" in admin.logs("writer", namespace, "main")


def test_a_claim_belongs_to_the_pods_group(admin: Api, namespace: str, cluster: Cluster) -> None:
    """fsGroup: a user who is not root writes to a folder that root made, and the file has the group."""
    folder = cluster.add_volume(f"{namespace}-volume")
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": "data", "namespace": namespace}
    admin.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim})
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    checks = ["--new_file_0644=/data/file", "--file_owner=/data/file", "--file_mode=/data"]
    mounts = [{"name": "data", "mountPath": "/data"}]
    pod = build_pod("writer", namespace, "mounttest", *checks, volumes=[volume], volumeMounts=mounts)
    ended = run_to_end(admin, pod)
    said = admin.logs("writer", namespace, "main")
    assert ended["exitCode"] == 0, said
    assert 'mode of file "/data": dgtrwxrwxr-x' in said or 'mode of file "/data": dgrwxrwxr-x' in said
    assert (folder / "file").stat().st_gid == 65532
    assert (folder / "file").stat().st_uid == 65532


def test_a_container_that_exceeds_its_memory_is_killed(admin: Api, namespace: str) -> None:
    """The limit is the kernel's: the program ends by SIGKILL, and the status says why."""
    limits = {"requests": {"memory": "24Mi"}, "limits": {"memory": "24Mi"}}
    pod = build_server("greedy", namespace, resources=limits, restartPolicy="Never")
    admin.create(pod)
    wait_until_ready(admin, pod)
    path = f"/api/v1/namespaces/{namespace}/pods/greedy:8080/proxy/upload"
    # agnhost reads a form of up to 32 MiB into memory.
    with contextlib.suppress(httpx2.HTTPError):
        httpx2.post(
            f"{admin.server}{path}",
            files={"file": ("file", bytes(30 << 20))},
            headers={"Authorization": f"Bearer {admin.token}"},
            verify=ssl.create_default_context(cafile=str(admin.ca)),
            timeout=120,
            trust_env=False,
        )
    ended = wait_for_end(admin, pod)
    assert ended["reason"] == "OOMKilled"
    assert ended["exitCode"] == 137


def test_a_pod_without_a_security_context_is_refused(admin: Api, namespace: str) -> None:
    pod = build_pod("plain", namespace, "pause")
    del pod["spec"]["securityContext"]
    del pod["spec"]["containers"][0]["securityContext"]
    with pytest.raises(Refused) as refused:
        admin.create(pod)
    assert refused.value.status == 403
    assert 'violates PodSecurity "restricted' in refused.value.message


def test_a_deleted_pod_ends_within_its_grace(admin: Api, namespace: str, kubectl: Kubectl) -> None:
    pod = build_pod("sleeper", namespace, "pause")
    admin.create(pod)
    wait_until_ready(admin, pod)
    kubectl.run("delete", "pod", "sleeper", "--namespace", namespace, "--wait")
    assert admin.find("v1/pods", "sleeper", namespace) is None


def test_kubelet_may_change_only_what_is_its_nodes(admin: Api, cluster: Cluster) -> None:
    """NodeRestriction: a stolen kubelet's credential is no administrator's."""
    assert cluster.plane is not None
    kubelet = admin.with_token(cluster.plane.tokens[f"system:node:{NODE}"])
    with pytest.raises(Refused) as refused:
        kubelet.patch("v1/nodes", NODE, {"metadata": {"labels": {"node-restriction.kubernetes.io/zone": "x"}}})
    assert refused.value.status == 403
    with pytest.raises(Refused):
        kubelet.list("v1/secrets")
