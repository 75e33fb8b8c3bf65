"""The operator with the chart's ServiceAccount: suspension, missing dependencies, refusals, leader election."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.e2e.harness import compute_domain
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, is_condition_true, wait_until
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import (
    cpu_job,
    describe_job,
    gb200_job,
    list_remaining_objects,
    make_place,
    pods_of,
    until_condition,
)

JOB_SETS = "jobset.x-k8s.io/v1alpha2/jobsets"
LEADER_WORKER_SETS = "leaderworkerset.x-k8s.io/v1/leaderworkersets"
LEASES = "coordination.k8s.io/v1/leases"


@pytest.fixture
def place(admin: Api, release: Release, namespace: str) -> str:
    """A restricted namespace with a claim for checkpoints that the operator watches."""
    return make_place(admin, namespace)


@pytest.fixture
def without_jobset(jobset: Workloads) -> Iterator[None]:
    """A cluster without JobSet for one test."""
    jobset.uninstall()
    yield
    jobset.install()


@pytest.fixture
def without_lws(lws: Workloads) -> Iterator[Callable[[], None]]:
    """A cluster without LeaderWorkerSet; the value installs it again."""
    lws.uninstall()
    yield lws.install
    lws.stop()
    lws.install()


def test_a_suspended_job_deletes_its_pods_and_continues_when_resumed(admin: Api, place: str, jobset: Workloads) -> None:
    job = admin.create(cpu_job("pauses", place))
    until_condition(admin, job, "Ready")
    admin.patch(RLJOBS, "pauses", {"spec": {"suspend": True}}, place)
    until_condition(admin, job, "Suspended", reason="PodsDeleted")
    wait_until(lambda: not pods_of(admin, job), "no pods", explain=lambda: describe_job(admin, job))
    assert admin.find("v1/persistentvolumeclaims", "runs", place) is not None, "what it resumes from"
    admin.patch(RLJOBS, "pauses", {"spec": {"suspend": False}}, place)
    until_condition(admin, job, "Suspended", "False", "Resumed")
    until_condition(admin, job, "Ready")


def test_without_jobset_the_trainer_is_a_job_and_the_status_says_so(
    admin: Api, place: str, without_jobset: None
) -> None:
    job = admin.create(cpu_job("plain", place))
    ready = until_condition(admin, job, "Ready", timeout_s=300)
    assert admin.get("batch/v1/jobs", "plain-trainer", place)["spec"]["completionMode"] == "Indexed"
    assert "JobSet is not installed" in find_condition(ready, "Accepted")["message"]


def test_jobset_is_used_as_soon_as_it_is_installed(admin: Api, place: str, jobset: Workloads) -> None:
    """The status of a suspended job shows when the operator has discovered JobSet."""
    job = admin.create(cpu_job("set", place, suspend=True))

    def is_known() -> bool:
        return find_condition(admin.get(RLJOBS, "set", place), "Accepted").get("message") == ""

    wait_until(is_known, "the operator knows of JobSet", timeout_s=300, explain=lambda: describe_job(admin, job))
    admin.patch(RLJOBS, "set", {"spec": {"suspend": False}}, place)
    until_condition(admin, job, "Ready")
    assert admin.find(JOB_SETS, "set-trainer", place) is not None
    assert admin.find("batch/v1/jobs", "set-trainer", place) is None


def test_replica_larger_than_a_node_waits_for_leaderworkerset_and_says_so(
    admin: Api, place: str, racks: dict[str, str], jobset: Workloads, without_lws: Callable[[], None]
) -> None:
    manifest = gb200_job("large", place, replicas=2, trainer_nodes=2)
    manifest["spec"]["generation"] |= {"gpusPerReplica": 8, "tensorParallel": 8}
    job = admin.create(manifest)
    said = find_condition(until_condition(admin, job, "Accepted", "False", "DependencyMissing"), "Accepted")["message"]
    assert "LeaderWorkerSet" in said
    assert "https://" in said, "where to get it"
    without_lws()
    until_condition(admin, job, "Ready", timeout_s=300)
    assert admin.find(LEADER_WORKER_SETS, "large-generation", place) is not None


def test_without_compute_domain_required_nvlink_is_refused_and_preferred_is_inactive(
    admin: Api, place: str, racks: dict[str, str], jobset: Workloads
) -> None:
    strict = admin.create(
        gb200_job("strict", place, replicas=2, trainer_nodes=2, nvlink="Required", layout="SameDomain")
    )
    said = until_condition(admin, strict, "Accepted", "False", "DependencyMissing")
    assert "ComputeDomain" in find_condition(said, "Accepted")["message"]
    lax = admin.create(gb200_job("lax", place, replicas=2, trainer_nodes=2, nvlink="Preferred", layout="SameDomain"))
    ready = until_condition(admin, lax, "Ready")
    assert ready["status"]["placement"]["multiNodeNVLink"] == "Inactive"
    (container,) = pods_of(admin, lax, "trainer")[0]["spec"]["containers"]
    assert {"name": "NCCL_MNNVL_ENABLE", "value": "0"} in container["env"]
    compute_domain.install_crd(admin)
    try:
        until_condition(admin, strict, "Ready", timeout_s=420)
    finally:
        admin.delete(RLJOBS, "strict", place)
        compute_domain.uninstall_crd(admin)


def test_a_job_with_a_queue_does_not_run_without_kueue(admin: Api, place: str) -> None:
    job = admin.create(cpu_job("queued", place, **{"scheduling.queueName": "team"}))
    said = until_condition(admin, job, "Accepted", "False", "DependencyMissing")
    assert "Kueue" in find_condition(said, "Accepted")["message"]
    assert pods_of(admin, job) == []


def test_object_of_another_owner_is_not_adopted(admin: Api, place: str, jobset: Workloads) -> None:
    metadata = {"name": "taken-generation", "namespace": place}
    spec = {"selector": {"mine": "yes"}, "ports": [{"port": 80}]}
    admin.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    job = admin.create(cpu_job("taken", place))
    said = until_condition(admin, job, "Ready", "False", "ChildConflict")
    assert "taken-generation" in find_condition(said, "Ready")["message"]
    assert admin.get("v1/services", "taken-generation", place)["spec"]["selector"] == {"mine": "yes"}
    admin.delete(RLJOBS, "taken", place)
    wait_until(
        lambda: not list_remaining_objects(admin, job),
        "what it made is gone",
        explain=lambda: list_remaining_objects(admin, job),
    )
    assert admin.find("v1/services", "taken-generation", place) is not None


def test_crashing_replicas_are_named_by_the_condition(admin: Api, place: str, jobset: Workloads) -> None:
    job = admin.create(cpu_job("crashes", place))
    until_condition(admin, job, "Ready")
    for pod in pods_of(admin, job, "generation"):
        admin.patch(
            "v1/pods",
            pod["metadata"]["name"],
            {"metadata": {"annotations": {"specrl.dev/plays": "CrashLooping"}}},
            place,
        )
    said = until_condition(admin, job, "GenerationReady", "False", "CrashLooping")
    assert "crashes-generation-0: exit code 1" in find_condition(said, "GenerationReady")["message"]
    assert find_condition(said, "Ready")["reason"] == "CrashLooping"


def test_one_of_two_operators_leads_and_the_other_takes_over(admin: Api, release: Release, place: str) -> None:
    release.upgrade(operator={"replicas": 2})
    try:
        first = wait_until(lambda: _leader(admin, release), "somebody leads")
        pods = [pod for pod in _operators(admin, release) if is_condition_true(pod, "Ready")]
        assert len(pods) == 2, "both are ready; one of them acts"
        leading = next(pod for pod in pods if first.startswith(pod["metadata"]["name"]))
        admin.delete("v1/pods", leading["metadata"]["name"], release.namespace, gracePeriodSeconds=0)
        second = wait_until(lambda: _leader(admin, release, other_than=first), "the other takes over")
        assert second != first
        job = admin.create(cpu_job("led", place))
        until_condition(admin, job, "Accepted")
    finally:
        release.upgrade()


def _operators(api: Api, release: Release) -> list[Object]:
    found = api.list("v1/pods", release.namespace, "app.kubernetes.io/component=operator")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def _leader(api: Api, release: Release, other_than: str = "") -> str:
    lease = api.find(LEASES, release.name, release.namespace) or {"spec": {}}
    holder: str = lease["spec"].get("holderIdentity") or ""
    return "" if holder == other_than else holder
