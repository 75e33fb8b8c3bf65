"""Node objects without machines: GB200 racks with the GPU operator's labels, and CPU nodes.

To the scheduler they look like real ones: arm64, four GPUs per node, 18 nodes per NVLink domain, the clique label, the
two usual taints, and one IMEX channel per node as a DRA device. The kubelet (tests/e2e/kubelet) renews their leases;
otherwise Kubernetes' node controller would evict their pods.
"""

from __future__ import annotations

from typing import Any

from tests.e2e.harness.api import Api, Object

GPUS = 4
NODES_PER_DOMAIN = 18
CLIQUE = "nvidia.com/gpu.clique"
CLUSTER = "8f4d1c1e-0b1a-4f7e-9a53-5d6f5a1e7c10"
IMEX_DRIVER = "compute-domain.nvidia.com"
IMEX_CLASS = "compute-domain-default-channel.nvidia.com"
OURS = "specrl.dev/kubelet"
"""Label of the nodes of our kubelet. `statuses`: pods only get statuses. `processes`: pods run as processes."""


def gb200_rack(clique: int, nodes: int = NODES_PER_DOMAIN) -> list[Object]:
    """Build the nodes of one NVLink domain. Their pods only get statuses."""
    return [_gb200_node(f"gb200-r{clique:02}-n{number:02}", clique) for number in range(nodes)]


def cpu_node(name: str, plays: str) -> Object:
    """Build a node without GPUs, of this machine's architecture. plays: see OURS; `statuses` also taints the node."""
    taints = [{"key": OURS, "value": plays, "effect": "NoSchedule"}] if plays == "statuses" else []
    return _node(name, "amd64", {OURS: plays}, {"cpu": "64", "memory": "256Gi"}, taints)


def _gb200_node(name: str, clique: int) -> Object:
    labels = {
        OURS: "statuses",
        CLIQUE: f"{CLUSTER}.{clique}",
        "nvidia.com/gpu.product": "NVIDIA-GB200",
        "nvidia.com/gpu.family": "blackwell",
        "nvidia.com/gpu.count": str(GPUS),
        "nvidia.com/gpu.memory": "189471",
        "nvidia.com/gpu.present": "true",
        "node.kubernetes.io/instance-type": "gb200-nvl72",
    }
    taints = [
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
        {"key": "kubernetes.io/arch", "value": "arm64", "effect": "NoSchedule"},
    ]
    return _node(name, "arm64", labels, {"cpu": "140", "memory": "924Gi", "nvidia.com/gpu": str(GPUS)}, taints)


def _node(name: str, arch: str, labels: dict[str, str], room: dict[str, str], taints: list[Any]) -> Object:
    general = {"kubernetes.io/hostname": name, "kubernetes.io/arch": arch, "kubernetes.io/os": "linux"}
    room = room | {"pods": "250", "ephemeral-storage": "1Ti"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": general | labels},
        "spec": {"taints": taints},
        "status": {"capacity": room, "allocatable": room, "nodeInfo": _info(arch)},
    }


def _info(arch: str) -> Object:
    names = ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion")
    versions = {"kubeletVersion": "v1.36.3", "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": arch}
    return dict.fromkeys(names, "none") | versions


def imex_class() -> Object:
    """Build the DeviceClass that NVIDIA's DRA driver installs for the default channel."""
    expression = f"device.driver == '{IMEX_DRIVER}' && device.attributes['{IMEX_DRIVER}'].type == 'channel'"
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": IMEX_CLASS},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }


def imex_channel(node: str) -> Object:
    """Build the ResourceSlice that the driver publishes for a node: one channel, for one pod."""
    device = {"name": "channel-0", "attributes": {"type": {"string": "channel"}, "id": {"int": 0}}}
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-imex"},
        "spec": {"driver": IMEX_DRIVER, "nodeName": node, "pool": pool, "devices": [device]},
    }


def add_nodes(api: Api, nodes: list[Object]) -> list[str]:
    """Create the nodes, and an IMEX channel for each in a rack. Returns their names. They stay all session."""
    if api.find("resource.k8s.io/v1/deviceclasses", IMEX_CLASS) is None:
        api.create(imex_class())
    for node in nodes:
        api.create(node)
        if CLIQUE in node["metadata"]["labels"]:
            api.create(imex_channel(node["metadata"]["name"]))
    return [node["metadata"]["name"] for node in nodes]


def clique_of(api: Api) -> dict[str, str]:
    """Return the clique number of each node of the racks, by name."""
    nodes = api.list("v1/nodes", labels=CLIQUE)
    return {node["metadata"]["name"]: node["metadata"]["labels"][CLIQUE].rpartition(".")[2] for node in nodes}
