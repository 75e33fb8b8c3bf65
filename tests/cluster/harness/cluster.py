"""A real single-node Kubernetes: the e2e harness's control plane, a node with containers, DNS, policies, a registry.

Control plane, registry and workload controllers are processes of the machine; everything that pods need is in the
node's namespaces (node.py). Several clusters can run at once, one for each process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import yaml
from tests.cluster.harness import leftovers
from tests.cluster.harness.images import write_image
from tests.cluster.harness.keys import ClientKeys
from tests.cluster.harness.node import NODE, PAUSE_IMAGE, USERS, Node
from tests.cluster.harness.registry import Registry
from tests.cluster.programs.build import find_program
from tests.e2e.harness.api import Api, Object, Refused, wait_until
from tests.e2e.harness.assets import Assets
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.network import NoNetwork
from tests.e2e.harness.workloads import Workloads

ADDONS = Path(__file__).parent / "addons.yaml"
API_PORT = 6443  # that of most clusters; the chart's network policies name it
REGISTRY_PORT = 5000
SHARES = 4096  # of CPU time under contention: as much as four processes
IMAGES = {"coredns": "specrl.test/coredns:1", "pause": PAUSE_IMAGE, "agnhost": "specrl.test/agnhost:1"}
"""Image of each program that the node has without a registry."""


class Cluster:
    """A cluster, from start() to stop(). Must be started from the main thread (tests/e2e/harness/programs.py)."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """say: shows a line of progress."""
        self.name = leftovers.own_name()
        self.folder = leftovers.NODES / self.name
        self._say = say
        self._began = time.monotonic()
        self._workloads: list[Workloads] = []
        self.plane: ControlPlane | None = None
        self.node: Node | None = None
        self.registry: Registry | None = None

    @property
    def admin(self) -> Api:
        assert self.plane is not None
        return self.plane.admin

    @property
    def kubeconfig(self) -> Path:
        assert self.plane is not None
        return self.plane.kubeconfig

    def start(self) -> None:
        """Start everything. Returns when pods run and find each other by name. Raises NoNetwork."""
        for name in leftovers.remove_stale():
            self._report(f"removed what {name} had left")
        self.folder.mkdir(parents=True)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything. Nothing stays on the machine."""
        if self.node is not None:
            self.node.stop()
        for each in self._workloads:
            each.stop()
        if self.registry is not None:
            self.registry.stop()
        if self.plane is not None:
            self.plane.stop()
        leftovers.remove_cgroups(self.name)
        leftovers.remove_folder(self.name)

    def install(self, workloads: str) -> None:
        """Install the controller and webhooks of `jobset` or `lws`."""
        installed = Workloads(workloads, Assets.of_environment(), self.admin, self.folder)
        self._workloads.append(installed)
        installed.install()
        self._report(f"{workloads} answers")

    def add_volume(self, name: str, size: str = "20Gi", *, has_group: bool = True) -> Path:
        """Add a PersistentVolume of the default class: a folder of the node.

        has_group: whether fsGroup applies. To most shared file systems it does not, and the root folder stays root's.
        """
        assert self.node is not None
        folder = self.node.folder / "volumes" / name
        folder.mkdir()
        source: Object = {"local": {"path": str(folder)}} if has_group else {"hostPath": {"path": str(folder)}}
        host = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
        spec: Object = source | {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "folder",
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [host]}]}},
        }
        manifest = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
        self.admin.create(manifest)
        return folder

    def _start(self) -> None:
        keys = ClientKeys.create(self.folder / "keys")
        self.plane = ControlPlane(
            Assets.of_environment(),
            self.folder / "control-plane",
            API_PORT,
            USERS,
            authorization_mode="Node,RBAC",
            enable_admission_plugins="NodeRestriction",
            client_ca_file=keys.authority,
            kubelet_client_certificate=keys.certificate,
            kubelet_client_key=keys.key,
            kubelet_preferred_address_types="InternalIP",
            endpoint_reconciler_type="lease",
        )
        self._report("starting the control plane")
        self.plane.start()
        network = self.plane.network
        if network is None:
            raise NoNetwork("network namespaces must be permitted, got none; run as root")
        self._report("the control plane answers")
        self.registry = Registry(network.gateway, REGISTRY_PORT, self.folder / "registry")
        self.registry.start()
        leftovers.make_cgroups(self.name, SHARES)
        self.node = Node(self.folder / "node", network, self.name)
        self.node.enter()
        self.node.start_containerd(self.registry.url)
        self._report("containerd and the registry answer")
        for program, image in IMAGES.items():
            archive = self.folder / f"{program}.tar"
            write_image(archive, image, find_program(program))
            self.node.load_image(archive)
            archive.unlink()
        self._report(f"loaded {len(IMAGES)} images")
        self.node.start_kubelet(self._client_of, keys.authority)
        for manifest in yaml.safe_load_all(ADDONS.read_text()):
            self.admin.apply(manifest)
        self.node.wait_until_ready(self.admin)
        self.node.start_policies(self._client_of)
        self._report("the node is Ready")
        wait_until(self._has_dns, "DNS", timeout_s=300, explain=lambda: self.node and self.node.tail("kubelet"))
        self._report("DNS answers")

    def _client_of(self, user: str) -> Api:
        assert self.plane is not None
        return self.admin.with_token(self.plane.tokens[user])

    def _has_dns(self) -> bool:
        try:
            found = self.admin.get("apps/v1/deployments", "coredns", "kube-system")
        except Refused:
            return False
        return bool(found.get("status", {}).get("availableReplicas"))

    def _report(self, what: str) -> None:
        self._say(f"{time.monotonic() - self._began:4.0f} s  {what}")
