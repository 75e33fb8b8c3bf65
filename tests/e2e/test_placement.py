"""GB200 placement by the real scheduler, on 36 nodes in two NVLink domains."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import compute_domain
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, is_condition_true, wait_until
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.nodes import CLUSTER
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import cliques_of, gb200_job, kubectl, list_remaining_objects, make_place, pods_of, until_condition

JOB_SETS = "jobset.x-k8s.io/v1alpha2/jobsets"


@pytest.fixture(scope="module", autouse=True)
def _domains(control_plane: ControlPlane) -> Iterator[None]:
    compute_domain.install_crd(control_plane.admin)
    yield
    compute_domain.uninstall_crd(control_plane.admin)


@pytest.fixture
def place(admin: Api, release: Release, jobset: Workloads, racks: dict[str, str], namespace: str) -> str:
    """A restricted namespace with a claim for checkpoints, in a cluster with two racks, JobSet and the operator."""
    return make_place(admin, namespace)


def test_twelve_replicas_and_four_trainer_nodes_fill_one_domain(admin: Api, place: str, racks: dict[str, str]) -> None:
    job = admin.create(gb200_job("qwen3", place, layout="SameDomain", nvlink="Required"))
    ready = until_condition(admin, job, "Ready")
    assert len(pods_of(admin, job, "trainer")) == 4
    assert len(pods_of(admin, job, "generation")) == 12
    cliques = cliques_of(admin, job, racks)
    assert cliques["trainer"] == cliques["generation"]
    assert len(cliques["trainer"]) == 1
    nodes = Counter(pod["spec"]["nodeName"] for pod in pods_of(admin, job) if pod["spec"]["nodeName"] in racks)
    assert set(nodes.values()) == {1}, "whole nodes"
    assert ready["status"]["placement"]["multiNodeNVLink"] == "Unknown"  # no process tells which transport NCCL took
    for pod in pods_of(admin, job):
        if pod["spec"]["nodeName"] in racks:
            (claimed,) = pod["status"]["resourceClaimStatuses"]
            stored = admin.get("resource.k8s.io/v1/resourceclaims", claimed["resourceClaimName"], place)
            (result,) = stored["status"]["allocation"]["devices"]["results"]
            assert result["pool"] == pod["spec"]["nodeName"], "the node's own channel"


def test_both_ends_of_the_weight_communicator_get_the_same_nccl_settings(admin: Api, place: str) -> None:
    job = admin.create(gb200_job("same", place, replicas=2, trainer_nodes=2, layout="SameDomain", nvlink="Required"))
    until_condition(admin, job, "Ready")
    settings = {
        tuple(
            sorted(
                (each["name"], each["value"]) for each in pod["spec"]["containers"][0]["env"] if "NCCL" in each["name"]
            )
        )
        for pod in (*pods_of(admin, job, "trainer"), *pods_of(admin, job, "generation"))
    }
    assert len(settings) == 1, settings
    assert ("NCCL_MNNVL_ENABLE", "1") in settings.pop()


def test_roles_are_placed_in_separate_domains(admin: Api, place: str, racks: dict[str, str]) -> None:
    job = admin.create(gb200_job("apart", place, layout="SeparateDomains"))
    until_condition(admin, job, "Ready")
    cliques = cliques_of(admin, job, racks)
    assert len(cliques["trainer"]) == len(cliques["generation"]) == 1
    assert cliques["trainer"].isdisjoint(cliques["generation"])


def test_layout_any_may_use_more_gpus_than_one_domain_has(admin: Api, place: str, racks: dict[str, str]) -> None:
    job = admin.create(gb200_job("any", place, replicas=20, layout="Any"))
    until_condition(admin, job, "Ready")
    deadline_free = wait_until(lambda: len(pods_of(admin, job, "generation")) == 20, "all replicas")
    assert deadline_free
    assert cliques_of(admin, job, racks)["generation"] == {"1", "2"}


def test_a_job_that_does_not_fit_reports_it_and_runs_later(admin: Api, place: str, racks: dict[str, str]) -> None:
    """Each job fills a domain. Affinity alone cannot check whether a domain has room for all of a smaller job."""
    whole = {"replicas": 14, "trainer_nodes": 4, "layout": "SameDomain"}
    for name in ("first", "second"):
        until_condition(admin, admin.create(gb200_job(name, place, **whole)), "Ready")
    third = admin.create(gb200_job("third", place, **whole))
    waiting = until_condition(admin, third, "Ready", "False", "Unschedulable")
    assert "nodes" in find_condition(waiting, "Ready")["message"], "the scheduler's own words"
    admin.delete(RLJOBS, "first", place)
    until_condition(admin, third, "Ready", timeout_s=300)
    assert len(cliques_of(admin, third, racks)["generation"]) == 1


def test_two_jobs_with_multi_node_nvlink_never_share_a_domain(admin: Api, place: str, racks: dict[str, str]) -> None:
    small = {"replicas": 2, "trainer_nodes": 2, "layout": "SameDomain", "nvlink": "Required"}
    jobs = [admin.create(gb200_job(name, place, **small)) for name in ("one", "two")]
    for job in jobs:
        until_condition(admin, job, "Ready")
    one, two = (cliques_of(admin, job, racks)["trainer"] for job in jobs)
    assert one.isdisjoint(two)
    third = admin.create(gb200_job("three", place, **small))
    until_condition(admin, third, "Ready", "False", "Unschedulable")


def test_scaling_changes_replicas_and_not_the_trainer(admin: Api, place: str, racks: dict[str, str]) -> None:
    job = admin.create(gb200_job("scales", place, layout="SameDomain"))
    until_condition(admin, job, "Ready")
    trainer = [pod["metadata"]["uid"] for pod in pods_of(admin, job, "trainer")]
    for replicas in (14, 10):
        admin.scale(RLJOBS, "scales", place, replicas)
        wait_until(lambda n=replicas: len(pods_of(admin, job, "generation")) == n, f"{replicas} replicas")  # type: ignore[misc]
        wait_until(
            lambda n=replicas: admin.get(RLJOBS, "scales", place, "scale")["status"]["replicas"] == n,  # type: ignore[misc]
            "the scale subresource says so",
        )
    assert [pod["metadata"]["uid"] for pod in pods_of(admin, job, "trainer")] == trainer
    assert len(cliques_of(admin, job, racks)["generation"]) == 1


def test_replicas_of_two_nodes_are_groups_that_stay_in_one_domain(
    admin: Api, place: str, racks: dict[str, str], lws: Workloads, tmp_path: Path
) -> None:
    """Replicas are placed, counted and scaled by leaders, and recreated as a whole when a container restarts."""
    manifest = gb200_job("large", place, replicas=9, layout="SeparateDomains")
    manifest["spec"]["generation"] |= {"gpusPerReplica": 8, "tensorParallel": 8}
    job = admin.create(manifest)
    ready = until_condition(admin, job, "Ready")

    def groups() -> dict[str, list[Object]]:
        """Return the pods of each group in order, by the leader's name."""
        found: dict[str, list[Object]] = defaultdict(list)
        for pod in pods_of(admin, job, "generation"):
            found["-".join(pod["metadata"]["name"].split("-")[:3])].append(pod)
        return {
            name: pods
            for name, pods in found.items()
            if len(pods) == 2 and all(is_condition_true(pod, "Ready") for pod in pods)
        }

    wait_until(lambda: len(groups()) == 9, "nine groups are ready")
    for leader, pods in groups().items():
        assert [pod["metadata"]["name"] for pod in pods] == [leader, f"{leader}-1"]
        assert len({racks[pod["spec"]["nodeName"]] for pod in pods}) == 1, "no replica straddles domains"
        told = [{each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]} for pod in pods]
        assert [env["LWS_WORKER_INDEX"] for env in told] == ["0", "1"]
        assert {env["LWS_LEADER_ADDRESS"] for env in told} == {f"{leader}.large-generation.{place}"}
    assert len({pod["spec"]["nodeName"] for pods in groups().values() for pod in pods}) == 18, "whole nodes"
    (trainers,) = cliques_of(admin, job, racks)["trainer"]
    domain = f"{CLUSTER}.{trainers}"
    assert ready["status"]["placement"]["domain"] == domain
    described = kubectl(admin, tmp_path, "describe", "rljob/large", "--namespace", place)
    assert re.search(rf"Placement:\s+Domain:\s+{re.escape(domain)}\s", described), described
    scale = admin.get(RLJOBS, "large", place, "scale")["status"]
    assert (scale["replicas"], len(admin.list("v1/pods", place, scale["selector"]))) == (9, 9), "leaders alone"

    admin.scale(RLJOBS, "large", place, 3)
    wait_until(lambda: len(pods_of(admin, job, "generation")) == 6, "three groups are left")
    before = {name: [pod["metadata"]["uid"] for pod in pods] for name, pods in groups().items()}
    member = "large-generation-1-1"
    admin.patch("v1/pods", member, {"metadata": {"annotations": {"specrl.dev/plays": "CrashLooping"}}}, place)

    def anew() -> dict[str, bool]:
        now = {name: [pod["metadata"]["uid"] for pod in pods] for name, pods in groups().items()}
        return {name: set(uids).isdisjoint(now[name]) for name, uids in before.items()} if len(now) == 3 else {}

    wanted = {"large-generation-0": False, "large-generation-1": True, "large-generation-2": False}
    wait_until(lambda: anew() == wanted, "the whole group is another one, and no other group is", explain=anew)


def test_deleted_job_leaves_nothing(admin: Api, place: str) -> None:
    job = admin.create(gb200_job("gone", place, replicas=2, trainer_nodes=2, layout="SameDomain", nvlink="Required"))
    until_condition(admin, job, "Ready")
    more = (JOB_SETS, compute_domain.KIND)
    assert list_remaining_objects(admin, job, *more), "there is something to leave"
    admin.delete(RLJOBS, "gone", place)
    wait_until(
        lambda: not list_remaining_objects(admin, job, *more),
        "nothing is left",
        explain=lambda: list_remaining_objects(admin, job, *more),
    )
