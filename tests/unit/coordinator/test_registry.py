"""Who is there, and whose rollouts may be stored."""

from __future__ import annotations

import pytest

from specrl.coordinator.registry import Registry, Replica, ReplicaState
from specrl.errors import EngineFailed, PeerUnavailable
from specrl.records import Peer, Role


@pytest.fixture
def registry() -> Registry:
    return Registry("digest", 1.0, lambda: 0.0)


def joined(registry: Registry) -> Replica:
    """gen-0, as a new process."""
    registry.register(Peer("gen-0", Role.GENERATION, "127.0.0.1:1", "digest"))
    return registry.replicas["gen-0"]


async def test_the_end_of_an_earlier_process_does_not_remove_the_one_that_took_its_place(registry: Registry) -> None:
    earlier = joined(registry)
    later = joined(registry)
    assert earlier.gone.is_set()
    registry.remove(earlier, "its stream broke")
    assert registry.replicas == {"gen-0": later}
    assert not later.gone.is_set()


async def test_a_replica_that_starts_over_ends_its_streams_and_joins_without_registering(registry: Registry) -> None:
    replica = joined(registry)
    replica.canary_skips = 2
    fresh = registry.start_over(replica)
    assert replica.gone.is_set()
    assert registry.joining() == [fresh]
    assert (fresh.peer, fresh.client, fresh.canary_skips) == (replica.peer, replica.client, 2)
    assert registry.heartbeat("gen-0", replica.peer.incarnation, None)
    registry.fail(replica, PeerUnavailable("gen-0 must stay, got lost; its rollouts are requeued"))
    assert registry.joining() == [fresh]


async def test_a_replica_is_trusted_with_the_version_that_was_proved_and_no_other(registry: Registry) -> None:
    replica = joined(registry)
    registry.move(replica, ReplicaState.UPDATING)
    assert not replica.is_trusted, "it may resume under the new version before the commit is answered"
    replica.policy_version = 3
    registry.move(replica, ReplicaState.SERVING)
    assert not replica.is_trusted
    registry.trust(replica, 3)
    assert replica.is_trusted


async def test_a_replica_that_fails_is_stale_and_one_that_is_unreachable_gone(registry: Registry) -> None:
    replica = joined(registry)
    registry.fail(replica, EngineFailed("the engine must be running, got a dead one; start it again"))
    assert (replica.state, replica.gone.is_set()) == (ReplicaState.STALE, True)
    assert not registry.heartbeat("gen-0", replica.peer.incarnation, None), "it must register again"
    registry.fail(replica, PeerUnavailable("gen-0 must be reachable, got nothing; it is taken for lost"))
    assert registry.replicas == {}
