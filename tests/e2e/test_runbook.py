"""Objects that an administrator may delete by hand, and what follows (docs/runbook.md), on the real API server."""

from __future__ import annotations

import pytest
from tests.e2e.harness.api import RLJOBS, Api, Object, wait_until
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import cpu_job, describe_job, make_place, pods_of, until_condition

GROUPS = {
    "rbac": "rbac.authorization.k8s.io/v1",
    "net": "networking.k8s.io/v1",
}
WITHOUT_EFFECT = (
    ("v1/services", "job-coordinator"),
    ("v1/services", "job-generation"),
    (f"{GROUPS['net']}/networkpolicies", "job-peers"),
    (f"{GROUPS['net']}/networkpolicies", "job-coordinator"),
    (f"{GROUPS['rbac']}/rolebindings", "job"),
    (f"{GROUPS['rbac']}/roles", "job"),
    ("v1/serviceaccounts", "job"),
    ("policy/v1/poddisruptionbudgets", "job"),
    ("autoscaling/v2/horizontalpodautoscalers", "job-generation"),
)
"""Objects that are made again at once, while every pod stays."""
WORKLOADS = (
    ("apps/v1/deployments", "job-coordinator", "coordinator"),
    ("apps/v1/statefulsets", "job-generation", "generation"),
    ("jobset.x-k8s.io/v1alpha2/jobsets", "job-trainer", "trainer"),
)


@pytest.fixture
def place(admin: Api, release: Release, namespace: str) -> str:
    """A restricted namespace with a claim for checkpoints that the operator watches."""
    return make_place(admin, namespace)


def delete_and_wait(admin: Api, job: Object, kind: str, name: str) -> None:
    """Delete a child, and wait until the operator has made another one."""
    place = job["metadata"]["namespace"]
    uid = admin.get(kind, name, place)["metadata"]["uid"]
    admin.delete(kind, name, place)

    def is_new() -> bool:
        return any(it["metadata"]["name"] == name and it["metadata"]["uid"] != uid for it in admin.list(kind, place))

    wait_until(is_new, f"{kind} {name} is made again", explain=lambda: describe_job(admin, job))


def uids(admin: Api, job: Object, component: str = "") -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods_of(admin, job, component)}


def test_what_is_deleted_of_a_running_job_is_made_again(admin: Api, place: str, jobset: Workloads) -> None:
    job = admin.create(cpu_job("job", place, **{"generation.autoscaling": {"maxReplicas": 2}}))
    until_condition(admin, job, "Ready")
    before = uids(admin, job)
    for kind, name in WITHOUT_EFFECT:
        delete_and_wait(admin, job, kind, name)
    (run_file,) = (it for it in admin.list("v1/configmaps", place) if it["metadata"]["name"].startswith("job-run-"))
    delete_and_wait(admin, job, "v1/configmaps", run_file["metadata"]["name"])
    assert uids(admin, job) == before, "no pod is restarted"
    for kind, name, component in WORKLOADS:
        old = uids(admin, job, component)
        others = uids(admin, job) - old
        delete_and_wait(admin, job, kind, name)
        wait_until(
            lambda component=component, old=old: (found := uids(admin, job, component)) and not found & old,
            f"there are new pods of {component} alone",
            explain=lambda: describe_job(admin, job),
        )
        assert others <= uids(admin, job)
    until_condition(admin, job, "Ready")


def test_the_claim_of_a_running_job_stays_until_its_pods_are_gone(admin: Api, place: str, jobset: Workloads) -> None:
    job = admin.create(cpu_job("job", place))
    until_condition(admin, job, "Ready")
    admin.delete("v1/persistentvolumeclaims", "runs", place)
    claim = admin.get("v1/persistentvolumeclaims", "runs", place)
    assert "deletionTimestamp" in claim["metadata"]
    assert claim["metadata"]["finalizers"] == ["kubernetes.io/pvc-protection"]
    assert pods_of(admin, job)
    admin.patch(RLJOBS, "job", {"spec": {"suspend": True}}, place)
    until_condition(admin, job, "Suspended")
    wait_until(lambda: not admin.list("v1/persistentvolumeclaims", place), "the claim is gone")


def test_a_password_that_is_deleted_is_made_again_as_another_one(admin: Api, place: str, jobset: Workloads) -> None:
    """So coordinator and store must both start again: docs/runbook.md says how."""
    job = admin.create(cpu_job("job", place, store=...))
    wait_until(lambda: pods_of(admin, job, "store"), "the store is asked for", explain=lambda: describe_job(admin, job))
    password = admin.get("v1/secrets", "job-store", place)["data"]["password"]
    delete_and_wait(admin, job, "v1/secrets", "job-store")
    assert admin.get("v1/secrets", "job-store", place)["data"]["password"] != password


def test_the_lease_of_the_operator_is_made_again_by_its_leader(admin: Api, release: Release) -> None:
    (lease,) = admin.list("coordination.k8s.io/v1/leases", release.namespace)
    name = lease["metadata"]["name"]
    holder = lease["spec"]["holderIdentity"]
    admin.delete("coordination.k8s.io/v1/leases", name, release.namespace)
    wait_until(
        lambda: [
            it
            for it in admin.list("coordination.k8s.io/v1/leases", release.namespace)
            if it["spec"]["holderIdentity"] and it["metadata"]["uid"] != lease["metadata"]["uid"]
        ],
        f"another lease is held; the first one's holder was {holder}",
    )
