"""Findings of reviews and of a real kubelet, each tried on the real API server. docs/cluster-findings.md lists them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.e2e.harness.api import APPLY, RLJOBS, Api, Object, Refused, find_condition, path_of, wait_until
from tests.e2e.harness.kubelet_process import KubeletProcess
from tests.e2e.harness.nodes import OURS
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import cpu_job, describe_job, make_place, pods_of, until_condition

REAL: Object = {"spec": {"nodeSelector": {OURS: "processes"}}}
"""Pod template of a pod that runs as processes."""


@pytest.fixture
def place(admin: Api, release: Release, namespace: str) -> str:
    """A restricted namespace with a claim for checkpoints that the operator watches."""
    return make_place(admin, namespace)


@pytest.mark.parametrize(
    "part",
    [
        {"spec": {"containers": ["trainer"]}},
        {"spec": {"containers": [{"image": "mine"}]}},
        {"spec": {"containers": "trainer"}},
        {"metadata": {"labels": {"team": 1}}},
    ],
)
def test_a_malformed_pod_template_is_refused_at_once(admin: Api, place: str, part: Object) -> None:
    """H13: it was admitted, and the operator failed at every look, without a status."""
    with pytest.raises(Refused, match=r"podTemplate"):
        admin.create(cpu_job("malformed", place, **{"trainer.podTemplate": part}))


def test_a_new_job_is_not_judged_by_pods_of_a_deleted_job_of_its_name(
    admin: Api, place: str, jobset: Workloads
) -> None:
    """Bug 2: Services and policies select by uid, so the pods of both jobs may live side by side."""
    first = admin.create(cpu_job("again", place))
    until_condition(admin, first, "Ready")
    old = {pod["metadata"]["uid"] for pod in pods_of(admin, first)}
    admin.delete(RLJOBS, "again", place)
    second: Object = admin.create(cpu_job("again", place))
    until_condition(admin, second, "Ready", timeout_s=300)
    selector = admin.get("v1/services", "again-coordinator", place)["spec"]["selector"]
    assert selector["specrl.dev/rljob-uid"] == second["metadata"]["uid"]
    assert old.isdisjoint(pod["metadata"]["uid"] for pod in pods_of(admin, second))


def test_what_others_change_is_repaired(admin: Api, place: str, jobset: Workloads) -> None:
    """M1: both stayed as they were, and the job was Running."""
    job = admin.create(cpu_job("drifts", place, **{"generation.replicas": 2}))
    until_condition(admin, job, "Ready")
    admin.scale("apps/v1/statefulsets", "drifts-generation", place, 1)
    wait_until(
        lambda: admin.get("apps/v1/statefulsets", "drifts-generation", place)["spec"]["replicas"] == 2,
        "the replicas are back",
        explain=lambda: describe_job(admin, job),
    )
    policies = "networking.k8s.io/v1/networkpolicies"
    admin.patch(policies, "drifts-peers", {"spec": {"ingress": [{}]}}, place)
    wait_until(
        lambda: admin.get(policies, "drifts-peers", place)["spec"]["ingress"] != [{}], "the policy is closed again"
    )
    selected = admin.get(policies, "drifts-peers", place)["spec"]["podSelector"]
    admin.patch(policies, "drifts-peers", {"spec": {"podSelector": {"matchLabels": {"no": "pod"}}}}, place)
    wait_until(
        lambda: admin.get(policies, "drifts-peers", place)["spec"]["podSelector"] == selected, "all pods are selected"
    )


def test_a_run_file_is_immutable_and_the_one_that_the_pods_mount(admin: Api, place: str, jobset: Workloads) -> None:
    """C5: a newer operator rewrote it under pods with older images."""
    job = admin.create(cpu_job("fixed", place))
    until_condition(admin, job, "Ready")

    def mounted() -> set[str]:
        volumes: list[Any] = [it for pod in pods_of(admin, job) for it in pod["spec"]["volumes"]]
        return {it["configMap"]["name"] for it in volumes if it["name"] == "spec"}

    (name,) = mounted()
    assert admin.get("v1/configmaps", name, place)["immutable"] is True
    admin.patch(RLJOBS, "fixed", {"spec": {"generation": {"replicas": 2}}}, place)
    wait_until(lambda: len(pods_of(admin, job, "generation")) == 2, "it is scaled")
    for pod in pods_of(admin, job, "generation"):
        admin.delete("v1/pods", pod["metadata"]["name"], place)
    until_condition(admin, job, "Ready")
    assert mounted() == {name}


def test_a_quota_that_refuses_pods_is_named_within_a_minute(admin: Api, place: str, jobset: Workloads) -> None:
    """H10: the reason was in events of the pods' owner alone."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team", "namespace": place}}
    admin.create(quota | {"spec": {"hard": {"pods": "0"}}})
    job = admin.create(cpu_job("refused", place))
    for condition in ("CoordinatorReady", "TrainerReady", "GenerationReady"):
        found = until_condition(admin, job, condition, "False", "FailedCreate", timeout_s=60)
        assert "exceeded quota: team" in find_condition(found, condition)["message"]
    admin.delete("v1/resourcequotas", "team", place)


