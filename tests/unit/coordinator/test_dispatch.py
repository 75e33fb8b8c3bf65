"""Free seats are filled evenly over the replicas, one group at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specrl.coordinator.schedule.dispatch import ReplicaSeats, assign_to_least_loaded
from specrl.coordinator.schedule.scheduler import Scheduler, ScheduleShape


def a_scheduler(prompts: int = 8, group: int = 4) -> Scheduler[str]:
    return Scheduler(ScheduleShape(4, prompts, group, 1))


def test_replicas_with_more_seats_than_rollouts_get_equal_parts_and_whole_groups() -> None:
    dealt = assign_to_least_loaded(a_scheduler(), [ReplicaSeats(name, 0, 0, 1000) for name in "abcd"])
    assert [len(slots) for slots in dealt.values()] == [16] * 4  # two steps of 32 may start under version 0
    owners: dict[str, set[str]] = {}
    for name, slots in dealt.items():
        for slot in slots:
            owners.setdefault(slot.group_id, set()).add(name)
    assert all(len(names) == 1 for names in owners.values())


def test_the_least_loaded_is_served_first() -> None:
    dealt = assign_to_least_loaded(
        a_scheduler(prompts=1), [ReplicaSeats("busy", 0, 9, 100), ReplicaSeats("idle", 0, 0, 100)]
    )
    assert {name: len(slots) for name, slots in dealt.items()} == {"idle": 8}


def test_a_replica_with_an_exhausted_version_does_not_stop_the_others() -> None:
    scheduler = a_scheduler()
    dealt = assign_to_least_loaded(scheduler, [ReplicaSeats("stale", -5, 0, 100), ReplicaSeats("fresh", 0, 50, 100)])
    assert set(dealt) == {"fresh"}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=6))
def test_no_replica_exceeds_its_seats_and_no_seat_stays_free_while_work_waits(
    loads: list[tuple[int, int]],
) -> None:
    seats = [ReplicaSeats(str(place), 0, taken, free) for place, (taken, free) in enumerate(loads)]
    dealt = assign_to_least_loaded(a_scheduler(), seats)
    given_out = sum(len(slots) for slots in dealt.values())
    assert given_out == min(64, sum(item.free for item in seats))
    assert all(len(dealt.get(item.replica_id, [])) <= item.free for item in seats)
