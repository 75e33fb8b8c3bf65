"""Who is there, and whose rollouts may be stored."""

from __future__ import annotations

import asyncio

import pytest

from specrl.coordinator.registry import Registry, Replica
from specrl.coordinator.replica_states import ReplicaState
from specrl.errors import EngineFailed, PeerUnavailable, RunInvalid, TransitionForbidden, VersionConflict
from specrl.records import GenerationStatus, Peer, Role, StepCost, WeightChecksums

LOST = PeerUnavailable("gen-0 must be reachable, got nothing; it is taken for lost until it registers")


class Clock:
    """Seconds that pass when a test says so."""

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
    """A replica, as a new process."""
    registry.register(Peer(name, Role.GENERATION, "127.0.0.1:1", "digest"))
    return registry.replicas[name]


def weights(version: int, checksum: int = 5) -> WeightChecksums:
    return WeightChecksums(version, (checksum, version))


def serving(registry: Registry, version: int = 0, name: str = "gen-0") -> Replica:
    """One that serves `version`, proved."""
    replica = joined(registry, name)
    update(registry, replica, version)
    registry.trust(replica, version)
    return replica


def update(registry: Registry, replica: Replica, version: int) -> None:
    """A transfer to it that succeeds."""
    registry.begin_transfer(replica)
    registry.begin_commit(replica)
    registry.committed(replica, weights(version))
    registry.end_transfer(replica)


def beat(registry: Registry, replica: Replica) -> bool:
    return registry.heartbeat(replica.replica_id, replica.peer.incarnation, None)


async def test_the_end_of_an_earlier_process_does_not_remove_the_one_that_took_its_place(registry: Registry) -> None:
    earlier = joined(registry)
    later = joined(registry)
    assert earlier.gone.is_set()
    registry.remove(earlier, "its stream broke")
    assert registry.replicas == {"gen-0": later}
    assert not later.gone.is_set()


async def test_a_replica_that_starts_over_ends_its_streams_and_joins_without_registering(registry: Registry) -> None:
    replica = serving(registry)
    replica.canary_skips = 2
    fresh = registry.start_over(replica)
    assert (replica.state, replica.gone.is_set()) == (ReplicaState.DEAD, True)
    assert registry.joining() == [fresh]
    assert (fresh.peer, fresh.client, fresh.canary_skips) == (replica.peer, replica.client, 2)
    assert beat(registry, replica)
    registry.fail(replica, LOST)
    assert registry.joining() == [fresh]


async def test_a_replica_is_trusted_with_the_version_that_was_proved_and_no_other(registry: Registry) -> None:
    replica = joined(registry)
    assert not replica.is_trusted, "it serves nothing yet"
    update(registry, replica, 3)
    assert not replica.is_trusted
    registry.trust(replica, 3)
    assert replica.is_trusted
    registry.begin_transfer(replica)
    assert replica.is_trusted, "it goes on under the old version while the new one arrives"
    registry.begin_commit(replica)
    assert not replica.is_trusted, "it may resume under the new version before the commit is answered"
    registry.committed(replica, weights(4))
    assert not replica.is_trusted
    registry.trust(replica, 4)
    assert replica.is_trusted
    registry.suspect(replica, "a call failed")
    assert replica.is_trusted, "a suspect's streams live on"


async def test_a_replica_that_fails_is_stale_and_must_register_again(registry: Registry) -> None:
    replica = joined(registry)
    registry.fail(replica, EngineFailed("the engine must be running, got a dead one; start it again"))
    assert (replica.state, replica.gone.is_set()) == (ReplicaState.STALE, True)
    assert not beat(registry, replica), "it must register again"
    registry.fail(replica, LOST)
    assert replica.state is ReplicaState.STALE


async def test_an_unreachable_replica_is_suspect_until_it_gives_a_sign_of_life(registry: Registry) -> None:
    replica = serving(registry)
    registry.fail(replica, LOST)
    assert (replica.state, replica.gone.is_set()) == (ReplicaState.SUSPECT, False)
    assert replica.reason == str(LOST)
    assert registry.serving() == registry.to_update() == []
    assert beat(registry, replica)
    assert registry.serving() == [replica]
    assert replica.reason == ""


