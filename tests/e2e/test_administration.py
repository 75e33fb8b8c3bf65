"""What an administrator needs to keep a cluster running, tried on the real API server. docs/cluster-findings.md."""

from __future__ import annotations

import pytest
from tests.e2e.harness.api import MERGE, RLJOBS, Api, Object, Refused, find_condition, path_of, wait_until
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import cpu_job, describe_job, make_place, pods_of, until_condition
from tests.integration.hub.test_cluster_job import read_job


@pytest.fixture
def place(admin: Api, release: Release, namespace: str) -> str:
    """A restricted namespace with a claim for checkpoints that the operator watches."""
    return make_place(admin, namespace)


def test_a_failed_job_stops_its_pods_and_a_new_one_starts_from_its_folder(
    admin: Api, place: str, jobset: Workloads
) -> None:
    """C7: the folder has the uid of the job in its name, and no field named another one."""
    old = admin.create(cpu_job("old", place))
    until_condition(admin, old, "Ready")
    progress = {"step": 7, "lastUpdateTime": "2026-01-01T00:00:00Z"}
    admin.patch(RLJOBS, "old", {"status": {"progress": progress}}, place, subresource="status")
    admin.patch(RLJOBS, "old", {"spec": {"activeDeadlineSeconds": 1}}, place)
    failed = until_condition(admin, old, "Failed", reason="DeadlineExceeded")
    wait_until(lambda: not pods_of(admin, old), "its pods are gone", explain=lambda: describe_job(admin, old))
    folder = f"old-{old['metadata']['uid'][:8]}"
    assert f"checkpoint.from: {{claimName: runs, folder: {folder}}}" in find_condition(failed, "Failed")["message"]

    for outside in ("../x", "/x", "x/../../y", ""):
        with pytest.raises(Refused, match=r"spec\.checkpoint\.from\.folder"):
            admin.create(cpu_job("out", place, **{"checkpoint.from": {"claimName": "runs", "folder": outside}}))
    new = admin.create(cpu_job("new", place, **{"checkpoint.from": {"claimName": "runs", "folder": folder}}))
    until_condition(admin, new, "Ready")
    (trainer,) = pods_of(admin, new, "trainer")
    assert f"--checkpoint=/var/lib/specrl/origin/{folder}" in trainer["spec"]["containers"][0]["command"]
    claims = [it for it in trainer["spec"]["volumes"] if "persistentVolumeClaim" in it]
    assert len(claims) == 1


def test_a_coordinator_asks_who_may_read_its_own_job_and_about_nothing_else(
    admin: Api, place: str, jobset: Workloads
) -> None:
    """H6: every service account of the cluster could ask what any user may do."""
    until_condition(admin, admin.create(cpu_job("asks", place)), "Ready")
    coordinator = admin.with_token(admin.token_of("asks", place))
    group = "authorization.k8s.io/v1"

    def is_allowed(namespace: str) -> bool:
        what = {"verb": "get", "group": "specrl.dev", "resource": "rljobs", "namespace": namespace, "name": "asks"}
        review = {"apiVersion": group, "kind": "LocalSubjectAccessReview", "metadata": {"namespace": namespace}}
        spec = {"user": f"system:serviceaccount:{place}:asks", "resourceAttributes": what}
        path = f"/apis/{group}/namespaces/{namespace}/localsubjectaccessreviews"
        return bool(coordinator.send_request("POST", path, review | {"spec": spec})["status"]["allowed"])

    assert is_allowed(place) is False, "it may patch the status, and not read the job"
    with pytest.raises(Refused) as refused:
        is_allowed("default")
    assert refused.value.status == 403
    review = {"apiVersion": group, "kind": "SubjectAccessReview", "spec": {"user": "ada"}}
    with pytest.raises(Refused) as refused:
        coordinator.send_request("POST", f"/apis/{group}/subjectaccessreviews", review)
    assert refused.value.status == 403


