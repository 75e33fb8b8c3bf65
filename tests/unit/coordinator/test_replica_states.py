"""The states of replicas under any order of events: every transition is in the table, and trust never comes too soon.

The machine calls the registry as the independent parts of the coordinator do: weight updates, readers of streams,
heartbeats, missed heartbeats, leaving replicas. A model keeps what must be true. A transition that the table lacks
raises.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from specrl.coordinator.members.registry import MISSED_HEARTBEATS, Registry, Replica
from specrl.coordinator.members.replica_states import RECEIVING, TRANSITIONS, UPDATABLE, ReplicaState
from specrl.errors import ChecksumMismatch, PeerUnavailable
from specrl.records import Peer, Role, WeightChecksums

NAMES = ("gen-0", "gen-1", "gen-2")
names = st.sampled_from(NAMES)


class AnyMembership(RuleBasedStateMachine):
    """Calls the registry as any part of the coordinator may, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)  # gRPC's channels ask for one
        self.now_s = 0.0
        self.registry = Registry("digest", 1.0, lambda: self.now_s)
        self.records: list[Replica] = []
        self.in_transfer: list[Replica] = []
        self.version = 0
        self.seen_moves = Counter[tuple[ReplicaState, ReplicaState]]()

    def teardown(self) -> None:
        asyncio.set_event_loop(None)
        self.loop.close()

    def found(self, name: str) -> Replica | None:
        return self.registry.replicas.get(name)

    @rule(name=names)
    def register(self, name: str) -> None:
        before = self.found(name)
        self.registry.register_peer(Peer(name, Role.GENERATION, "127.0.0.1:1", "digest"))
        self.records.append(self.registry.replicas[name])
        assert before is None or before.state is ReplicaState.DEAD

    @rule(name=names)
    def heartbeat(self, name: str) -> None:
        replica = self.found(name)
        if replica is not None:
            before = replica.before_suspicion
            state = replica.state
            is_known = self.registry.note_heartbeat(name, replica.peer.incarnation, None)
            assert is_known == (state is not ReplicaState.STALE)
            if before is not None:
                assert replica.state in (before, ReplicaState.JOINING, ReplicaState.DRAINING)

    @rule(seconds=st.floats(0.1, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.registry.expire_silent_peers()
        for replica in self.registry.replicas.values():
            assert self.now_s - replica.last_seen_s <= MISSED_HEARTBEATS

    @precondition(lambda self: not self.in_transfer)
    @rule(is_new_version=st.booleans())
    def begin_transfer(self, is_new_version: bool) -> None:
        self.version += is_new_version
        self.registry.newest_version = self.version
        chosen = self.registry.updatable_replicas() if is_new_version else self.registry.joining_replicas()
        self.in_transfer = [replica for replica in chosen if replica.state in UPDATABLE]
        for replica in self.in_transfer:
            self.registry.begin_transfer(replica)

    @precondition(lambda self: self.in_transfer)
    @rule(is_proved=st.booleans())
    def commit(self, is_proved: bool) -> None:
        replica = self.in_transfer.pop()
        if replica.state in RECEIVING:
            self.registry.begin_commit(replica)
            self.registry.mark_committed(replica, WeightChecksums(self.version, (self.version,)))
        self.registry.end_transfer(replica)
        if not self.in_transfer:
            self.registry.return_late_replicas()
        if is_proved and replica.policy_version == self.version:
            self.registry.trust_version(replica, self.version)

    @precondition(lambda self: self.in_transfer)
    @rule()
    def lose_the_trainer_in_a_transfer(self) -> None:
        for replica in self.in_transfer:
            self.registry.return_to_joining(replica, "the trainer was lost")
            self.registry.end_transfer(replica)
        self.in_transfer = []

    @precondition(lambda self: self.in_transfer)
    @rule()
    def a_commit_begins(self) -> None:
        self.registry.begin_commit(self.in_transfer[-1])

    @precondition(lambda self: self.in_transfer)
    @rule()
    def give_a_replica_up(self) -> None:
        self.registry.mark_stale(self.in_transfer.pop(), "refused too often")

    @rule(place=st.integers(0, 100), is_reachable=st.booleans())
    def a_call_fails(self, place: int, is_reachable: bool) -> None:
        """For any record, also one that has ended: the reader of a stream may learn of it late."""
        if self.records:
            error = ChecksumMismatch("refused") if is_reachable else PeerUnavailable("not there")
            self.registry.note_call_failure(self.records[place % len(self.records)], error)

    @rule(name=names)
    def canary_disagrees(self, name: str) -> None:
        replica = self.found(name)
        if replica is not None and replica.state is ReplicaState.SERVING:
            self.records.append(self.registry.replace_record(replica))

    @rule(name=names)
    def is_dismissed(self, name: str) -> None:
        if self.found(name) is not None:
            self.registry.dismiss_replica(name)

    @rule(name=names)
    def leaves(self, name: str) -> None:
        replica = self.found(name)
        if replica is not None:
            self.loop.run_until_complete(self.registry.remove_leaving_peer(name, replica.peer.incarnation))
            assert self.found(name) is None

    @invariant()
    def only_those_that_serve_get_work(self) -> None:
        for replica in self.registry.serving_replicas():
            assert replica.state is ReplicaState.SERVING
            assert replica.policy_version >= 0
            assert not replica.is_leaving, "a leaver gets nothing new"

    @invariant()
    def nothing_is_taken_from_who_has_unfinished_or_unproved_weights(self) -> None:
        for replica in self.records:
            if replica.is_trusted:
                assert 0 <= replica.policy_version <= replica.trusted_version
                assert replica.state not in (ReplicaState.JOINING, ReplicaState.CATCHING_UP, ReplicaState.UPDATING)

    @invariant()
    def a_record_that_is_over_stays_over(self) -> None:
        for replica in self.records:
            is_over = replica.state in (ReplicaState.STALE, ReplicaState.DEAD)
            assert replica.gone.is_set() == is_over
            is_listed = self.found(replica.replica_id) is replica
            assert is_listed == (replica.state is not ReplicaState.DEAD)

    @invariant()
    def every_transition_is_counted_and_in_the_table(self) -> None:
        for before, after in self.registry.transitions:
            assert after in TRANSITIONS[before]
        into = Counter(after for (_, after), count in self.registry.transitions.items() for _ in range(count))
        out = Counter(before for (before, _), count in self.registry.transitions.items() for _ in range(count))
        now = Counter(replica.state for replica in self.records)
        for state in ReplicaState:
            began = len(self.records) if state is ReplicaState.JOINING else 0
            assert began + into[state] - out[state] == now[state], state


def test_any_order_of_events_keeps_to_the_transition_table() -> None:
    run_state_machine_as_test(AnyMembership, settings=settings(max_examples=40, stateful_step_count=50))


@pytest.mark.deep
def test_many_orders_of_events_keep_to_the_transition_table() -> None:
    run_state_machine_as_test(AnyMembership, settings=settings(max_examples=1000, stateful_step_count=50))


class Life:
    """One replica process and its registry. record: the newest record of the process."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.registry = Registry("digest", 1.0, lambda: self.now_s)
        self.register()

    def register(self) -> None:
        self.registry.register_peer(Peer("gen-0", Role.GENERATION, "127.0.0.1:1", "digest"))
        self.record = self.registry.replicas["gen-0"]

    def late(self, heartbeats: int) -> None:
        self.now_s = self.record.last_seen_s + heartbeats
        self.registry.expire_silent_peers()

    def start_over(self) -> None:
        self.record = self.registry.replace_record(self.record)

    def key(self) -> tuple[object, ...]:
        """The part of its state that decides which transitions are possible."""
        record = self.record
        is_current = self.registry._serves_newest_weights(record)
        return record.state, record.before_suspicion, record.is_leaving, is_current, record.is_trusted


ACTS: tuple[Callable[[Life], object], ...] = (
    Life.register,
    lambda life: life.record.gone.is_set() or life.start_over(),
    lambda life: life.late(MISSED_HEARTBEATS - 1),
    lambda life: life.late(MISSED_HEARTBEATS + 1),
    lambda life: life.registry.note_heartbeat("gen-0", life.record.peer.incarnation, None),
    lambda life: life.registry.begin_transfer(life.record),
    lambda life: life.registry.begin_commit(life.record),
    lambda life: life.registry.mark_committed(life.record, WeightChecksums(life.record.policy_version + 1, ())),
    lambda life: life.registry.return_late_replicas(),
    lambda life: life.registry.trust_version(life.record, life.record.policy_version),
    lambda life: life.registry.return_to_joining(life.record, "the trainer was lost"),
    lambda life: life.registry.note_call_failure(life.record, PeerUnavailable("not there")),
    lambda life: life.registry.note_call_failure(life.record, ChecksumMismatch("refused")),
    lambda life: life.registry.drain_replica(life.record),
)
"""Calls that some part of the coordinator may make in any state of a replica."""


async def test_every_state_handles_every_event_and_the_table_has_no_unused_transition() -> None:
    """Exhaustive for one replica: every call in every reachable state. A transition that the table lacks raises."""
    paths: list[list[Callable[[Life], object]]] = [[]]
    known: set[tuple[object, ...]] = set()
    taken: set[tuple[ReplicaState, ReplicaState]] = set()
    for path in paths:
        for act in ACTS:
            life = Life()
            for step in (*path, act):
                step(life)
            taken |= set(life.registry.transitions)
            if life.key() not in known:
                known.add(life.key())
                paths.append([*path, act])
    assert len(known) > 20
    assert taken == {(before, after) for before, targets in TRANSITIONS.items() for after in targets}
