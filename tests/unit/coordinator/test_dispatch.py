"""Seats are filled evenly, a group at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specrl.coordinator.dispatch import Seats, share_out
from specrl.coordinator.scheduler import Scheduler, Shape


def a_scheduler(prompts: int = 8, group: int = 4) -> Scheduler[str]:
    return Scheduler(Shape(4, prompts, group, 1))


def test_replicas_with_more_seats_than_rollouts_get_equal_parts_and_whole_groups() -> None:
    dealt = share_out(a_scheduler(), [Seats(name, 0, 0, 1000) for name in "abcd"])
    assert [len(slots) for slots in dealt.values()] == [16] * 4  # two steps of 32 may start under version 0
    owners: dict[str, set[str]] = {}
    for name, slots in dealt.items():
        for slot in slots:
            owners.setdefault(slot.group_id, set()).add(name)
    assert all(len(names) == 1 for names in owners.values())


def test_the_least_loaded_is_served_first() -> None:
    dealt = share_out(a_scheduler(prompts=1), [Seats("busy", 0, 9, 100), Seats("idle", 0, 0, 100)])
    assert {name: len(slots) for name, slots in dealt.items()} == {"idle": 8}


def test_a_version_under_which_nothing_may_start_stops_nobody_else() -> None:
    scheduler = a_scheduler()
    dealt = share_out(scheduler, [Seats("stale", -5, 0, 100), Seats("fresh", 0, 50, 100)])
    assert set(dealt) == {"fresh"}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=6))
def test_nobody_gets_more_than_its_seats_and_no_seat_stays_free_for_work_that_waits(
    loads: list[tuple[int, int]],
) -> None:
    seats = [Seats(str(place), 0, taken, free) for place, (taken, free) in enumerate(loads)]
    dealt = share_out(a_scheduler(), seats)
    given_out = sum(len(slots) for slots in dealt.values())
    assert given_out == min(64, sum(item.free for item in seats))
    assert all(len(dealt.get(item.replica_id, [])) <= item.free for item in seats)
