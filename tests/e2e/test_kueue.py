"""RLJobs in queues of the real Kueue: quota, scaling, suspension, failure and preemption. docs/e2e.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.controllers.kueue import RACKS, Kueue
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, wait_until
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.nodes import CLIQUE
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import PLAYED, cpu_job, describe_job, gb200_job, make_place, pods_of, until_condition

PREEMPT_LOWER = {"withinClusterQueue": "LowerPriority"}
TRAINER_CPUS = 4
REPLICA_CPUS = 2
JOB_CPUS = TRAINER_CPUS + 2 * REPLICA_CPUS


@pytest.fixture(scope="module")
def kueue(control_plane: ControlPlane, jobset: Workloads, release: Release) -> Iterator[Kueue]:
    """Kueue, installed for these tests alone: its webhooks see every pod of the cluster."""
    installed = Kueue(control_plane)
    installed.install()
    yield installed
    installed.uninstall()


@pytest.fixture
def place(admin: Api, kueue: Kueue, namespace: str) -> Iterator[str]:
    """A restricted namespace with a queue of the same name that has CPUs for one job."""
    make_place(admin, namespace)
    kueue.add_queue(namespace, namespace, {"cpu": str(JOB_CPUS)}, preemption=PREEMPT_LOWER)
    yield namespace
    for job in admin.list(RLJOBS, namespace):
        admin.delete(RLJOBS, job["metadata"]["name"], namespace)
    wait_until(lambda: not admin.list("v1/pods", namespace), "its pods are gone", explain=kueue.describe)


def queued_job(name: str, place: str, **changes: Any) -> Object:
    """Build a job in the namespace's queue, of two replicas."""
    roles = {}
    for role, cpus in (("trainer", TRAINER_CPUS), ("generation", REPLICA_CPUS)):
        container = {"name": role, "resources": {"requests": {"cpu": str(cpus)}}}
        roles[f"{role}.podTemplate"] = {"spec": PLAYED["spec"] | {"containers": [container]}}
    return cpu_job(name, place, **roles, **{"scheduling.queueName": place, "generation.replicas": 2} | changes)


def until_used(kueue: Kueue, queue: str, cpus: int) -> None:
    """Wait until a queue has reserved this many CPUs."""
    wait_until(
        lambda: kueue.read_used(queue, "cpu") == str(cpus),
        f"{cpus} CPUs are reserved",
        explain=lambda: f"{kueue.read_used(queue, 'cpu')}\n{sorted(kueue.list_workloads(queue))}\n{kueue.describe()}",
    )


def until_queued(admin: Api, job: Object) -> None:
    """Wait until a job waits for all its quota: its trainer has no pod, and its replicas are held back."""
    metadata = job["metadata"]

    def is_queued() -> bool:
        found = admin.get(RLJOBS, metadata["name"], metadata["namespace"])
        message = find_condition(found, "QuotaReserved").get("message")
        waits_for_all = message == "waiting for quota: the trainer and 2 replica pods"
        # Deadlines count from the admission.
        return waits_for_all and found["status"]["state"] == "Queued" and "startTime" not in found["status"]

    def is_held() -> bool:
        replicas = pods_of(admin, job, "generation")
        are_gated = len(replicas) == 2 and all(each["spec"].get("schedulingGates") for each in replicas)
        return are_gated and not pods_of(admin, job, "trainer")

    wait_until(is_queued, "it is Queued", explain=lambda: describe_job(admin, job))
    wait_until(is_held, "all its pods are held back", explain=lambda: describe_job(admin, job))
    assert not find_condition(admin.get(RLJOBS, metadata["name"], metadata["namespace"]), "Failed")


def test_a_job_waits_while_the_quota_is_used_and_runs_when_it_is_free(admin: Api, place: str, kueue: Kueue) -> None:
    first = admin.create(queued_job("first", place))
    until_condition(admin, first, "Ready")
    until_condition(admin, first, "QuotaReserved")
    until_used(kueue, place, JOB_CPUS)
    assert sorted(kueue.list_workloads(place)) == [
        "JobSet first-trainer", "Pod first-generation-0", "Pod first-generation-1",
    ]  # fmt: skip
    assert {each["spec"]["queueName"] for each in kueue.list_workloads(place).values()} == {place}

    second = admin.create(queued_job("second", place))
    until_queued(admin, second)
    admin.delete(RLJOBS, "first", place)
    found = until_condition(admin, second, "Ready")
    assert "startTime" in found["status"]
    until_used(kueue, place, JOB_CPUS)


