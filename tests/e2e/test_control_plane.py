"""Tests of the harness: what other tests assume about the control plane, its nodes and its controllers."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tests.e2e.harness.api import Api, Object, Refused, is_condition_true, wait_until
from tests.e2e.harness.assets import CONTROL_PLANE
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.nodes import CLIQUE, GPUS, IMEX_CLASS, NODES_PER_DOMAIN
from tests.e2e.harness.workloads import Workloads
from tests.e2e.pods import gpu_pod

ROOT = Path(__file__).resolve().parents[2]


def test_server_says_which_kubernetes_it_is(admin: Api) -> None:
    version = admin.send_request("GET", "/version")
    assert version["gitVersion"].startswith("v1.36."), version


def test_a_service_account_has_no_rights_without_a_role(admin: Api, namespace: str) -> None:
    token = admin.token_of("default", namespace)
    account = admin.with_token(token)
    with pytest.raises(Refused) as refused:
        account.list("v1/configmaps", namespace)
    assert refused.value.status == 403
    group = "rbac.authorization.k8s.io"
    metadata = {"name": "reader", "namespace": namespace}
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}]
    admin.create({"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules})
    admin.create(
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
        }
    )
    found = wait_until(lambda: _list_or_none(account, namespace), "the role takes effect")
    assert [each["metadata"]["name"] for each in found] == ["kube-root-ca.crt"]


def test_owned_objects_are_deleted_with_their_owner(admin: Api, namespace: str) -> None:
    owner = admin.create(_config_map("owner", namespace))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    owned = _config_map("owned", namespace)
    owned["metadata"]["ownerReferences"] = [reference]
    admin.create(owned)
    admin.delete("v1/configmaps", "owner", namespace)
    wait_until(lambda: admin.find("v1/configmaps", "owned", namespace) is None, "garbage collection")


def test_the_nodes_of_a_rack_have_the_labels_and_taints_of_the_gpu_operator(admin: Api, racks: dict[str, str]) -> None:
    assert Counter(racks.values()) == {"1": NODES_PER_DOMAIN, "2": NODES_PER_DOMAIN}
    nodes = wait_until(
        lambda: _ready_nodes(admin, len(racks)), "every node is ready and without the taint of one that is not"
    )
    for node in nodes:
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == str(GPUS)
        assert node["metadata"]["labels"]["kubernetes.io/arch"] == "arm64"


def test_the_scheduler_keeps_pods_in_one_domain_and_the_rest_wait(
    admin: Api, racks: dict[str, str], namespace: str
) -> None:
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": [_together("whole-rack")]}
    for number in range(NODES_PER_DOMAIN + 1):
        admin.create(
            gpu_pod(f"gpu-{number}", namespace, {"together": "whole-rack"}, affinity={"podAffinity": affinity})
        )
    placed = wait_until(lambda: _placed(admin, namespace, NODES_PER_DOMAIN), "a rack is filled")
    assert len({racks[pod["spec"]["nodeName"]] for pod in placed}) == 1
    assert len({pod["spec"]["nodeName"] for pod in placed}) == NODES_PER_DOMAIN
    waiting = [pod for pod in admin.list("v1/pods", namespace) if "nodeName" not in pod["spec"]]
    assert len(waiting) == 1, "one pod has no node left in its rack"
    wait_until(lambda: _is_unschedulable(admin, waiting[0]), "the scheduler says why")


def test_node_has_one_imex_channel(admin: Api, racks: dict[str, str], namespace: str) -> None:
    """Two pods with half a node's GPUs each would fit, but both claim the node's one channel."""
    requests = [{"name": "channel", "exactly": {"deviceClassName": IMEX_CLASS}}]
    admin.create(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": "imex", "namespace": namespace},
            "spec": {"spec": {"devices": {"requests": requests}}},
        }
    )
    node = sorted(racks)[0]
    for name in ("first", "second"):
        pod = gpu_pod(name, namespace, gpus=2, nodeSelector={"kubernetes.io/hostname": node})
        pod["spec"]["resourceClaims"] = [{"name": "imex", "resourceClaimTemplateName": "imex"}]
        pod["spec"]["containers"][0]["resources"]["claims"] = [{"name": "imex"}]
        admin.create(pod)
    wait_until(lambda: _placed(admin, namespace, 1), "one pod has the channel")
    waiting = wait_until(
        lambda: [p for p in admin.list("v1/pods", namespace) if _is_unschedulable(admin, p)], "one waits"
    )
    assert len(waiting) == 1


def test_jobset_controller_makes_its_jobs(admin: Api, racks: dict[str, str], jobset: Workloads, namespace: str) -> None:
    template = {"spec": gpu_pod("", namespace)["spec"] | {"restartPolicy": "Never"}}
    job = {"parallelism": 4, "completions": 4, "completionMode": "Indexed", "template": template}
    replicated = [{"name": "node", "template": {"spec": job}}]
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "trainer", "namespace": namespace},
        "spec": {"replicatedJobs": replicated},
    }
    admin.create(manifest)
    pods = wait_until(lambda: _ready_pods(admin, namespace, 4), "four pods are ready")
    assert {pod["spec"]["subdomain"] for pod in pods} == {"trainer"}, "its webhook or controller gave them a name"
    stored = admin.get("jobset.x-k8s.io/v1alpha2/jobsets", "trainer", namespace)
    assert stored["spec"]["network"]["enableDNSHostnames"] is True, "its webhook fills in defaults"
    changed = {"spec": {"replicatedJobs": [replicated[0] | {"replicas": 2}]}}
    with pytest.raises(Refused, match="immutable"):
        admin.patch("jobset.x-k8s.io/v1alpha2/jobsets", "trainer", changed, namespace)


def test_lws_controller_makes_its_groups(admin: Api, racks: dict[str, str], lws: Workloads, namespace: str) -> None:
    template = {"spec": gpu_pod("", namespace)["spec"]}
    manifest = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "generation", "namespace": namespace},
        "spec": {"replicas": 2, "leaderWorkerTemplate": {"size": 2, "workerTemplate": template}},
    }
    admin.create(manifest)
    pods = wait_until(lambda: _ready_pods(admin, namespace, 4), "two groups of two are ready")
    names = {pod["metadata"]["name"] for pod in pods}
    assert names == {"generation-0", "generation-0-1", "generation-1", "generation-1-1"}


def test_nothing_is_left_when_the_test_run_is_killed(control_plane: ControlPlane, tmp_path: Path) -> None:
    """When the process that started a control plane is killed, all of its processes die."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "from tests.e2e.harness.assets import Assets\n"
        "from tests.e2e.harness.control_plane import ControlPlane\n"
        "ControlPlane(Assets.of_environment(), Path(sys.argv[1])).start()\n"
        "print('up', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "plane"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        said = starter.stdout.readline()
        started = psutil.Process(starter.pid).children()
        programs = {Path(process.exe()).name for process in started}
        starter.send_signal(signal.SIGKILL)
    assert said == "up\n"
    assert set(CONTROL_PLANE) <= programs
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []


