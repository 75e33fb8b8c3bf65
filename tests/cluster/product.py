"""The product as its users install it: images that `make images` has built, by digest, and the chart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import yaml
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.node import REGISTRY
from tests.cluster.harness.pods import create_restricted_namespace
from tests.cluster.story.freshness import hash_sources, list_changes
from tests.cluster.story.log import FULL, Product, StoryLog
from tests.e2e.go_programs import cache_folder
from tests.e2e.harness.api import Object, wait_until
from tests.e2e.harness.release import Release
from tests.requirements import PRODUCT_IMAGES

LAYOUT = cache_folder() / "images" / "layout"
IMAGES = {role: f"docker.io/library/specrl-{role}:0.1.0" for role in ("control", "generation", "trainer")}
IMAGES |= {"store": "docker.io/valkey/valkey:8.1-alpine"}
RELEASE = "specrl"
NAMESPACE = "specrl-system"
NEEDED_GB = 16
"""Free disk space: the registry's and containerd's copies of the engines."""
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rljob-local.yaml"


def find_digests(*roles: str) -> dict[str, str]:
    """Return the digests of images that `make images` has made. Skips the test if one is missing."""
    index = LAYOUT / "index.json"
    if not index.is_file():
        PRODUCT_IMAGES.skip(f"no {index}")
    made = {
        each.get("annotations", {}).get("org.opencontainers.image.ref.name"): each["digest"]
        for each in json.loads(index.read_text())["manifests"]
    }
    if missing := [IMAGES[role] for role in roles if IMAGES[role] not in made]:
        PRODUCT_IMAGES.skip(f"no {', '.join(missing)} in {LAYOUT}")
    return {role: made[IMAGES[role]] for role in roles}


def find_commit_of_engines() -> str:
    """Return the commit that the engines were built from. Skips the test if they are not for CPUs."""
    file = LAYOUT.parent / "cpu.json"
    record = json.loads(file.read_text()) if file.is_file() else {"images": {}}
    built = {role: image["digest"] for role, image in record["images"].items()}
    if built != find_digests(*IMAGES):
        PRODUCT_IMAGES.skip(f"{LAYOUT} has other images than {file}; make images ENGINES=cpu")
    return str(record["commit"])


def push_images(cluster: Cluster, *roles: str) -> dict[str, str]:
    """Push images to the cluster's registry. Returns their digests."""
    found = find_digests(*roles)
    push_digests(cluster, found, "built")
    return found


def push_digests(cluster: Cluster, digests: Mapping[str, str], tag: str) -> None:
    """Push images of the layout, by role, to the cluster's registry."""
    assert cluster.registry is not None
    for role, digest in digests.items():
        cluster.registry.push_layout(LAYOUT, digest, f"specrl-{role}", tag)


@cache
def measure_room(cluster: Cluster) -> float:
    """Measure free disk space in GB, once in each cluster: it has unpacked the images when a second module asks."""
    return shutil.disk_usage(cache_folder()).free / 1e9


def prepare_engines(cluster: Cluster, log: StoryLog) -> dict[str, str]:
    """Push all images to the cluster's registry. Returns their digests. Skips the test if it cannot have engines."""
    free = measure_room(cluster)
    if free < NEEDED_GB:
        PRODUCT_IMAGES.skip(f"they need {NEEDED_GB} GB of free disk space, got {free:.0f} GB")
    commit = find_commit_of_engines()
    if FULL and (changes := list_changes(commit)):
        pytest.fail(f"images must be of this tree, got other sources in {changes[:3]}; make images ENGINES=cpu")
    digests = push_images(cluster, *IMAGES)
    log.product = Product(commit, digests, hash_sources())
    log.add("pushed the images to the registry")
    return digests


def build_values(digests: Mapping[str, str]) -> Object:
    """Build the chart's values for images in the registry."""
    images: Object = {role: {"digest": digest} for role, digest in digests.items()} | {"registry": REGISTRY}
    images["store"] |= {"repository": f"{REGISTRY}/specrl-store"}
    # A definition that stays would belong to this release, and helm would refuse it to one of another name.
    return {"images": images, "jobs": {"storeSize": "1Gi"}, "crds": {"keep": False}}


@contextmanager
def install_release(cluster: Cluster, helm: Path, digests: Mapping[str, str], **more: Object) -> Iterator[Release]:
    """Install the chart in a restricted namespace; `helm install --wait` has seen its operator ready. Leaves nothing.

    digests: of images in the registry. The others are asked for by a tag that the registry has not. more: values.
    """
    create_restricted_namespace(cluster.admin, NAMESPACE)
    installed = Release(helm, cluster.kubeconfig, RELEASE, NAMESPACE, build_values(digests) | more)
    installed.install()
    try:
        yield installed
    finally:
        installed.uninstall()
        cluster.admin.delete("v1/namespaces", NAMESPACE)
        wait_until(lambda: cluster.admin.find("v1/namespaces", NAMESPACE) is None, f"{NAMESPACE} is gone")


def read_example() -> tuple[Object, Object]:
    """Return the local example's claim and RLJob."""
    claim, job = yaml.safe_load_all(EXAMPLE.read_text())
    return claim, job


def build_example(namespace: str, **changes: Object | None) -> tuple[Object, Object]:
    """Build the local example's claim and RLJob. changes: sections of the spec; None removes one."""
    claim, job = read_example()
    for each in (claim, job):
        each["metadata"]["namespace"] = namespace
    job["spec"] = {name: it for name, it in (job["spec"] | changes).items() if it is not None}
    return claim, job


def create_example(cluster: Cluster, namespace: str, **changes: Object | None) -> Object:
    """Create the local example with its claim, and volumes for this and its store.

    changes: sections of the spec; None removes one.
    """
    for purpose in ("run", "store"):
        cluster.add_volume(f"{namespace}-{purpose}")
    claim, job = build_example(namespace, **changes)
    cluster.admin.create(claim)
    return cluster.admin.create(job)