def test_replicas_of_a_queued_job_are_scaled_as_far_as_the_quota_goes(admin: Api, place: str, kueue: Kueue) -> None:
    """C6: Kueue's webhook refuses to scale a StatefulSet of its own, and the job was NotAccepted for ever."""
    job = admin.create(queued_job("scales", place))
    until_condition(admin, job, "Ready")

    admin.scale(RLJOBS, "scales", place, 3)
    waiting = until_condition(admin, job, "QuotaReserved", "False", "Pending")
    assert find_condition(waiting, "QuotaReserved")["message"] == "waiting for quota: 1 replica pods"
    assert find_condition(waiting, "Accepted")["status"] == "True"
    kueue.set_quota(place, "cpu", str(JOB_CPUS + REPLICA_CPUS))
    until_condition(admin, job, "QuotaReserved")
    until_used(kueue, place, JOB_CPUS + REPLICA_CPUS)

    admin.scale(RLJOBS, "scales", place, 1)
    until_used(kueue, place, TRAINER_CPUS + REPLICA_CPUS)
    until_condition(admin, job, "Ready")


def test_a_suspended_and_a_failed_job_give_their_quota_to_others(admin: Api, place: str, kueue: Kueue) -> None:
    """C6, C7: a suspension hung while Kueue refused a change, and a failed job kept its replicas."""
    paused = admin.create(queued_job("paused", place))
    until_condition(admin, paused, "Ready")
    other = admin.create(queued_job("other", place))
    until_queued(admin, other)

    admin.patch(RLJOBS, "paused", {"spec": {"suspend": True}}, place)
    until_condition(admin, paused, "Suspended")
    until_condition(admin, other, "Ready")

    admin.patch(RLJOBS, "paused", {"spec": {"suspend": False}}, place)
    until_queued(admin, paused)
    admin.patch(RLJOBS, "other", {"spec": {"activeDeadlineSeconds": 1}}, place)
    until_condition(admin, other, "Failed", reason="DeadlineExceeded")
    until_condition(admin, paused, "Ready")
    until_used(kueue, place, JOB_CPUS)


def test_a_preempted_job_waits_and_runs_again_and_has_not_failed(admin: Api, place: str, kueue: Kueue) -> None:
    """Kueue suspends the JobSet and deletes the replicas' pods, which the StatefulSet makes again."""
    for name, value in (("low", 10), ("high", 1000)):
        priority = {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": f"{place}-{name}"},
        }
        admin.create(priority | {"value": value})
    low = admin.create(queued_job("low", place, **{"scheduling.priorityClassName": f"{place}-low"}))
    until_condition(admin, low, "Ready")
    high = admin.create(queued_job("high", place, **{"scheduling.priorityClassName": f"{place}-high"}))
    until_condition(admin, high, "Ready")
    until_queued(admin, low)

    admin.delete(RLJOBS, "high", place)
    again = until_condition(admin, low, "Ready")
    assert not again["status"].get("restarts")
    assert find_condition(again, "QuotaReserved")["status"] == "True"


def test_a_replica_of_two_nodes_waits_as_a_whole_and_gets_one_nvlink_domain(
    admin: Api, place: str, kueue: Kueue, lws: Workloads, racks: dict[str, str]
) -> None:
    """A group of a LeaderWorkerSet is one Workload, with the domain as its required topology."""
    kueue.add_racks(CLIQUE, "nvidia.com/gpu.present")
    kueue.add_queue(f"{place}-gpus", place, {"nvidia.com/gpu": "16"}, RACKS)
    job = gb200_job("large", place, replicas=2, trainer_nodes=2)
    job["spec"]["generation"] |= {"gpusPerReplica": 8, "tensorParallel": 8}
    job["spec"]["scheduling"] = {"queueName": f"{place}-gpus"}
    admin.create(job)

    waiting = until_condition(admin, job, "QuotaReserved", "False", "Pending")
    wait_until(
        lambda: kueue.read_used(f"{place}-gpus", "nvidia.com/gpu") == "16",
        "trainer and one replica are admitted",
        explain=lambda: f"{describe_job(admin, job)}\n{kueue.describe()}",
    )
    kueue.set_quota(f"{place}-gpus", "nvidia.com/gpu", "24")
    until_condition(admin, job, "Ready")
    until_condition(admin, job, "QuotaReserved")
    assert not find_condition(waiting, "Failed")
    by_group: dict[str, set[str]] = {}
    for pod in pods_of(admin, job, "generation"):
        group = pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"]
        by_group.setdefault(group, set()).add(racks[pod["spec"]["nodeName"]])
    assert by_group.keys() == {"0", "1"}
    assert all(len(cliques) == 1 for cliques in by_group.values()), by_group

    admin.patch(RLJOBS, "large", {"spec": {"suspend": True}}, place)
    until_condition(admin, job, "Suspended")
    wait_until(
        lambda: kueue.read_used(f"{place}-gpus", "nvidia.com/gpu") == "0",
        "the quota is free",
        explain=lambda: f"{sorted(kueue.list_workloads(place))}\n{kueue.describe()}",
    )
