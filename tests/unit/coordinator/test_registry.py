"""The registry knows which peers are alive, and whose rollouts may be stored."""

from __future__ import annotations

import asyncio

import pytest

from specrl.coordinator.members.registry import Registry, Replica
from specrl.coordinator.members.replica_states import ReplicaState
from specrl.errors import EngineFailed, PeerUnavailable, RunInvalid, TransitionForbidden, VersionConflict
from specrl.records import GenerationStatus, Peer, Role, StepCost, WeightChecksums

LOST = PeerUnavailable("gen-0 must be reachable, got nothing; it is taken for lost until it registers")


class Clock:
    """A clock that a test advances."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry("digest", 1.0, clock)


def joined(registry: Registry, name: str = "gen-0") -> Replica:
    """Register a replica as a new process."""
    registry.register_peer(Peer(name, Role.GENERATION, "127.0.0.1:1", "digest"))
    return registry.replicas[name]


def weights(version: int, checksum: int = 5) -> WeightChecksums:
    return WeightChecksums(version, (checksum, version))


def serving(registry: Registry, version: int = 0, name: str = "gen-0") -> Replica:
    """Register a replica that serves `version` and is trusted."""
    replica = joined(registry, name)
    update(registry, replica, version)
    registry.trust_version(replica, version)
    return replica


def update(registry: Registry, replica: Replica, version: int) -> None:
    """Make a transfer to the replica that succeeds."""
    registry.begin_transfer(replica)
    registry.begin_commit(replica)
    registry.mark_committed(replica, weights(version))
    registry.end_transfer(replica)


def beat(registry: Registry, replica: Replica) -> bool:
    return registry.note_heartbeat(replica.replica_id, replica.peer.incarnation, None)


async def test_the_end_of_an_earlier_process_does_not_remove_its_successor(registry: Registry) -> None:
    earlier = joined(registry)
    later = joined(registry)
    assert earlier.gone.is_set()
    registry.remove_replica(earlier, "its stream broke")
    assert registry.replicas == {"gen-0": later}
    assert not later.gone.is_set()


async def test_a_replaced_record_ends_its_streams_and_the_replica_joins_without_registering(registry: Registry) -> None:
    replica = serving(registry)
    replica.canary_skips = 2
    fresh = registry.replace_record(replica)
    assert (replica.state, replica.gone.is_set()) == (ReplicaState.DEAD, True)
    assert registry.joining_replicas() == [fresh]
    assert (fresh.peer, fresh.client, fresh.canary_skips) == (replica.peer, replica.client, 2)
    assert beat(registry, replica)
    registry.note_call_failure(replica, LOST)
    assert registry.joining_replicas() == [fresh]


async def test_a_replica_is_trusted_only_with_the_version_that_its_canary_checked(registry: Registry) -> None:
    replica = joined(registry)
    assert not replica.is_trusted, "it serves nothing yet"
    update(registry, replica, 3)
    assert not replica.is_trusted
    registry.trust_version(replica, 3)
    assert replica.is_trusted
    registry.begin_transfer(replica)
    assert replica.is_trusted, "it goes on under the old version while the new one arrives"
    registry.begin_commit(replica)
    assert not replica.is_trusted, "it may resume under the new version before the commit is answered"
    registry.mark_committed(replica, weights(4))
    assert not replica.is_trusted
    registry.trust_version(replica, 4)
    assert replica.is_trusted
    registry.suspect_replica(replica, "a call failed")
    assert replica.is_trusted, "a suspect's streams live on"


async def test_a_replica_that_fails_is_stale_and_must_register_again(registry: Registry) -> None:
    replica = joined(registry)
    registry.note_call_failure(replica, EngineFailed("the engine must be running, got a dead one; start it again"))
    assert (replica.state, replica.gone.is_set()) == (ReplicaState.STALE, True)
    assert not beat(registry, replica), "it must register again"
    registry.note_call_failure(replica, LOST)
    assert replica.state is ReplicaState.STALE


async def test_an_unreachable_replica_is_suspect_until_its_next_heartbeat(registry: Registry) -> None:
    replica = serving(registry)
    registry.note_call_failure(replica, LOST)
    assert (replica.state, replica.gone.is_set()) == (ReplicaState.SUSPECT, False)
    assert replica.reason == str(LOST)
    assert registry.serving_replicas() == registry.updatable_replicas() == []
    assert beat(registry, replica)
    assert registry.serving_replicas() == [replica]
    assert replica.reason == ""


async def test_a_suspect_replica_that_missed_a_version_or_its_canary_is_updated_first(registry: Registry) -> None:
    behind = serving(registry, name="gen-0")
    unproved = serving(registry, name="gen-1")
    registry.suspect_replica(behind, "late")
    update(registry, unproved, 1)
    registry.suspect_replica(unproved, "late")
    beat(registry, behind)
    beat(registry, unproved)
    assert registry.joining_replicas() == [behind, unproved]
    assert not behind.is_trusted


async def test_a_replica_that_serves_other_weights_after_a_transfer_is_updated_again(registry: Registry) -> None:
    """Also within one version: the initialisation of a drafter sends other weights under the same number."""
    late = serving(registry, name="gen-0")
    updated = serving(registry, name="gen-1")
    registry.begin_transfer(updated)
    registry.begin_commit(updated)
    registry.mark_committed(updated, weights(0, checksum=6))
    registry.return_late_replicas()
    assert (registry.joining_replicas(), registry.serving_replicas()) == ([late], [updated])


async def test_a_replica_that_returns_after_a_transfer_without_members_is_updated(registry: Registry) -> None:
    """Otherwise a run would wait forever if its only replica was suspect during the transfer."""
    replica = serving(registry, version=3)
    registry.suspect_replica(replica, "late")
    registry.newest_version = 4
    registry.return_late_replicas()
    beat(registry, replica)
    assert registry.joining_replicas() == [replica]


async def test_a_commit_is_ignored_when_the_replica_has_left_the_update(registry: Registry) -> None:
    replica = serving(registry)
    registry.begin_commit(replica)
    registry.suspect_replica(replica, "its commit was not answered in time")
    registry.mark_committed(replica, weights(1))
    assert (replica.state, replica.policy_version) == (ReplicaState.SUSPECT, 0)
    beat(registry, replica)
    assert replica.state is ReplicaState.JOINING


async def test_missed_heartbeats_make_a_replica_suspect_then_dead_but_not_suspect_during_an_update(
    registry: Registry, clock: Clock
) -> None:
    idle = serving(registry, name="gen-0")
    updating = serving(registry, name="gen-1")
    registry.begin_commit(updating)
    clock.now_s = 3.5
    registry.expire_silent_peers()
    assert (idle.state, updating.state) == (ReplicaState.SUSPECT, ReplicaState.UPDATING)
    clock.now_s = 5.5
    registry.expire_silent_peers()
    assert registry.replicas == {}
    assert idle.state is updating.state is ReplicaState.DEAD


async def test_a_leaving_replica_finishes_its_rollouts_and_gets_no_new_ones(registry: Registry) -> None:
    replica = serving(registry)
    replica.add_load(2)
    leaving = asyncio.create_task(registry.remove_leaving_peer("gen-0", replica.peer.incarnation, 60.0))
    await asyncio.sleep(0)
    assert (replica.state, replica.is_trusted) == (ReplicaState.DRAINING, True)
    assert registry.serving_replicas() == registry.updatable_replicas() == []
    replica.add_load(-1)
    await asyncio.sleep(0)
    assert not leaving.done()
    replica.add_load(-1)
    await leaving
    assert (registry.replicas, replica.inflight) == ({}, 0)


async def test_a_replica_does_not_leave_during_a_collective(registry: Registry) -> None:
    replica = serving(registry)
    registry.begin_transfer(replica)
    leaving = asyncio.create_task(registry.remove_leaving_peer("gen-0", replica.peer.incarnation, 60.0))
    await asyncio.sleep(0)
    assert replica.state is ReplicaState.DRAINING
    assert not leaving.done()
    registry.end_transfer(replica)
    await leaving
    assert registry.replicas == {}


async def test_a_replica_that_dies_while_draining_is_removed_at_once(registry: Registry) -> None:
    replica = serving(registry)
    replica.add_load(1)
    leaving = asyncio.create_task(registry.remove_leaving_peer("gen-0", replica.peer.incarnation, 60.0))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert registry.replicas == {}
    assert replica.gone.is_set()


async def test_a_drain_that_takes_too_long_is_cut_short(registry: Registry) -> None:
    replica = serving(registry)
    replica.add_load(1)
    await registry.remove_leaving_peer("gen-0", replica.peer.incarnation, 0.0)
    assert registry.replicas == {}
    assert replica.gone.is_set(), "whoever reads its streams requeues the rest"


async def test_a_replica_that_leaves_in_an_update_drains_under_the_version_that_it_committed(
    registry: Registry,
) -> None:
    replica = serving(registry)
    registry.begin_commit(replica)
    registry.drain_replica(replica)
    assert replica.state is ReplicaState.UPDATING
    registry.mark_committed(replica, weights(1))
    assert (replica.state, replica.is_trusted) == (ReplicaState.DRAINING, False)
    registry.trust_version(replica, 1)
    assert replica.is_trusted


async def test_step_costs_are_kept_by_incarnation_and_survive_heartbeats(registry: Registry) -> None:
    replica = serving(registry)
    costs = (StepCost(3, 10, 40.0, 900.0, 0.5),)
    fewer = (StepCost(3, 2, 8.0, 180.0, 0.1),)
    registry.note_status(replica, GenerationStatus("gen-0", 0, False, 4, step_costs=costs))
    registry.note_heartbeat("gen-0", replica.peer.incarnation, GenerationStatus("gen-0", 0, False, 7))
    assert registry.step_costs() == {replica.peer.incarnation: costs}
    assert replica.status == GenerationStatus("gen-0", 0, False, 7)
    another = serving(registry)
    registry.note_status(another, GenerationStatus("gen-0", 0, False, 4, step_costs=fewer))
    assert registry.step_costs() == {replica.peer.incarnation: costs, another.peer.incarnation: fewer}


async def test_a_dismissed_replica_drains_at_once_and_is_told_at_its_next_heartbeat(registry: Registry) -> None:
    replica = serving(registry)
    assert not registry.must_peer_leave("gen-0")
    registry.dismiss_replica("gen-0")
    assert (replica.state, registry.must_peer_leave("gen-0")) == (ReplicaState.DRAINING, True)
    with pytest.raises(VersionConflict, match="got gen-7; registered: gen-0"):
        registry.dismiss_replica("gen-7")


async def test_a_transition_that_the_table_lacks_is_an_error(registry: Registry) -> None:
    replica = serving(registry)
    registry.begin_commit(replica)
    with pytest.raises(TransitionForbidden, match=r"from updating to one of .*, got catchingUp"):
        registry._change_state(replica, ReplicaState.CATCHING_UP)


async def test_a_registration_that_arrives_twice_is_one(registry: Registry) -> None:
    replica = joined(registry)
    registry.register_peer(replica.peer)
    assert registry.replicas == {"gen-0": replica}
    assert not replica.gone.is_set(), "what it has under way goes on"


async def test_a_late_registration_does_not_take_the_place_of_a_newer_process(registry: Registry) -> None:
    earlier = joined(registry)
    later = joined(registry)
    with pytest.raises(RunInvalid, match="a newer one has replaced"):
        registry.register_peer(earlier.peer)
    assert registry.replicas == {"gen-0": later}
    registry.remove_replica(later, "lost")
    registry.register_peer(later.peer)
    assert registry.replicas["gen-0"].peer == later.peer, "one that was only lost may come back"


async def test_the_trainer_is_dismissed_when_the_run_is_over_even_if_it_registers_later(registry: Registry) -> None:
    registry.register_peer(Peer("trainer", Role.TRAINER, "127.0.0.1:2", "digest"))
    assert not registry.must_peer_leave("trainer")
    registry.dismiss_trainer()
    assert registry.must_peer_leave("trainer")
    assert not registry.must_peer_leave("gen-0")
    registry.register_peer(Peer("trainer", Role.TRAINER, "127.0.0.1:3", "digest", "another"))
    assert registry.must_peer_leave("trainer")