def test_a_job_with_a_mirror_gets_a_policy_that_lets_its_trainer_reach_it(
    admin: Api, place: str, jobset: Workloads
) -> None:
    """H4: no policy opened egress for the trainer, and no value could."""
    until_condition(admin, admin.create(cpu_job("mirrors", place, **{"checkpoint.mirror": "s3://b/r"})), "Ready")
    policy = admin.get("networking.k8s.io/v1/networkpolicies", "mirrors-trainer", place)["spec"]
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": 443}]}]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "trainer"


def refuse_scaling(admin: Api, namespace: str) -> None:
    """Let the API server refuse to scale the namespace's StatefulSets, as Kueue's webhook does. Waits until it does."""
    group = "admissionregistration.k8s.io/v1"
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["statefulsets"]}
    same = {"expression": "object.spec.replicas == oldObject.spec.replicas", "message": "no scaling here"}
    policy = {"matchConstraints": {"resourceRules": [rule]}, "validations": [same]}
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    binding = {"policyName": namespace, "validationActions": ["Deny"], "matchResources": here}
    for kind, spec in (("ValidatingAdmissionPolicy", policy), ("ValidatingAdmissionPolicyBinding", binding)):
        admin.create({"apiVersion": group, "kind": kind, "metadata": {"name": namespace}, "spec": spec})

    def is_refused() -> bool:
        (workload,) = admin.list("apps/v1/statefulsets", namespace)
        path = path_of("apps/v1/statefulsets", namespace, workload["metadata"]["name"])
        try:
            admin.send_request("PATCH", path, {"spec": {"replicas": 5}}, MERGE, dryRun="All")
        except Refused as refused:
            return "no scaling here" in refused.message
        return False

    wait_until(is_refused, "scaling is refused")


def test_a_refused_scaling_keeps_nothing_else_from_being_stopped(admin: Api, place: str, jobset: Workloads) -> None:
    """C6: as with Kueue's webhook, the job was Suspending with all its pods, coordinator and trainer among them."""
    job = admin.create(cpu_job("stuck", place))
    until_condition(admin, job, "Ready")
    refuse_scaling(admin, place)
    try:
        admin.scale(RLJOBS, "stuck", place, 2)
        said = until_condition(admin, job, "Accepted", "False", "ChildRejected")
        assert "no scaling here" in find_condition(said, "Accepted")["message"]
        admin.patch(RLJOBS, "stuck", {"spec": {"suspend": True}}, place)
        wait_until(
            lambda: [it["metadata"]["name"] for it in pods_of(admin, job)] == ["stuck-generation-0"],
            "all but the replica are stopped",
            explain=lambda: describe_job(admin, job),
        )
    finally:
        for kind in ("validatingadmissionpolicybindings", "validatingadmissionpolicies"):
            admin.delete(f"admissionregistration.k8s.io/v1/{kind}", place)
    until_condition(admin, job, "Suspended")


def evict(admin: Api, pod: Object) -> None:
    """Evict a pod, as `kubectl drain` does. Raises Refused when a budget forbids it."""
    metadata = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
    path = path_of("v1/pods", metadata["namespace"], metadata["name"], "eviction")
    admin.send_request("POST", path, {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})


def test_a_drain_waits_for_a_running_job_and_not_for_a_suspended_one(admin: Api, place: str, jobset: Workloads) -> None:
    """M7: a drain ended the coordinator and the trainer at any time."""
    job = admin.create(cpu_job("stays", place))
    until_condition(admin, job, "Ready")
    budgets = "policy/v1/poddisruptionbudgets"
    wait_until(
        lambda: admin.get(budgets, "stays", place).get("status", {}).get("currentHealthy") == 2, "both pods are counted"
    )
    for component in ("coordinator", "trainer"):
        with pytest.raises(Refused, match="disruption budget") as refused:
            evict(admin, pods_of(admin, job, component)[0])
        assert refused.value.status == 429
    evict(admin, pods_of(admin, job, "generation")[0])
    admin.patch(RLJOBS, "stays", {"spec": {"suspend": True}}, place)
    until_condition(admin, job, "Suspended")
    assert admin.find(budgets, "stays", place) is None


