"""The chart installed from built images, pulled by digest, in a namespace that enforces `restricted`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.node import REGISTRY
from tests.e2e.go_programs import cache_folder
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, wait_until
from tests.e2e.harness.release import Release
from tests.e2e.jobs import pods_of, until_condition
from tests.requirements import PRODUCT_IMAGES

LAYOUT = cache_folder() / "images" / "layout"
IMAGES = {"control": "docker.io/library/specrl-control:0.1.0", "store": "docker.io/valkey/valkey:8.1-alpine"}
NAMESPACE = "specrl-system"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rljob-local.yaml"
CONDITION_S = 300.0  # for a condition of the RLJob, whose coordinator must start first


def find_digests() -> dict[str, str]:
    """Return the digest of each image that `make images` has made."""
    index = LAYOUT / "index.json"
    if not index.is_file():
        PRODUCT_IMAGES.skip(f"no {index}")
    made = {
        each.get("annotations", {}).get("org.opencontainers.image.ref.name"): each["digest"]
        for each in json.loads(index.read_text())["manifests"]
    }
    if missing := [name for name in IMAGES.values() if name not in made]:
        PRODUCT_IMAGES.skip(f"no {', '.join(missing)} in {LAYOUT}")
    return {role: made[name] for role, name in IMAGES.items()}


@pytest.fixture(scope="module")
def digests(cluster: Cluster) -> dict[str, str]:
    """Digests of the images, which are in the registry."""
    assert cluster.registry is not None
    found = find_digests()
    for role, digest in found.items():
        cluster.registry.push_layout(LAYOUT, digest, f"specrl-{role}", "built")
    return found


@pytest.fixture(scope="module")
def release(cluster: Cluster, helm: Path, digests: dict[str, str]) -> Iterator[Release]:
    """An installed release; `helm install --wait` has seen its operator ready."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": NAMESPACE, "labels": labels}
    cluster.admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    control = {"digest": digests["control"]}
    store = {"repository": f"{REGISTRY}/specrl-store", "digest": digests["store"]}
    values = {"images": {"registry": REGISTRY, "control": control, "store": store}, "jobs": {"storeSize": "1Gi"}}
    installed = Release(helm, cluster.kubeconfig, "specrl", NAMESPACE, values)
    installed.install()
    yield installed
    installed.uninstall()


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


def create_example(cluster: Cluster, namespace: str, **changes: Object) -> Object:
    """Create the local example with its claim, and volumes for this and its store. changes: sections of the spec."""
    for purpose in ("run", "store"):
        cluster.add_volume(f"{namespace}-{purpose}")
    claim, job = yaml.safe_load_all(EXAMPLE.read_text())
    for each in (claim, job):
        each["metadata"]["namespace"] = namespace
    job["spec"] |= changes
    cluster.admin.create(claim)
    return cluster.admin.create(job)


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
