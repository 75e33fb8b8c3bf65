"""The scheduler, case by case. test_any_run.py tests it under any order of events."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.unit.coordinator.world import settled_positions

from specrl.coordinator.schedule.restart import FinishedSlot, rebuild_schedule
from specrl.coordinator.schedule.scheduler import MAX_ATTEMPTS, Scheduler, ScheduleShape, SlotId
from specrl.errors import RunInvalid, VersionConflict


def a_scheduler(lag: int = 1, steps: int = 4, prompts: int = 2, group: int = 2, trained: int = 0) -> Scheduler[str]:
    return Scheduler(ScheduleShape(steps, prompts, group, lag), trained)


def finish(scheduler: Scheduler[str], slots: Iterable[SlotId], version: int = 0) -> None:
    for slot in slots:
        assert scheduler.mark_sampled(slot)
        assert scheduler.mark_graded(slot, str(slot), version)


def finish_all_but(scheduler: Scheduler[str], *left: int, version: int = 0) -> list[SlotId]:
    """Start and finish every admissible slot, except in the groups at these positions. Returns the slots of those."""
    slots = scheduler.take_slots(version, 1000)
    waits = [slot for slot in slots if scheduler.shape.position_at(slot.step, slot.index) in left]
    finish(scheduler, [slot for slot in slots if slot not in waits], version)
    return waits


def train(scheduler: Scheduler[str]) -> list[int]:
    """Train the next step. Returns the positions that it settled."""
    choice = scheduler.choose_groups()
    assert choice is not None
    scheduler.mark_trained(choice.step)
    return settled_positions(choice)


def test_lag_zero_admits_only_the_next_step() -> None:
    taken = a_scheduler(lag=0).take_slots(policy_version=0, room=100)
    assert {slot.step for slot in taken} == {1}


def test_lag_one_lets_generation_run_one_step_ahead() -> None:
    taken = a_scheduler(lag=1).take_slots(policy_version=0, room=100)
    assert {slot.step for slot in taken} == {1, 2}


def test_a_replica_behind_the_bound_gets_nothing() -> None:
    scheduler = a_scheduler(lag=0)
    finish(scheduler, scheduler.take_slots(0, 100))
    train(scheduler)
    assert scheduler.take_slots(policy_version=0, room=100) == []
    assert {slot.step for slot in scheduler.take_slots(policy_version=1, room=100)} == {2}


def test_slots_are_given_in_stream_order_group_by_group() -> None:
    taken = a_scheduler().take_slots(0, 3)
    assert [(slot.step, slot.index, slot.sample) for slot in taken] == [(1, 0, 0), (1, 0, 1), (1, 1, 0)]


def test_dealing_splits_groups_the_same_way_every_time() -> None:
    first, second = (a_scheduler(lag=0).assign_all_slots(["a", "b"], 0) for _ in range(2))
    assert first == second
    assert {slot.index for slot in first["a"]} == {0}
    assert {slot.index for slot in first["b"]} == {1}
    assert a_scheduler(lag=0).assign_all_slots([], -1) == {}


def test_requeued_slots_keep_their_attempt_and_refused_ones_get_the_next() -> None:
    scheduler = a_scheduler()
    lost, poisoned = scheduler.take_slots(0, 2)
    assert scheduler.requeue([lost]) == 1
    assert scheduler.mark_sampled(poisoned)
    scheduler.refuse_sample(poisoned, "NaN")
    again = scheduler.take_slots(0, 2)
    assert [slot.attempt for slot in again] == [0, 1]


def test_a_late_duplicate_of_a_requeued_slot_is_taken_once() -> None:
    scheduler = a_scheduler()
    (slot,) = scheduler.take_slots(0, 1)
    scheduler.requeue([slot])
    assert not scheduler.mark_sampled(slot), "the first replica is lost; what it still says is not wanted"
    (again,) = scheduler.take_slots(0, 1)
    assert scheduler.mark_sampled(again)
    assert not scheduler.mark_sampled(again)


def test_a_group_that_is_refused_too_often_fails_with_its_reason_and_frees_the_step() -> None:
    scheduler = a_scheduler(steps=1, prompts=2, group=2)
    for _ in range(MAX_ATTEMPTS):
        (slot,) = scheduler.take_slots(0, 1)
        assert scheduler.mark_sampled(slot)
        scheduler.refuse_sample(slot, "verifier hung")
    finish(scheduler, scheduler.take_slots(0, 100))
    choice = scheduler.choose_groups()
    assert choice is not None
    assert choice.failures == [(0, "verifier hung")]
    assert [position for position, _ in choice.groups] == [1]
    assert settled_positions(choice) == [0, 1]


def test_restored_slots_are_not_given_out_again() -> None:
    scheduler = a_scheduler(steps=1, prompts=1, group=2)
    assert scheduler.restore_slot(SlotId(1, 0, 0, 3), "kept", 0)
    (slot,) = scheduler.take_slots(0, 100)
    assert slot.sample == 1
    finish(scheduler, [slot])
    choice = scheduler.choose_groups()
    assert choice is not None
    assert choice.groups == [(0, ["kept", str(slot)])]


def test_slots_of_settled_prompts_and_of_longer_runs_are_not_restored() -> None:
    scheduler = a_scheduler(steps=3, trained=1)
    assert [scheduler.restore_slot(SlotId(*place, 0), "stored", 1) for place in [(1, 0), (1, 1), (4, 0)]] == [False] * 3
    assert [scheduler.restore_slot(SlotId(*place, 0), "stored", 1) for place in [(2, 1), (3, 0)]] == [True] * 2


def test_a_stored_rollout_that_is_too_old_for_its_step_ends_the_restart() -> None:
    """Happens when maxPolicyLag is lowered before a restart."""
    stored = FinishedSlot(SlotId(3, 0, 0), "stored", 1)
    assert rebuild_schedule(a_scheduler(lag=1), [stored], {}) == 1
    with pytest.raises(RunInvalid, match=r"000003-00000-000-0 .* got oldest_version=1; resume with the run file"):
        rebuild_schedule(a_scheduler(lag=0), [stored], {})


def test_steps_cannot_be_trained_out_of_order_or_unchosen() -> None:
    scheduler = a_scheduler()
    finish(scheduler, scheduler.take_slots(0, 100))
    with pytest.raises(VersionConflict):
        scheduler.mark_trained(1)
    scheduler.choose_groups()
    with pytest.raises(VersionConflict):
        scheduler.mark_trained(2)
    scheduler.mark_trained(1)


def test_a_token_older_than_the_rollouts_start_is_refused() -> None:
    scheduler = a_scheduler(prompts=1, trained=1)
    slot, _ = scheduler.take_slots(1, 2)
    assert scheduler.mark_sampled(slot)
    with pytest.raises(VersionConflict, match="oldest_version=0"):
        scheduler.mark_graded(slot, "old", 0)


def test_a_step_waits_for_its_own_straggler() -> None:
    scheduler = a_scheduler()
    waits = finish_all_but(scheduler, 0)
    assert scheduler.choose_groups() is None
    finish(scheduler, waits)
    assert train(scheduler) == [0, 1]


def test_a_replica_that_is_behind_starts_only_what_may_still_be_trained() -> None:
    scheduler = a_scheduler(lag=2, steps=9, trained=2)
    assert {slot.step for slot in scheduler.take_slots(1, 1000)} == {3, 4}
    assert {slot.step for slot in scheduler.take_slots(2, 1000)} == {5}


def test_a_straggler_that_is_sampled_again_is_trained_with_the_others_of_its_group() -> None:
    scheduler = a_scheduler(prompts=1)
    first, second = scheduler.take_slots(0, 2)
    finish(scheduler, [first])
    assert scheduler.mark_sampled(second)
    scheduler.refuse_sample(second, "ungraded")
    assert scheduler.choose_groups() is None
    (again,) = scheduler.take_slots(0, 1)
    assert (again.step, again.sample, again.attempt) == (1, 1, 1)
    finish(scheduler, [again])
    choice = scheduler.choose_groups()
    assert choice is not None
    assert choice.groups == [(0, [str(first), str(again)])]


def test_a_failed_group_counts_once_whether_it_was_finished_or_not() -> None:
    scheduler = a_scheduler(steps=1)
    finish(scheduler, scheduler.take_slots(0, 2))
    scheduler.fail_group(0, "first")
    scheduler.fail_group(0, "second")
    assert scheduler.choose_groups() is None
    scheduler.fail_group(1, "third")
    choice = scheduler.choose_groups()
    assert choice is not None
    assert choice.failures == [(0, "second"), (1, "third")]


def test_occupancy_counts_what_the_next_step_still_lacks() -> None:
    scheduler = a_scheduler()
    waits = finish_all_but(scheduler, 0)
    occupancy = scheduler.measure_occupancy()
    assert (occupancy.step, occupancy.wanted - occupancy.done, occupancy.held) == (1, 2, 6)
    assert (occupancy.groups_in_flight, occupancy.groups_buffered) == (1, 3)
    first, *others = waits
    scheduler.mark_sampled(first)
    assert (occupancy.grading, scheduler.measure_occupancy().grading) == (0, 1)
    scheduler.mark_graded(first, str(first), 0)
    finish(scheduler, others)
    scheduler.choose_groups()
    assert scheduler.measure_occupancy().held == 8, "what is chosen is held until it is trained"
    scheduler.mark_trained(1)
    assert scheduler.measure_occupancy().held == 4


def test_rollouts_that_a_replica_holds_from_before_a_restart_are_inflight_again() -> None:
    before = a_scheduler()
    held = before.take_slots(policy_version=0, room=3)
    scheduler = a_scheduler()
    assert [scheduler.resume_slot(slot, 0) for slot in held] == [True, True, True]
    assert not scheduler.resume_slot(held[0], 0), "once"
    assert not set(held) & set(scheduler.take_slots(policy_version=0, room=1000))
    finish(scheduler, held)


def test_held_rollouts_that_are_no_longer_needed_are_not_resumed() -> None:
    scheduler = a_scheduler(steps=2)
    scheduler.restore_slot(SlotId(1, 0, 0), "graded", 0)
    scheduler.fail_group(1, "it failed")
    given = scheduler.take_slots(policy_version=0, room=1)
    settled = a_scheduler(steps=2, trained=1)
    assert not scheduler.resume_slot(SlotId(1, 0, 0), 0), "graded"
    assert not scheduler.resume_slot(SlotId(1, 1, 0), 0), "of a failed prompt"
    assert not scheduler.resume_slot(given[0], 0), "given to another replica"
    assert not scheduler.resume_slot(SlotId(1, 0, 2), 0), "of a larger group"
    assert not scheduler.resume_slot(SlotId(3, 0, 0), 0), "of a longer run"
    assert not scheduler.resume_slot(SlotId(2, 0, 0, MAX_ATTEMPTS), 0), "refused too often"
    assert not settled.resume_slot(SlotId(1, 0, 0), 0), "trained"


def test_held_rollouts_that_are_too_old_for_their_step_are_not_resumed() -> None:
    late = a_scheduler(trained=2)
    assert not late.resume_slot(SlotId(3, 0, 0), 0), "it could be trained at step 2 at the latest"
    assert late.resume_slot(SlotId(3, 0, 0), 2)


def test_a_resumed_attempt_counts() -> None:
    scheduler = a_scheduler()
    assert scheduler.resume_slot(SlotId(1, 0, 0, 2), 0)
    assert scheduler.mark_sampled(SlotId(1, 0, 0, 2))
    scheduler.refuse_sample(SlotId(1, 0, 0, 2), "poisoned")
    assert SlotId(1, 0, 0, 3) in scheduler.take_slots(policy_version=0, room=1000)


@pytest.mark.parametrize(
    "name", ["validation-3-000001-0", "canary-2-gen-0-0-000000-0", "", "000001-00001-001", "a-b-c-d"]
)
def test_rollout_ids_of_no_step_are_not_parsed_as_slots(name: str) -> None:
    assert SlotId.from_name(name) is None
    assert SlotId.from_name(str(SlotId(12, 3, 4, 1))) == SlotId(12, 3, 4, 1)
