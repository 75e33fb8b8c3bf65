"""Prometheus targets are the coordinator, as the scraper reaches it, and all registered peers that serve metrics."""

from __future__ import annotations

import pytest

from specrl.coordinator.members.registry import Registry
from specrl.coordinator.observe.web.targets import list_target_groups
from specrl.errors import RecordInvalid
from specrl.records import Peer, Role


async def test_peers_that_serve_metrics_are_targets_while_they_are_registered() -> None:
    registry = Registry("digest", 1.0, lambda: 0.0, "box")
    for name, role, port in (
        ("gen-1", Role.GENERATION, 9001),
        ("gen-0", Role.GENERATION, 9000),
        ("silent", Role.GENERATION, 0),
        ("trainer", Role.TRAINER, 9002),
    ):
        registry.register_peer(Peer(name, role, "10.0.0.7:7001", "digest", metrics_port=port), None)
    own, *peers = list_target_groups("box", "http", "127.0.0.1:8080", registry)
    assert own.targets == ["127.0.0.1:8080"]
    assert own.labels == {"rljob": "box", "component": "coordinator", "__scheme__": "http"}
    assert [(group.targets, group.labels) for group in peers] == [
        (["10.0.0.7:9000"], {"rljob": "box", "component": "generation", "replica": "gen-0"}),
        (["10.0.0.7:9001"], {"rljob": "box", "component": "generation", "replica": "gen-1"}),
        (["10.0.0.7:9002"], {"rljob": "box", "component": "trainer"}),
    ]
    registry.lose_trainer("killed")
    assert [group.labels["component"] for group in list_target_groups("box", "http", "a:1", registry)].count(
        "trainer"
    ) == 0


def test_a_metrics_port_that_is_none_is_refused() -> None:
    with pytest.raises(RecordInvalid, match="metrics_port of gen-0 must be 0 to 65535"):
        Peer("gen-0", Role.GENERATION, "10.0.0.7:7001", "digest", metrics_port=1 << 16).check()
