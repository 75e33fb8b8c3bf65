"""Kueue's real controller, scheduler and webhooks. It makes its own certificates, as upstream's manifests let it."""

from __future__ import annotations

import yaml
from tests.e2e.controllers.build import KUEUE, KUEUE_CRDS
from tests.e2e.controllers.installed import Installed, is_ready
from tests.e2e.harness.api import Object, wait_until
from tests.e2e.harness.control_plane import ControlPlane

from specrl.launcher.processes.ports import find_free_port

NAMESPACE = "kueue-system"
SERVICE = "kueue-webhook-service"
SECRET = "kueue-webhook-server-cert"
GROUP = "kueue.x-k8s.io/v1beta2"
WORKLOADS = f"{GROUP}/workloads"
CLUSTER_QUEUES = f"{GROUP}/clusterqueues"
LOCAL_QUEUES = f"{GROUP}/localqueues"
FLAVORS = f"{GROUP}/resourceflavors"
TOPOLOGIES = f"{GROUP}/topologies"
WEBHOOKS = "admissionregistration.k8s.io/v1"
INTEGRATIONS = [
    *("batch/job", "jobset.x-k8s.io/jobset", "pod", "deployment", "statefulset"),
    "leaderworkerset.x-k8s.io/leaderworkerset",
]
"""Those of upstream's default configuration whose kinds are served here."""
MACHINES = "machines"
RACKS = "racks"
"""Names of flavors: of nodes without a topology, and of GB200 nodes in theirs."""
OTHERS = {"cpu": "10k", "memory": "2000Ti", "ephemeral-storage": "2000Ti"}
"""Quotas that hold nothing back. Kueue admits no pod that asks for a resource without a quota."""
CONVERTED = ("localqueues", "clusterqueues", "workloads", "cohorts", "multikueueclusters")


class Kueue:
    """An installed Kueue, whose queues tests make and fill."""

    def __init__(self, plane: ControlPlane) -> None:
        self._it = Installed(KUEUE, plane, NAMESPACE)
        self._admin = plane.admin

    def install(self) -> None:
        """Install everything. Returns when the webhooks answer."""
        service = {"namespace": NAMESPACE, "name": SERVICE, "path": "/convert"}
        webhook = {"clientConfig": {"service": service}, "conversionReviewVersions": ["v1"]}
        conversion = {"conversion": {"strategy": "Webhook", "webhook": webhook}}
        self._it.install_crds([f"{name}.yaml" for name in KUEUE_CRDS], dict.fromkeys(CONVERTED, conversion))
        place = {"name": SECRET, "namespace": NAMESPACE}
        self._admin.apply({"apiVersion": "v1", "kind": "Secret", "metadata": place})
        for webhooks in self._it.read("webhooks.yaml"):
            webhooks["metadata"]["name"] = f"kueue-{webhooks['metadata']['name']}"
            for each in webhooks["webhooks"]:
                each["clientConfig"]["service"] |= {"name": SERVICE, "namespace": NAMESPACE}
            self._admin.apply(webhooks)
        port = find_free_port()
        health = find_free_port()
        self._it.serve(SERVICE, port)
        program = self._it.start("kueue", "--config", self._write_configuration(port, health), "--zap-log-level=3")
        self._it.mount_secret(SECRET, self._it.folder / "certificates")
        program.wait_until(lambda: is_ready(health), "readiness")
        self._apply("ResourceFlavor", {"name": MACHINES}, {})

    def add_queue(
        self, name: str, namespace: str, quota: dict[str, str], flavor: str = MACHINES, preemption: Object | None = None
    ) -> None:
        """Create a ClusterQueue with a quota per resource, and a LocalQueue of the same name in a namespace."""
        resources = [{"name": resource, "nominalQuota": amount} for resource, amount in (OTHERS | quota).items()]
        group = {"coveredResources": list(OTHERS | quota), "flavors": [{"name": flavor, "resources": resources}]}
        spec: Object = {"namespaceSelector": {}, "resourceGroups": [group]}
        if preemption is not None:
            spec["preemption"] = preemption
        self._apply("ClusterQueue", {"name": name}, spec)
        self._apply("LocalQueue", {"name": name, "namespace": namespace}, {"clusterQueue": name})

    def add_racks(self, domain_label: str, node_label: str) -> None:
        """Create the flavor `racks` of nodes with a label, in a topology of domains and nodes."""
        levels = [{"nodeLabel": domain_label}, {"nodeLabel": "kubernetes.io/hostname"}]
        self._apply("Topology", {"name": RACKS}, {"levels": levels})
        self._apply("ResourceFlavor", {"name": RACKS}, {"nodeLabels": {node_label: "true"}, "topologyName": RACKS})

    def set_quota(self, name: str, resource: str, amount: str) -> None:
        """Change a ClusterQueue's quota of one resource."""
        groups = self._admin.get(CLUSTER_QUEUES, name)["spec"]["resourceGroups"]
        for each in groups[0]["flavors"][0]["resources"]:
            if each["name"] == resource:
                each["nominalQuota"] = amount
        self._admin.patch(CLUSTER_QUEUES, name, {"spec": {"resourceGroups": groups}})

    def read_used(self, name: str, resource: str) -> str:
        """Return how much of a resource a ClusterQueue has reserved, as a quantity."""
        for flavor in self._admin.get(CLUSTER_QUEUES, name).get("status", {}).get("flavorsReservation") or []:
            for each in flavor["resources"]:
                if each["name"] == resource:
                    return str(each["total"])
        return "0"

    def list_workloads(self, namespace: str) -> dict[str, Object]:
        """List the Workloads of a namespace by kind and name of their owner."""
        found = {}
        for each in self._admin.list(WORKLOADS, namespace):
            for owner in each["metadata"].get("ownerReferences", []):
                found[f"{owner['kind']} {owner['name']}"] = each
        return found

    def describe(self) -> str:
        """Return the end of Kueue's log."""
        return self._it.describe()

    def uninstall(self) -> None:
        """Remove everything while the controller still runs, since it holds queues back by finalizers."""
        for each in self._admin.list(LOCAL_QUEUES):
            self._admin.delete(LOCAL_QUEUES, each["metadata"]["name"], each["metadata"]["namespace"])
        for kind in (WORKLOADS, CLUSTER_QUEUES, FLAVORS, TOPOLOGIES):
            for each in self._admin.list(kind):
                self._admin.delete(kind, each["metadata"]["name"], each["metadata"].get("namespace"))
            wait_until(lambda kind=kind: not self._admin.list(kind), f"{kind} are gone", explain=self.describe)  # type: ignore[misc]
        for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
            self._admin.delete(
                f"{WEBHOOKS}/{kind}", f"kueue-{kind.removesuffix('webhookconfigurations')}-webhook-configuration"
            )
        self._it.stop()

    def _apply(self, kind: str, metadata: Object, spec: Object) -> None:
        self._admin.apply({"apiVersion": GROUP, "kind": kind, "metadata": metadata, "spec": spec})

    def _write_configuration(self, port: int, health: int) -> str:
        content = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": NAMESPACE,
            "webhook": {"host": self._it.address, "port": port, "certDir": str(self._it.folder / "certificates")},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"qps": 300, "burst": 500},
            "integrations": {"frameworks": INTEGRATIONS},
            "featureGates": {"VisibilityOnDemand": False},  # its server writes to the machine's root folder
        }
        file = self._it.folder / "configuration.yaml"
        file.write_text(yaml.safe_dump(content))
        return str(file)
