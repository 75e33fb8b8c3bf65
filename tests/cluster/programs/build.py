"""Builds what a real node runs: kubelet, kube-proxy, containerd, policies, DNS, a registry, and test programs.

    python -m tests.cluster.programs.build        what `make cluster` runs first

`node` pins the control plane's versions, so that Go compiles no package twice; a test compares them. `addons` has pins
of its own, since CoreDNS and the registry need newer packages, with which Go would compile the others anew. `runtime`
is containerd, since Debian's cannot mount images as volumes.
"""

from __future__ import annotations

from pathlib import Path

from tests.cluster.harness.packages import why_not_here
from tests.e2e.controlplane.build import CONTROL_PLANE
from tests.e2e.go_programs import GoPrograms

HERE = Path(__file__).resolve().parent
NODE = GoPrograms(
    "cluster-node",
    HERE / "node",
    {
        "kubelet": "k8s.io/kubernetes/cmd/kubelet",
        "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
        "agnhost": "k8s.io/kubernetes/test/images/agnhost",  # Kubernetes' own program for tests of pods
        "netpol": "./netpol",
        "pause": "./pause",
    },
)
ADDONS = GoPrograms("cluster-addons", HERE / "addons", {"coredns": "./coredns", "registry": "./registry"})
CONTAINERD = "github.com/containerd/containerd/v2/cmd"
RUNTIME = GoPrograms(
    "cluster-runtime",
    HERE / "runtime",
    {name: f"{CONTAINERD}/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
)
ALL = (CONTROL_PLANE, NODE, ADDONS, RUNTIME)


def find_program(name: str) -> Path:
    """Return the path of a built program. Raises KeyError if no set has it."""
    return {program: each.folder / program for each in ALL for program in each.packages}[name]


def find_unbuilt() -> list[str]:
    """Return the names of the sets that are not built."""
    return [each.name for each in ALL if not each.folder.is_dir()]


if __name__ == "__main__":
    if why := why_not_here():  # minutes of compiling would be for nothing
        print(f"SKIPPED: {why}")
    else:
        for each in ALL:
            each.build()
