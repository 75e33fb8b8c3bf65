"""Where the run's metrics are scraped: Prometheus' HTTP service discovery, for runs without a cluster.

In a cluster the chart's PodMonitor finds the pods and adds the same labels.
"""

from __future__ import annotations

from pydantic import BaseModel

from specrl.coordinator.registry import Registry
from specrl.records import Peer


class TargetGroup(BaseModel):
    """Addresses, HOST:PORT, and the labels that their series get."""

    targets: list[str]
    labels: dict[str, str]


def target_groups(run: str, own_scheme: str, own_address: str, registry: Registry) -> list[TargetGroup]:
    """The coordinator as whoever asks reaches it, and the peers that serve metrics and are registered now."""
    own = TargetGroup(
        targets=[own_address], labels={"rljob": run, "component": "coordinator", "__scheme__": own_scheme}
    )
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