def test_every_pod_passes_restricted_pod_security_and_a_quota(admin: Api, place: str, jobset: Workloads) -> None:
    """C3 and H3: IPC_LOCK was refused by `baseline`, and pods without requests by a quota."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all", "namespace": place}}
    counted = [f"{kind}.{name}" for kind in ("requests", "limits") for name in ("cpu", "memory", "ephemeral-storage")]
    admin.create(quota | {"spec": {"hard": dict.fromkeys(counted, "10000Gi")}})
    job = admin.create(cpu_job("restricted", place))
    until_condition(admin, job, "Ready")
    assert {pod["status"]["qosClass"] for pod in pods_of(admin, job)} == {"Burstable"}


def test_a_trainer_of_two_ranks_that_refuses_fails_the_job_with_its_reason(
    admin: Api, kubelet: KubeletProcess, place: str, jobset: Workloads
) -> None:
    """H1: torchrun ended with 1, so that the trainer was restarted, and its banner was the reason."""
    changes = {"model.path": "/nowhere/policy", "trainer.parallelism": {"data": 2}, "trainer.podTemplate": REAL}
    job = admin.create(cpu_job("refuses", place, **changes))
    found = until_condition(admin, job, "Failed", reason="RunRefused", timeout_s=600)
    assert "/nowhere/policy" in find_condition(found, "Failed")["message"]


def test_a_superseded_coordinator_does_not_fail_the_job(admin: Api, place: str, jobset: Workloads) -> None:
    """M2: after a partition the old coordinator ends with 2, since a newer one has taken the run over."""
    job = admin.create(cpu_job("heals", place))
    until_condition(admin, job, "Ready")
    (old,) = pods_of(admin, job, "coordinator")
    name = old["metadata"]["name"]
    # The finalizer keeps the pod, as a kubelet that is cut off does.
    admin.patch("v1/pods", name, {"metadata": {"finalizers": ["specrl.dev/tests"]}}, place)
    admin.delete("v1/pods", name, place)
    try:
        wait_until(lambda: admin.get("v1/pods", name, place)["status"]["phase"] == "Failed", "it has ended")
        (ended,) = admin.get("v1/pods", name, place)["status"]["containerStatuses"]
        ended["state"]["terminated"] |= {"exitCode": 2, "message": "a newer coordinator has taken the run over"}
        admin.patch("v1/pods", name, {"status": {"containerStatuses": [ended]}}, place, subresource="status")
        # The operator has seen it when it has acted on a later change.
        admin.patch(RLJOBS, "heals", {"spec": {"generation": {"replicas": 2}}}, place)
        wait_until(lambda: len(pods_of(admin, job, "generation")) == 2, "it is scaled")
        found = until_condition(admin, job, "Ready")
        assert find_condition(found, "Failed") == {}
    finally:
        admin.patch("v1/pods", name, {"metadata": {"finalizers": []}}, place)


def test_a_store_that_cannot_start_is_named_within_a_minute(admin: Api, place: str, jobset: Workloads) -> None:
    nowhere = {"spec": {"nodeSelector": {"specrl.dev/no-such-node": "true"}}}
    job = admin.create(cpu_job("storeless", place, **{"store": ..., "storeServer.podTemplate": nowhere}))
    found = until_condition(admin, job, "StoreReady", "False", "Unschedulable", timeout_s=60)
    message = find_condition(found, "StoreReady")["message"]
    assert "storeless-store-0" in message
    assert "ask for less in the spec or the role's podTemplate" in message


def test_the_sandbox_is_tried_before_trainer_and_replicas_are_asked_for(
    admin: Api, place: str, jobset: Workloads
) -> None:
    """M6: the default isolation was refused when GPUs had been taken. The coordinator's pod has only a status here."""
    job = admin.create(cpu_job("tries", place, rewards={"code": {}}))
    until_condition(admin, job, "PlacementReady", "False", "WaitingForSandbox")
    wait_until(lambda: pods_of(admin, job, "coordinator"), "its coordinator is there")
    assert not pods_of(admin, job, "trainer")
    assert not pods_of(admin, job, "generation")
    ready = {"type": "SandboxReady", "status": "True", "reason": "IsolationChosen", "message": "rewards.code: Landlock"}
    condition = ready | {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    manifest = {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": {"name": "tries"}}
    body = manifest | {"status": {"conditions": [condition]}}
    path = path_of(RLJOBS, place, "tries", "status")
    admin.send_request("PATCH", path, body, APPLY, fieldManager="specrl-coordinator-sandbox", force="true")
    found = until_condition(admin, job, "Ready")
    assert find_condition(found, "SandboxReady")["message"] == "rewards.code: Landlock"