async def test_a_suspect_that_missed_a_version_or_its_canary_catches_up_first(registry: Registry) -> None:
    behind, unproved = serving(registry, name="gen-0"), serving(registry, name="gen-1")
    registry.suspect(behind, "late")
    update(registry, unproved, 1)
    registry.suspect(unproved, "late")
    beat(registry, behind)
    beat(registry, unproved)
    assert registry.joining() == [behind, unproved]
    assert not behind.is_trusted


async def test_who_serves_other_weights_than_the_newest_after_a_transfer_catches_up(registry: Registry) -> None:
    """Also under the same version: a drafter that was initialised meanwhile."""
    late, updated = serving(registry, name="gen-0"), serving(registry, name="gen-1")
    registry.begin_transfer(updated)
    registry.begin_commit(updated)
    registry.committed(updated, weights(0, checksum=6))
    registry.put_back_late()
    assert (registry.joining(), registry.serving()) == ([late], [updated])


async def test_who_comes_back_after_a_transfer_in_which_nobody_took_part_catches_up(registry: Registry) -> None:
    """Else a run whose only replica was suspect at that moment would wait for ever."""
    replica = serving(registry, version=3)
    registry.suspect(replica, "late")
    registry.newest_version = 4
    registry.put_back_late()
    beat(registry, replica)
    assert registry.joining() == [replica]


async def test_a_commit_whose_replica_has_left_the_update_is_not_believed(registry: Registry) -> None:
    replica = serving(registry)
    registry.begin_commit(replica)
    registry.suspect(replica, "its commit was not answered in time")
    registry.committed(replica, weights(1))
    assert (replica.state, replica.policy_version) == (ReplicaState.SUSPECT, 0)
    beat(registry, replica)
    assert replica.state is ReplicaState.JOINING


async def test_silence_makes_suspect_then_dead_and_neither_in_the_middle_of_an_update_too_soon(
    registry: Registry, clock: Clock
) -> None:
    idle, updating = serving(registry, name="gen-0"), serving(registry, name="gen-1")
    registry.begin_commit(updating)
    clock.now_s = 3.5
    registry.expire()
    assert (idle.state, updating.state) == (ReplicaState.SUSPECT, ReplicaState.UPDATING)
    clock.now_s = 5.5
    registry.expire()
    assert registry.replicas == {}
    assert idle.state is updating.state is ReplicaState.DEAD


async def test_a_replica_that_leaves_is_waited_for_and_gets_nothing_new(registry: Registry) -> None:
    replica = serving(registry)
    replica.add_load(2)
    leaving = asyncio.create_task(registry.leave("gen-0", replica.peer.incarnation, 60.0))
    await asyncio.sleep(0)
    assert (replica.state, replica.is_trusted) == (ReplicaState.DRAINING, True)
    assert registry.serving() == registry.to_update() == []
    replica.add_load(-1)
    await asyncio.sleep(0)
    assert not leaving.done()
    replica.add_load(-1)
    await leaving
    assert (registry.replicas, replica.inflight) == ({}, 0)


async def test_a_replica_does_not_leave_a_collective_that_others_are_in(registry: Registry) -> None:
    replica = serving(registry)
    registry.begin_transfer(replica)
    leaving = asyncio.create_task(registry.leave("gen-0", replica.peer.incarnation, 60.0))
    await asyncio.sleep(0)
    assert replica.state is ReplicaState.DRAINING
    assert not leaving.done()
    registry.end_transfer(replica)
    await leaving
    assert registry.replicas == {}


async def test_a_replica_that_ends_in_the_middle_of_its_drain_is_gone_at_once(registry: Registry) -> None:
    replica = serving(registry)
    replica.add_load(1)
    leaving = asyncio.create_task(registry.leave("gen-0", replica.peer.incarnation, 60.0))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert registry.replicas == {}
    assert replica.gone.is_set()


