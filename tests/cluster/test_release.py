"""The chart installed from built images, pulled by digest, in a namespace that enforces `restricted`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.node import REGISTRY
from tests.cluster.product import NAMESPACE, create_example, install_release, push_images
from tests.e2e.harness.api import RLJOBS, Api, find_condition, wait_until
from tests.e2e.harness.release import Release
from tests.e2e.jobs import pods_of, until_condition

CONDITION_S = 300.0  # for a condition of the RLJob, whose coordinator must start first


@pytest.fixture(scope="module")
def digests(cluster: Cluster) -> dict[str, str]:
    """Digests of the images, which are in the registry."""
    return push_images(cluster, "control", "store")


@pytest.fixture(scope="module")
def release(cluster: Cluster, helm: Path, digests: dict[str, str]) -> Iterator[Release]:
    """An installed release."""
    with install_release(cluster, helm, digests) as installed:
        yield installed


def test_the_operator_runs_from_its_digest_in_a_restricted_namespace(
    admin: Api, release: Release, digests: dict[str, str]
) -> None:
    (pod,) = admin.list("v1/pods", NAMESPACE, "app.kubernetes.io/component=operator")
    assert pod["metadata"]["namespace"] == NAMESPACE
    (status,) = pod["status"]["containerStatuses"]
    assert status["ready"]
    assert status["restartCount"] == 0
    assert status["imageID"] == f"{REGISTRY}/specrl-control@{digests['control']}"


def test_the_charts_own_tests_pass(admin: Api, release: Release) -> None:
    """Health and metrics through the chart's NetworkPolicy, and the smallest RLJob as a dry run."""
    said = release.test()
    assert said.count("Phase:          Succeeded") >= 2, said
    wait_until(
        lambda: admin.get("apps/v1/deployments", "specrl-operator", NAMESPACE)["status"].get("availableReplicas") == 1,
        "the operator is available",
    )


def test_a_job_whose_pods_admission_refuses_says_so(cluster: Cluster, release: Release, namespace: str) -> None:
    """Its podTemplate mounts the node's root folder, which the restricted profile forbids."""
    volume = {"name": "node", "hostPath": {"path": "/"}}
    job = create_example(cluster, namespace, coordinator={"podTemplate": {"spec": {"volumes": [volume]}}})
    found = until_condition(cluster.admin, job, "CoordinatorReady", "False", "FailedCreate", timeout_s=CONDITION_S)
    message = find_condition(found, "CoordinatorReady")["message"]
    assert 'violates PodSecurity "restricted:latest": restricted volume types' in message
    cluster.admin.delete(RLJOBS, "local", namespace)


def test_a_job_whose_images_cannot_be_pulled_says_so(cluster: Cluster, release: Release, namespace: str) -> None:
    """The registry has no image of replicas and trainers. All pods are admitted by the restricted profile."""
    job = create_example(cluster, namespace)
    for condition in ("GenerationReady", "TrainerReady"):
        found = until_condition(cluster.admin, job, condition, "False", "ImagePullFailed", timeout_s=CONDITION_S)
        assert "not found" in find_condition(found, condition)["message"]
    (coordinator,) = pods_of(cluster.admin, job, "coordinator")
    assert coordinator["spec"]["containers"][0]["image"].startswith(f"{REGISTRY}/specrl-control@sha256:")
    cluster.admin.delete(RLJOBS, "local", namespace)


def test_a_job_whose_run_is_refused_fails_with_the_coordinators_words(
    cluster: Cluster, release: Release, namespace: str
) -> None:
    """The image has no such model, which only a pod can find out."""
    missing = "/opt/specrl/no-such-policy"
    job = create_example(cluster, namespace, model={"path": missing, "dtype": "float32", "maxLength": 192})
    found = until_condition(cluster.admin, job, "Failed", "True", "RunRefused", timeout_s=CONDITION_S)
    assert missing in find_condition(found, "Failed")["message"]
    cluster.admin.delete(RLJOBS, "local", namespace)