def _config_map(name: str, namespace: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}}


def _list_or_none(api: Api, namespace: str) -> list[Object] | None:
    try:
        return api.list("v1/configmaps", namespace)
    except Refused:
        return None


def _together(group: str) -> Object:
    return {"labelSelector": {"matchLabels": {"together": group}}, "topologyKey": CLIQUE}


def _ready_nodes(api: Api, count: int) -> list[Object]:
    nodes = [node for node in api.list("v1/nodes", labels=CLIQUE) if is_condition_true(node, "Ready")]
    clean = [node for node in nodes if not any("not-ready" in taint["key"] for taint in node["spec"]["taints"])]
    return clean if len(clean) == count else []


def _placed(api: Api, namespace: str, count: int) -> list[Object]:
    pods = [pod for pod in api.list("v1/pods", namespace) if "nodeName" in pod["spec"]]
    return pods if len(pods) == count else []


def _ready_pods(api: Api, namespace: str, count: int) -> list[Object]:
    pods = [pod for pod in api.list("v1/pods", namespace) if is_condition_true(pod, "Ready")]
    return pods if len(pods) == count else []


def _is_unschedulable(api: Api, pod: Object) -> bool:
    found = api.get("v1/pods", pod["metadata"]["name"], pod["metadata"]["namespace"])
    conditions = found.get("status", {}).get("conditions", [])
    return any(each.get("reason") == "Unschedulable" for each in conditions)
