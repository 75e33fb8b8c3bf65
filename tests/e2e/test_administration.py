"""What an administrator needs to keep a cluster running, tried on the real API server. docs/cluster-findings.md."""

from __future__ import annotations

import pytest
from tests.e2e.harness.api import RLJOBS, Api, Refused, find_condition, wait_until
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import cpu_job, describe_job, make_place, pods_of, until_condition


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
