"""Which replica gets which waiting slots, when seats are filled as they become free. Pure.

A new policy version lets a whole step's rollouts start at once. Were the first replica filled before the second gets
any, with more seats than rollouts some would generate everything and others stand idle; and the step waits for those.
So the least loaded is served first, a group at a time: the rollouts of a group share their prompt's keys and values.

Called by `rollouts.py` and by the simulator.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from specrl.coordinator.scheduler import Scheduler, SlotId


@dataclass(frozen=True)
class Seats:
    """A replica that serves `policy_version`: rollouts that it has, and how many more it may be given."""

    replica_id: str
    policy_version: int
    taken: int
    free: int


def share_out[R](scheduler: Scheduler[R], replicas: Iterable[Seats]) -> dict[str, list[SlotId]]:
    """Make waiting slots INFLIGHT, each at one of these replicas, until seats or slots run out."""
    dealt: dict[str, list[SlotId]] = {}
    heap = [(seats.taken, seats.replica_id, seats.policy_version, seats.free) for seats in replicas if seats.free > 0]
    heapq.heapify(heap)
    exhausted: set[int] = set()  # versions under which nothing more may start now
    while heap:
        taken, replica_id, version, free = heapq.heappop(heap)
        if version in exhausted:
            continue
        slots = scheduler.take(version, min(free, scheduler.shape.group_size))
        if not slots:
            exhausted.add(version)
            continue
        dealt.setdefault(replica_id, []).extend(slots)
        if free > len(slots):
            heapq.heappush(heap, (taken + len(slots), replica_id, version, free - len(slots)))
    return dealt