async def test_a_drain_that_takes_too_long_is_cut_short(registry: Registry) -> None:
    replica = serving(registry)
    replica.add_load(1)
    await registry.leave("gen-0", replica.peer.incarnation, 0.0)
    assert registry.replicas == {}
    assert replica.gone.is_set(), "whoever reads its streams requeues the rest"


async def test_a_replica_that_leaves_in_an_update_drains_under_the_version_that_it_committed(
    registry: Registry,
) -> None:
    replica = serving(registry)
    registry.begin_commit(replica)
    registry.drain(replica)
    assert replica.state is ReplicaState.UPDATING
    registry.committed(replica, weights(1))
    assert (replica.state, replica.is_trusted) == (ReplicaState.DRAINING, False)
    registry.trust(replica, 1)
    assert replica.is_trusted


async def test_what_steps_cost_is_kept_by_incarnation_and_no_heartbeat_takes_it_away(registry: Registry) -> None:
    replica = serving(registry)
    costs, fewer = (StepCost(3, 10, 40.0, 900.0, 0.5),), (StepCost(3, 2, 8.0, 180.0, 0.1),)
    registry.note_status(replica, GenerationStatus("gen-0", 0, False, 4, step_costs=costs))
    registry.heartbeat("gen-0", replica.peer.incarnation, GenerationStatus("gen-0", 0, False, 7))
    assert registry.step_costs() == {replica.peer.incarnation: costs}
    assert replica.status == GenerationStatus("gen-0", 0, False, 7)
    another = serving(registry)
    registry.note_status(another, GenerationStatus("gen-0", 0, False, 4, step_costs=fewer))
    assert registry.step_costs() == {replica.peer.incarnation: costs, another.peer.incarnation: fewer}


async def test_a_dismissed_replica_drains_at_once_and_is_told_at_its_next_heartbeat(registry: Registry) -> None:
    replica = serving(registry)
    assert not registry.is_dismissed("gen-0")
    registry.dismiss("gen-0")
    assert (replica.state, registry.is_dismissed("gen-0")) == (ReplicaState.DRAINING, True)
    with pytest.raises(VersionConflict, match="got gen-7; there are: gen-0"):
        registry.dismiss("gen-7")


async def test_a_way_that_the_table_does_not_have_is_an_error(registry: Registry) -> None:
    replica = serving(registry)
    registry.begin_commit(replica)
    with pytest.raises(TransitionForbidden, match=r"from updating to one of .*, got catchingUp"):
        registry._move(replica, ReplicaState.CATCHING_UP)


async def test_a_registration_that_arrives_twice_is_one(registry: Registry) -> None:
    replica = joined(registry)
    registry.register(replica.peer)
    assert registry.replicas == {"gen-0": replica}
    assert not replica.gone.is_set(), "what it has under way goes on"


async def test_a_late_registration_does_not_take_the_place_of_a_newer_process(registry: Registry) -> None:
    earlier, later = joined(registry), joined(registry)
    with pytest.raises(RunInvalid, match="a newer one of that name"):
        registry.register(earlier.peer)
    assert registry.replicas == {"gen-0": later}
    registry.remove(later, "lost")
    registry.register(later.peer)
    assert registry.replicas["gen-0"].peer == later.peer, "one that was only lost may come back"


async def test_a_trainer_is_sent_home_when_the_run_is_over_and_one_that_comes_later_too(registry: Registry) -> None:
    registry.register(Peer("trainer", Role.TRAINER, "127.0.0.1:2", "digest"))
    assert not registry.is_dismissed("trainer")
    registry.dismiss_trainer()
    assert registry.is_dismissed("trainer")
    assert not registry.is_dismissed("gen-0")
    registry.register(Peer("trainer", Role.TRAINER, "127.0.0.1:3", "digest", "another"))
    assert registry.is_dismissed("trainer")
