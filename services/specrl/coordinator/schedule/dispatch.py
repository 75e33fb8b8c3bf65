"""Assigns waiting slots to replicas with free seats, least loaded first. Pure.

A new policy version admits the rollouts of a whole step at once. If each replica were filled before the next, and there
are more seats than rollouts, some replicas would generate everything while others are idle. The step would then wait
for the busy ones. So the least loaded replica is served first.

Slots are assigned one group at a time, because the rollouts of a group share the KV cache of their prompt.

Called by `rollouts/pipeline.py` when maxPolicyLag >= 1, and by the simulator.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from specrl.coordinator.schedule.scheduler import Scheduler, SlotId


@dataclass(frozen=True)
class ReplicaSeats:
    """Load of one replica: rollouts that it has (`taken`), and how many more it may be given (`free`)."""

    replica_id: str
    policy_version: int
    taken: int
    free: int


def assign_to_least_loaded[R](scheduler: Scheduler[R], replicas: Iterable[ReplicaSeats]) -> dict[str, list[SlotId]]:
    """Start waiting slots until seats or slots run out. Returns the slots, now INFLIGHT, by replica."""
    assigned: dict[str, list[SlotId]] = {}
    # Ordered by load, then by id, so that the assignment is deterministic.
    heap = [(seats.taken, seats.replica_id, seats.policy_version, seats.free) for seats in replicas if seats.free > 0]
    heapq.heapify(heap)
    exhausted: set[int] = set()  # policy versions under which the lag bound admits nothing more
    while heap:
        taken, replica_id, version, free = heapq.heappop(heap)
        if version in exhausted:
            continue
        slots = scheduler.take_slots(version, min(free, scheduler.shape.group_size))
        if not slots:
            exhausted.add(version)
            continue
        assigned.setdefault(replica_id, []).extend(slots)
        if free > len(slots):
            heapq.heappush(heap, (taken + len(slots), replica_id, version, free - len(slots)))
    return assigned
