"""Lists the run's metrics endpoints for Prometheus' HTTP service discovery, for runs outside a cluster.

In a cluster the chart's PodMonitor discovers the pods and adds the same labels.
"""

from __future__ import annotations

from pydantic import BaseModel

from specrl.coordinator.members.registry import Registry
from specrl.records import Peer


class TargetGroup(BaseModel):
    """Addresses (HOST:PORT) and the labels that Prometheus adds to their series."""

    targets: list[str]
    labels: dict[str, str]


def list_target_groups(run: str, own_scheme: str, own_address: str, registry: Registry) -> list[TargetGroup]:
    """List the coordinator and all registered peers that serve metrics.

    own_scheme, own_address: how the requesting Prometheus reaches the coordinator.
    """
    own_labels = {"rljob": run, "component": "coordinator", "__scheme__": own_scheme}
    own = TargetGroup(targets=[own_address], labels=own_labels)
    peers: list[tuple[Peer, dict[str, str]]] = [
        (replica.peer, {"component": "generation", "replica": name})
        for name, replica in sorted(registry.replicas.items())
    ]
    if registry.trainer is not None:
        peers.append((registry.trainer.peer, {"component": "trainer"}))
    return [own] + [
        TargetGroup(targets=[peer.metrics_address], labels={"rljob": run} | labels)
        for peer, labels in peers
        if peer.metrics_address
    ]
