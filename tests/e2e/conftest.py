"""Fixtures: a real control plane for the whole session, and nodes, a kubelet, JobSet and LeaderWorkerSet on demand.

The programs come from `make controlplane` or KUBEBUILDER_ASSETS. Without them the whole tier is skipped, and the reason
says what is unproven. SPECRL_E2E_KUBECONFIG names a cluster to use instead; then tests that need our own nodes are
skipped.
"""

from __future__ import annotations

import base64
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.e2e import binaries
from tests.e2e.harness import nodes as made_up
from tests.e2e.harness.api import Api, wait_until
from tests.e2e.harness.assets import CONTROL_PLANE as PROGRAMS
from tests.e2e.harness.assets import Assets
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.kubelet_process import KubeletProcess
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.requirements import CONTROL_PLANE, HELM, NAMESPACES, OWN_CLUSTER

ROOT = Path(__file__).resolve().parents[2]
NAMES = itertools.count()


@pytest.fixture(scope="session")
def assets() -> Assets:
    """The control plane's programs; skips if they are missing."""
    found = Assets.of_environment()
    if missing := found.missing(*PROGRAMS):
        CONTROL_PLANE.skip(f"no {', '.join(missing)} in {' or '.join(map(str, found.folders))}")
    return found


@pytest.fixture(scope="session")
def control_plane(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane of our own."""
    if "SPECRL_E2E_KUBECONFIG" in os.environ:
        OWN_CLUSTER.skip("SPECRL_E2E_KUBECONFIG is set")
    plane = ControlPlane(assets, tmp_path_factory.mktemp("control-plane"))
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture(scope="session")
def admin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Api:
    """An administrator's client of the tested cluster: ours, or the user's."""
    if "SPECRL_E2E_KUBECONFIG" in os.environ:
        return _admin_of(Path(os.environ["SPECRL_E2E_KUBECONFIG"]), tmp_path_factory.mktemp("cluster"))
    plane: ControlPlane = request.getfixturevalue("control_plane")
    return plane.admin


@pytest.fixture
def namespace(admin: Api) -> Iterator[str]:
    """A namespace for one test. Its default service account exists, without which no pod is admitted."""
    yield from _namespace(admin)


@pytest.fixture
def other_namespace(admin: Api) -> Iterator[str]:
    """A second namespace for the test."""
    yield from _namespace(admin)


def _namespace(admin: Api) -> Iterator[str]:
    name = f"test-{os.getpid()}-{next(NAMES)}"
    admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    wait_until(lambda: admin.find("v1/serviceaccounts", "default", name), "default service account")
    yield name
    admin.delete("v1/namespaces", name)


@pytest.fixture(scope="session")
def kubelet(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeletProcess]:
    """The kubelet of all our nodes. Pods run the programs of this checkout."""
    if control_plane.network is None:
        NAMESPACES.skip("no right to make them")
    played = KubeletProcess(control_plane, tmp_path_factory.mktemp("kubelet"), ROOT)
    played.start()
    yield played
    played.stop()


@pytest.fixture(scope="session")
def cpu_nodes(control_plane: ControlPlane, kubelet: KubeletProcess) -> list[str]:
    """Two nodes: `cpu-real`, whose pods run as processes, and `cpu-played`, whose pods only have statuses."""
    nodes = [made_up.cpu_node("cpu-real", "processes"), made_up.cpu_node("cpu-played", "statuses")]
    return made_up.add_nodes(control_plane.admin, nodes)


@pytest.fixture(scope="session")
def all_racks(control_plane: ControlPlane, kubelet: KubeletProcess) -> dict[str, str]:
    """Two NVLink domains of GB200 nodes: node name to clique number."""
    made_up.add_nodes(control_plane.admin, [*made_up.gb200_rack(1), *made_up.gb200_rack(2)])
    return made_up.clique_of(control_plane.admin)


@pytest.fixture
def racks(admin: Api, all_racks: dict[str, str]) -> dict[str, str]:
    """The same racks without pods: those of earlier tests are deleted first."""

    def inhabited() -> list[str]:
        return [pod["metadata"]["name"] for pod in admin.list("v1/pods") if pod["spec"].get("nodeName") in all_racks]

    wait_until(lambda: not inhabited(), "the racks are empty", explain=inhabited)
    return all_racks


@pytest.fixture(scope="session")
def jobset(assets: Assets, control_plane: ControlPlane) -> Iterator[Workloads]:
    """JobSet's real controller and webhooks."""
    yield from _installed("jobset", assets, control_plane)


@pytest.fixture(scope="session")
def lws(assets: Assets, control_plane: ControlPlane) -> Iterator[Workloads]:
    """LeaderWorkerSet's real controller and webhooks."""
    yield from _installed("lws", assets, control_plane)


@pytest.fixture(scope="session")
def release(control_plane: ControlPlane, cpu_nodes: list[str]) -> Iterator[Release]:
    """The installed chart; its operator runs as a pod. A test that changes it must restore it."""
    HELM.require()
    found = Release(binaries.find("helm"), control_plane.kubeconfig, "specrl", "specrl-system")
    found.install()
    yield found
    found.uninstall()


def _installed(name: str, assets: Assets, plane: ControlPlane) -> Iterator[Workloads]:
    if not assets.has_workloads():
        CONTROL_PLANE.skip(f"no {name} beside it")
    workloads = Workloads(name, assets, plane.admin, plane.folder)
    workloads.install()
    yield workloads
    workloads.stop()


def _admin_of(kubeconfig: Path, folder: Path) -> Api:
    """Connect to the user's cluster, the current context of a kubeconfig with a token."""
    content = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    context = next(each["context"] for each in content["contexts"] if each["name"] == content["current-context"])
    cluster = next(each["cluster"] for each in content["clusters"] if each["name"] == context["cluster"])
    user = next(each["user"] for each in content["users"] if each["name"] == context["user"])
    if "token" not in user:
        sys.exit(f"the user of {kubeconfig} must have a token, got {sorted(user)}; make one: kubectl create token NAME")
    ca = folder / "ca.crt"
    ca.write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
    return Api(cluster["server"], ca, user["token"])
