"""What the scheduler does, case by case. Any order of events: test_any_run.py."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from specrl.coordinator.order import Deadlines, InOrder, Windowed
from specrl.coordinator.progress import Progress
from specrl.coordinator.scheduler import MAX_ATTEMPTS, Scheduler, Shape, SlotId
from specrl.errors import VersionConflict

BOTH = pytest.mark.parametrize("order", [InOrder(), Windowed()], ids=["in_order", "windowed"])


def a_scheduler(
    lag: int = 1, steps: int = 4, prompts: int = 2, group: int = 2, order: Deadlines | None = None
) -> Scheduler[str]:
    return Scheduler(Shape(steps, prompts, group, lag), order or InOrder())


def finish(scheduler: Scheduler[str], slots: Iterable[SlotId], version: int = 0) -> None:
    for slot in slots:
        assert scheduler.sampled(slot)
        assert scheduler.graded(slot, str(slot), version)


def finish_all_but(scheduler: Scheduler[str], *left: int, version: int = 0) -> list[SlotId]:
    """Start everything that may start and finish it, but for the groups at these places; returns their slots."""
    slots = scheduler.take(version, 1000)
    waits = [slot for slot in slots if scheduler.shape.position(slot.step, slot.index) in left]
    finish(scheduler, [slot for slot in slots if slot not in waits], version)
    return waits


def train(scheduler: Scheduler[str]) -> list[int]:
    """Train the next step; returns the places that it took."""
    choice = scheduler.choose()
    assert choice is not None
    scheduler.mark_trained(choice.step)
    return choice.positions


@BOTH
def test_lag_zero_admits_only_the_next_step(order: Deadlines) -> None:
    taken = a_scheduler(lag=0, order=order).take(policy_version=0, room=100)
    assert {slot.step for slot in taken} == {1}


@BOTH
def test_lag_one_lets_generation_run_one_step_ahead(order: Deadlines) -> None:
    taken = a_scheduler(lag=1, order=order).take(policy_version=0, room=100)
    assert {slot.step for slot in taken} == {1, 2}


@BOTH
def test_a_replica_behind_the_bound_gets_nothing(order: Deadlines) -> None:
    scheduler = a_scheduler(lag=0, order=order)
    finish(scheduler, scheduler.take(0, 100))
    train(scheduler)
    assert scheduler.take(policy_version=0, room=100) == []
    assert {slot.step for slot in scheduler.take(policy_version=1, room=100)} == {2}


@BOTH
def test_slots_are_given_in_stream_order_group_by_group(order: Deadlines) -> None:
    taken = a_scheduler(order=order).take(0, 3)
    assert [(slot.step, slot.index, slot.sample) for slot in taken] == [(1, 0, 0), (1, 0, 1), (1, 1, 0)]


@BOTH
def test_dealing_splits_groups_the_same_way_every_time(order: Deadlines) -> None:
    first, second = (a_scheduler(lag=0, order=order).deal(["a", "b"], 0) for _ in range(2))
    assert first == second
    assert {slot.index for slot in first["a"]} == {0}
    assert {slot.index for slot in first["b"]} == {1}
    assert a_scheduler(lag=0, order=order).deal([], -1) == {}


def test_requeued_slots_keep_their_attempt_and_refused_ones_get_the_next() -> None:
    scheduler = a_scheduler()
    lost, poisoned = scheduler.take(0, 2)
    assert scheduler.requeue([lost]) == 1
    assert scheduler.sampled(poisoned)
    scheduler.refuse(poisoned, "NaN")
    again = scheduler.take(0, 2)
    assert [slot.attempt for slot in again] == [0, 1]


def test_a_late_duplicate_of_a_requeued_slot_is_taken_once() -> None:
    scheduler = a_scheduler()
    (slot,) = scheduler.take(0, 1)
    scheduler.requeue([slot])
    assert not scheduler.sampled(slot), "the first replica is lost; what it still says is not wanted"
    (again,) = scheduler.take(0, 1)
    assert scheduler.sampled(again)
    assert not scheduler.sampled(again)


@BOTH
def test_a_group_that_is_refused_too_often_fails_with_its_reason_and_frees_the_step(order: Deadlines) -> None:
    scheduler = a_scheduler(steps=1, prompts=2, group=2, order=order)
    for _ in range(MAX_ATTEMPTS):
        (slot,) = scheduler.take(0, 1)
        assert scheduler.sampled(slot)
        scheduler.refuse(slot, "verifier hung")
    finish(scheduler, scheduler.take(0, 100))
    choice = scheduler.choose()
    assert choice is not None
    assert choice.failures == [(0, "verifier hung")]
    assert [position for position, _ in choice.groups] == [1]
    assert choice.positions == [0, 1]


@BOTH
def test_restored_slots_are_not_given_out_again(order: Deadlines) -> None:
    scheduler = a_scheduler(steps=1, prompts=1, group=2, order=order)
    assert scheduler.restore(SlotId(1, 0, 0, 3), "kept", 0)
    (slot,) = scheduler.take(0, 100)
    assert slot.sample == 1
    finish(scheduler, [slot])
    choice = scheduler.choose()
    assert choice is not None
    assert choice.groups == [(0, ["kept", str(slot)])]


def test_slots_of_settled_prompts_and_of_longer_runs_are_not_restored() -> None:
    scheduler = Scheduler[str](Shape(3, 2, 2, 1), Windowed(), Progress(1, 1, frozenset({2})))
    assert [scheduler.restore(SlotId(*place, 0), "stored", 0) for place in [(1, 0), (2, 0), (4, 0)]] == [False] * 3
    assert [scheduler.restore(SlotId(*place, 0), "stored", 0) for place in [(1, 1), (2, 1)]] == [True] * 2


def test_steps_cannot_be_trained_out_of_order_or_unchosen() -> None:
    scheduler = a_scheduler()
    finish(scheduler, scheduler.take(0, 100))
    with pytest.raises(VersionConflict):
        scheduler.mark_trained(1)
    scheduler.choose()
    with pytest.raises(VersionConflict):
        scheduler.mark_trained(2)
    scheduler.mark_trained(1)


def test_a_token_older_than_the_rollouts_start_is_refused() -> None:
    scheduler = Scheduler[str](Shape(4, 1, 2, 1), Windowed(), Progress(1, 1))
    slot, _ = scheduler.take(1, 2)
    assert scheduler.sampled(slot)
    with pytest.raises(VersionConflict, match="oldest_version=0"):
        scheduler.graded(slot, "old", 0)


def test_in_order_a_step_waits_for_its_own_straggler() -> None:
    scheduler = a_scheduler()
    waits = finish_all_but(scheduler, 0)
    assert scheduler.choose() is None
    finish(scheduler, waits)
    assert train(scheduler) == [0, 1]


def test_windowed_a_finished_group_overtakes_a_straggler_inside_the_window() -> None:
    scheduler = a_scheduler(order=Windowed())
    finish_all_but(scheduler, 0)
    choice = scheduler.choose()
    assert choice is not None
    assert choice.positions == [1, 2]
    assert choice.overtaken == [0]
    assert choice.progress == Progress(1, 0, frozenset({1, 2}))


def test_windowed_the_head_is_waited_for_at_the_bound() -> None:
    scheduler = a_scheduler(order=Windowed())
    waits = finish_all_but(scheduler, 0)  # begun under version 0 with lag 1: step 2 is the last that may train it
    train(scheduler)
    finish_all_but(scheduler, version=1)
    assert scheduler.choose() is None, "others are finished, but the head is due"
    finish(scheduler, waits)
    assert 0 in train(scheduler)


def test_windowed_no_more_groups_are_begun_than_their_deadlines_have_room_for() -> None:
    scheduler = a_scheduler(lag=1, steps=9, order=Windowed())
    assert len({slot.group_id for slot in scheduler.take(0, 1000)}) == 4, "two steps of two"
    assert scheduler.take(0, 1000) == []


def test_windowed_a_replica_that_is_behind_begins_only_what_its_own_deadline_has_room_for() -> None:
    scheduler = Scheduler[str](Shape(9, 2, 2, 2), Windowed(), Progress(2, 4))
    behind = scheduler.take(1, 1000)  # trainable until step 4: steps 3 and 4, two groups each
    assert len({slot.group_id for slot in behind}) == 4
    current = scheduler.take(2, 1000)  # until step 5
    assert len({slot.group_id for slot in current}) == 2


def test_windowed_the_oldest_rollout_of_a_group_decides_its_deadline() -> None:
    scheduler = Scheduler[str](Shape(6, 1, 2, 1), Windowed())
    first, second = scheduler.take(0, 2)
    finish(scheduler, [first])
    finish(scheduler, scheduler.take(0, 2))
    assert train(scheduler) == [1]
    assert scheduler.sampled(second)
    scheduler.refuse(second, "ungraded")
    (again,) = scheduler.take(1, 1)
    assert (again.step, again.sample, again.attempt) == (1, 1, 1)
    finish(scheduler, scheduler.take(1, 100), version=1)
    assert scheduler.choose() is None, "sampled again under version 1, but the group's other rollout is of version 0"
    finish(scheduler, [again], version=1)
    assert train(scheduler) == [0]


def test_windowed_a_group_whose_rollouts_were_all_lost_is_young_again() -> None:
    scheduler = Scheduler[str](Shape(6, 1, 2, 1), Windowed())
    lost = finish_all_but(scheduler, 0)
    train(scheduler)
    scheduler.requeue(lost)
    waits = finish_all_but(scheduler, 0, version=1)
    assert {slot.step for slot in waits} == {1}
    assert train(scheduler) == [2], "begun under version 1 it may wait for step 3"
    finish_all_but(scheduler, version=2)
    assert scheduler.choose() is None


def test_windowed_without_lag_is_in_order() -> None:
    dealt: list[list[object]] = []
    for order in (InOrder(), Windowed()):
        scheduler = a_scheduler(lag=0, order=order)
        seen: list[object] = []
        for step in range(1, 5):
            slots = scheduler.deal(["a", "b"], step - 1)
            seen.append(slots)
            finish(scheduler, [slot for part in slots.values() for slot in part][::-1], version=step - 1)
            seen.append(train(scheduler))
        dealt.append(seen)
    assert dealt[0] == dealt[1]


@BOTH
def test_occupancy_tells_what_the_next_step_still_lacks(order: Deadlines) -> None:
    scheduler = a_scheduler(order=order)
    finish_all_but(scheduler, 0)
    occupancy = scheduler.occupancy()
    lacking = 2 if isinstance(order, InOrder) else 0
    assert (occupancy.step, occupancy.wanted - occupancy.done, occupancy.held) == (1, lacking, 6)
    assert (occupancy.groups_in_flight, occupancy.groups_buffered) == (1, 3)
    if isinstance(order, Windowed):
        scheduler.choose()
        assert scheduler.occupancy().held == 6, "what is chosen is held until it is trained"
        scheduler.mark_trained(1)
        assert scheduler.occupancy().held == 2


@BOTH
def test_what_a_replica_holds_since_before_a_restart_is_under_way_again_and_not_given_out(order: Deadlines) -> None:
    before = a_scheduler(order=order)
    held = before.take(policy_version=0, room=3)
    scheduler = a_scheduler(order=order)
    assert [scheduler.resume(slot, 0) for slot in held] == [True, True, True]
    assert not scheduler.resume(held[0], 0), "once"
    assert not set(held) & set(scheduler.take(policy_version=0, room=1000))
    finish(scheduler, held)


def test_what_is_held_and_not_wanted_any_more_is_not_taken_up() -> None:
    scheduler = a_scheduler(steps=2)
    scheduler.restore(SlotId(1, 0, 0), "graded", 0)
    scheduler.fail(1, "it failed")
    given = scheduler.take(policy_version=0, room=1)
    settled = Scheduler[str](Shape(2, 2, 2, 1), InOrder(), Progress(1, 2))
    assert not scheduler.resume(SlotId(1, 0, 0), 0), "graded"
    assert not scheduler.resume(SlotId(1, 1, 0), 0), "of a failed prompt"
    assert not scheduler.resume(given[0], 0), "given to another replica"
    assert not scheduler.resume(SlotId(1, 0, 2), 0), "of a larger group"
    assert not scheduler.resume(SlotId(3, 0, 0), 0), "of a longer run"
    assert not scheduler.resume(SlotId(2, 0, 0, MAX_ATTEMPTS), 0), "refused too often"
    assert not settled.resume(SlotId(1, 0, 0), 0), "trained"


@BOTH
def test_what_is_held_and_too_old_for_its_step_is_not_taken_up(order: Deadlines) -> None:
    late = Scheduler[str](Shape(4, 2, 2, 1), order, Progress(2, 4))
    assert not late.resume(SlotId(3, 0, 0), 0), "it could be trained at step 2 at the latest"
    assert late.resume(SlotId(3, 0, 0), 2)


def test_no_step_is_overbooked_by_what_is_held() -> None:
    scheduler = a_scheduler(lag=1, prompts=1, order=Windowed())
    held = [SlotId(step, 0, 0) for step in (1, 2, 3)]
    assert [scheduler.resume(slot, 0) for slot in held] == [True, True, False], "two steps can take them in time"


def test_a_resumed_attempt_counts() -> None:
    scheduler = a_scheduler()
    assert scheduler.resume(SlotId(1, 0, 0, 2), 0)
    assert scheduler.sampled(SlotId(1, 0, 0, 2))
    scheduler.refuse(SlotId(1, 0, 0, 2), "poisoned")
    assert SlotId(1, 0, 0, 3) in scheduler.take(policy_version=0, room=1000)


@pytest.mark.parametrize(
    "name", ["validation-3-000001-0", "canary-2-gen-0-0-000000-0", "", "000001-00001-001", "a-b-c-d"]
)
def test_names_outside_the_stream_of_steps_are_no_slots(name: str) -> None:
    assert SlotId.parse(name) is None
    assert SlotId.parse(str(SlotId(12, 3, 4, 1))) == SlotId(12, 3, 4, 1)