def test_a_pod_on_a_lost_node_is_named_with_what_to_do(admin: Api, place: str, jobset: Workloads) -> None:
    """H2: its object stays for ever, and the condition said that a pod was not ready. No kubelet runs on this node."""
    node = f"dead-{place}"
    spec = {"unschedulable": True}
    admin.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}, "spec": spec})
    try:
        job = admin.create(cpu_job("lost", place, **{"generation.podTemplate": {"spec": {"nodeName": node}}}))
        wait_until(lambda: pods_of(admin, job, "generation"), "it has a replica")
        admin.delete("v1/pods", "lost-generation-0", place, gracePeriodSeconds=1)
        said = until_condition(admin, job, "GenerationReady", "False", "NodeLost", timeout_s=240)
        assert f"kubectl taint nodes {node} node.kubernetes.io" in find_condition(said, "GenerationReady")["message"]
    finally:
        admin.delete("v1/nodes", node)
    wait_until(
        lambda: pods_of(admin, job, "generation"), "it is replaced", 240, explain=lambda: describe_job(admin, job)
    )


def test_a_job_in_the_host_network_is_refused_with_what_to_do(admin: Api, place: str, jobset: Workloads) -> None:
    """H5: it was accepted, and its policies kept its own pods apart."""
    gpus = {"placement.profile": "Generic", "trainer.gpusPerNode": 1, "generation.gpusPerReplica": 1}
    job = admin.create(cpu_job("host", place, **gpus, **{"placement.rdma": {"hostNetwork": "Enabled"}}))
    said = until_condition(admin, job, "Accepted", "False", "Unsupported")
    assert "networkPolicy.nodeCidrs" in find_condition(said, "Accepted")["message"]


def test_the_job_that_fetches_a_model_is_admitted_where_pods_are_restricted(admin: Api, place: str) -> None:
    """H9: nobody said how weights get into a claim."""
    job = read_job()
    job["metadata"]["namespace"] = place
    admin.create(job)
    wait_until(
        lambda: admin.list("v1/pods", place, f"job-name={job['metadata']['name']}"),
        "it has a pod",
        explain=lambda: admin.get("batch/v1/jobs", job["metadata"]["name"], place),
    )


def test_pods_of_a_job_that_fetches_its_model_have_init_containers_and_image_volumes(
    admin: Api, place: str, jobset: Workloads
) -> None:
    """H9: the pods are admitted where Pod Security is `restricted`, and the API server keeps every field."""
    model = {"mountPath": "/models/qwen", "uri": "hf://Qwen/Qwen3-0.6B", "claimName": "runs", "secretName": "hub"}
    data = {"mountPath": "/data", "image": "registry.example.com/data/gsm8k:1"}
    with pytest.raises(Refused, match=r"uri: .*must end with @ and a commit of 40 digits, without claimName"):
        admin.create(cpu_job("branch", place, volumes=[{"mountPath": "/m", "uri": "hf://Qwen/Qwen3-0.6B"}]))
    with pytest.raises(Refused, match=r"volumes\[0\]\.uri"):
        admin.create(cpu_job("scheme", place, volumes=[{"mountPath": "/m", "uri": "file:///etc"}]))
    job = admin.create(cpu_job("fetches", place, **{"volumes": [model, data], "model.path": "/models/qwen"}))
    until_condition(admin, job, "Ready")
    found = {it["metadata"]["labels"]["app.kubernetes.io/component"]: it["spec"] for it in pods_of(admin, job)}
    assert sorted(found) == ["coordinator", "generation", "trainer"]
    for role, spec in found.items():
        (fetch,) = spec["initContainers"]
        assert fetch["command"][:4] == ["specrl", "fetch", "hf://Qwen/Qwen3-0.6B", "--out"]
        assert ("--skip-weights" in fetch["command"]) == (role == "coordinator")
        images = [it["image"]["reference"] for it in spec["volumes"] if "image" in it]
        assert images == ["registry.example.com/data/gsm8k:1"]
    policy = admin.get("networking.k8s.io/v1/networkpolicies", "fetches-fetch", place)["spec"]
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": 443}]}]
