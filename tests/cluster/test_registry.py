"""Images and charts from a real registry."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.harness.cluster import IMAGES, Cluster
from tests.cluster.harness.images import write_image
from tests.cluster.harness.node import REGISTRY, Node
from tests.cluster.harness.pods import START_S, build_pod, describe, run_to_end, state_of
from tests.cluster.harness.registry import Registry
from tests.cluster.programs.build import find_program
from tests.e2e.harness.api import Api, wait_until

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm"
CONTAINERD = ("--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io")


def push(node: Node, registry: Registry, image: str, repository: str) -> None:
    """Push an image that the node has."""
    target = f"{registry.host}/{repository}"
    node.run(node.ctr, *CONTAINERD, "images", "push", "--plain-http", target, image)


def test_an_image_is_pushed_and_pulled_by_its_digest(
    admin: Api, namespace: str, node: Node, registry: Registry, tmp_path: Path
) -> None:
    name = "specrl.test/pushed:1"
    digest = write_image(tmp_path / "image.tar", name, find_program("agnhost"), user="65533:65533")
    node.load_image(tmp_path / "image.tar")
    push(node, registry, name, "pushed:1")
    assert registry.digest_of("pushed", "1") == digest
    node.run(node.ctr, *CONTAINERD, "images", "rm", "--sync", name)
    pulled = f"{REGISTRY}/pushed@{digest}"
    ended = run_to_end(admin, build_pod("pulled", namespace, "mounttest", "--file_mode=/agnhost", image=pulled))
    assert ended["exitCode"] == 0
    status = admin.get("v1/pods", "pulled", namespace)["status"]["containerStatuses"][0]
    assert status["imageID"] == pulled
    events = [each["reason"] for each in admin.list("v1/events", namespace)]
    assert "Pulled" in events
    assert "Pulling" in events


def test_a_tag_that_is_missing_backs_off(admin: Api, namespace: str, node: Node, registry: Registry) -> None:
    push(node, registry, IMAGES["pause"], "exists:1")
    pod = build_pod("missing", namespace, "pause", image=f"{REGISTRY}/exists:2")
    admin.create(pod)

    def waits() -> str:
        return str(state_of(admin, pod).get("waiting", {}).get("reason", ""))

    wait_until(
        lambda: waits() == "ImagePullBackOff", "backs off", timeout_s=START_S, explain=lambda: describe(admin, pod)
    )
    messages = [each["message"] for each in admin.list("v1/events", namespace) if each["reason"] == "Failed"]
    assert any(f"{REGISTRY}/exists:2: not found" in message for message in messages), messages


def test_the_chart_is_pushed_and_installed_from_the_registry(
    cluster: Cluster, namespace: str, helm: Path, tmp_path: Path
) -> None:
    """The release's objects exist. Its pods need images, which other tests have."""

    def run(*arguments: str | Path) -> str:
        command = [helm, *arguments, "--kubeconfig", cluster.kubeconfig]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"helm {arguments[0]}: {done.stderr}\n{done.stdout}"
        return done.stdout + done.stderr

    admin = cluster.admin
    registry = cluster.registry
    assert registry is not None
    run("package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("specrl-*.tgz")
    said = run("push", package, f"oci://{registry.host}/charts", "--plain-http")
    assert "Digest: sha256:" in said
    chart = f"oci://{registry.host}/charts/specrl"
    values = f"images.registry={REGISTRY},crds.keep=false"
    run("install", "pulled", chart, "--plain-http", "--namespace", namespace, "--set", values)
    try:
        deployment = admin.get("apps/v1/deployments", "pulled-specrl-operator", namespace)
        pods = lambda: admin.list("v1/pods", namespace, "app.kubernetes.io/component=operator")  # noqa: E731
        # The namespace admits restricted pods only, and the node's kubelet asked for the image.
        (pod,) = wait_until(pods, "the operator's pod is admitted", explain=lambda: deployment)
        assert pod["spec"]["containers"][0]["image"].startswith(f"{REGISTRY}/specrl-control:")
    finally:
        run("uninstall", "pulled", "--namespace", namespace, "--wait")
