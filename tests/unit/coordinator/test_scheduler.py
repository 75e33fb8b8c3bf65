"""The lag bound and exactly-once training, under any order of events (DESIGN section 4)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from specrl.coordinator.scheduler import MAX_ATTEMPTS, Scheduler, Shape, SlotId
from specrl.errors import VersionConflict


def a_scheduler(lag: int = 1, steps: int = 4, prompts: int = 2, group: int = 2) -> Scheduler[str]:
    return Scheduler(Shape(steps, prompts, group, lag))


def finish(scheduler: Scheduler[str], slot: SlotId) -> None:
    assert scheduler.sampled(slot)
    scheduler.graded(slot, str(slot))


def test_lag_zero_admits_only_the_next_step() -> None:
    taken = a_scheduler(lag=0).take("a", policy_version=0, room=100)
    assert {slot.step for slot in taken} == {1}


def test_lag_one_lets_generation_run_one_step_ahead() -> None:
    taken = a_scheduler(lag=1).take("a", policy_version=0, room=100)
    assert {slot.step for slot in taken} == {1, 2}


def test_a_replica_behind_the_bound_gets_nothing() -> None:
    scheduler = a_scheduler(lag=0)
    for slot in scheduler.take("a", 0, 100):
        finish(scheduler, slot)
    scheduler.mark_trained(1)
    assert scheduler.take("behind", policy_version=0, room=100) == []
    assert {slot.step for slot in scheduler.take("current", policy_version=1, room=100)} == {2}


def test_slots_are_given_in_stream_order_group_by_group() -> None:
    taken = a_scheduler().take("a", 0, 3)
    assert [(slot.step, slot.index, slot.sample) for slot in taken] == [(1, 0, 0), (1, 0, 1), (1, 1, 0)]


def test_dealing_splits_groups_the_same_way_every_time() -> None:
    first, second = a_scheduler(lag=0).deal(["a", "b"], 0), a_scheduler(lag=0).deal(["a", "b"], 0)
    assert first == second
    assert {slot.index for slot in first["a"]} == {0}
    assert {slot.index for slot in first["b"]} == {1}


def test_requeued_slots_keep_their_attempt_and_refused_ones_get_the_next() -> None:
    scheduler = a_scheduler()
    lost, poisoned = scheduler.take("a", 0, 2)
    assert scheduler.requeue([lost]) == 1
    assert scheduler.sampled(poisoned)
    scheduler.refuse(poisoned, "NaN")
    again = scheduler.take("b", 0, 2)
    assert [slot.attempt for slot in again] == [0, 1]


def test_a_late_duplicate_of_a_requeued_slot_is_taken_once() -> None:
    scheduler = a_scheduler()
    (slot,) = scheduler.take("a", 0, 1)
    scheduler.requeue([slot])
    assert not scheduler.sampled(slot), "the first replica is lost; what it still says is not wanted"
    (again,) = scheduler.take("b", 0, 1)
    assert scheduler.sampled(again)
    assert not scheduler.sampled(again)


def test_a_group_that_is_refused_too_often_fails_with_its_reason_and_frees_the_step() -> None:
    scheduler = a_scheduler(steps=1, prompts=2, group=2)
    for _ in range(MAX_ATTEMPTS):
        (slot,) = scheduler.take("a", 0, 1)
        assert scheduler.sampled(slot)
        scheduler.refuse(slot, "verifier hung")
    for slot in scheduler.take("a", 0, 100):
        finish(scheduler, slot)
    assert scheduler.is_ready(1)
    assert scheduler.failures(1) == [(0, "verifier hung")]
    assert [index for index, _ in scheduler.results(1)] == [1]


def test_restored_slots_are_not_given_out_again() -> None:
    scheduler = a_scheduler(steps=1, prompts=1, group=2)
    scheduler.restore(SlotId(1, 0, 0, 3), "kept")
    (slot,) = scheduler.take("a", 0, 100)
    assert slot.sample == 1
    finish(scheduler, slot)
    assert scheduler.results(1) == [(0, ["kept", str(slot)])]


def test_steps_cannot_be_trained_out_of_order() -> None:
    with pytest.raises(VersionConflict):
        a_scheduler().mark_trained(2)


class AnyRun(RuleBasedStateMachine):
    """Any mix of replicas, versions, losses and refusals. The model: what was started when, and what was trained."""

    slots = Bundle("slots")

    @initialize(lag=st.integers(0, 3), steps=st.integers(1, 5), prompts=st.integers(1, 3), group=st.integers(2, 3))
    def begin(self, lag: int, steps: int, prompts: int, group: int) -> None:
        self.shape = Shape(steps, prompts, group, lag)
        self.scheduler: Scheduler[str] = Scheduler(self.shape)
        self.served = {"a": 0, "b": 0}
        self.started_under: dict[SlotId, int] = {}
        self.trained: list[tuple[int, int]] = []
        self.failed: list[tuple[int, int]] = []

    @rule(target=slots, replica=st.sampled_from(["a", "b"]), room=st.integers(1, 6))
    def take(self, replica: str, room: int) -> object:
        taken = self.scheduler.take(replica, self.served[replica], room)
        for slot in taken:
            assert self.served[replica] >= slot.step - 1 - self.shape.max_policy_lag
            self.started_under[slot] = self.served[replica]
        return multiple(*taken)

    @rule(slot=slots)
    def finish(self, slot: SlotId) -> None:
        if self.scheduler.sampled(slot):
            self.scheduler.graded(slot, str(slot))

    @rule(slot=slots)
    def refuse(self, slot: SlotId) -> None:
        if self.scheduler.sampled(slot):
            self.scheduler.refuse(slot, "poisoned")

    @rule(slot=slots)
    def lose(self, slot: SlotId) -> None:
        self.scheduler.requeue([slot])

    @rule(replica=st.sampled_from(["a", "b"]))
    def update(self, replica: str) -> None:
        self.served[replica] = self.scheduler.trained

    @precondition(lambda self: self.scheduler.trained < self.shape.steps)
    @rule()
    def train_if_ready(self) -> None:
        step = self.scheduler.trained + 1
        if not self.scheduler.is_ready(step):
            return
        for index, results in self.scheduler.results(step):
            assert len(results) == self.shape.group_size
            for name in results:
                slot = next(s for s in self.started_under if str(s) == name)
                assert step - 1 - self.started_under[slot] <= self.shape.max_policy_lag
            self.trained.append((step, index))
        self.failed += [(step, index) for index, _ in self.scheduler.failures(step)]
        self.scheduler.mark_trained(step)

    @invariant()
    def every_prompt_is_trained_or_failed_once_and_in_order(self) -> None:
        if not hasattr(self, "trained"):
            return
        accounted = sorted(self.trained + self.failed)
        expected = [(s, i) for s in range(1, self.scheduler.trained + 1) for i in range(self.shape.prompts_per_step)]
        assert accounted == expected
        assert self.trained == sorted(self.trained)

    def teardown(self) -> None:
        """No deadlock: from any state, serving and finishing alone lead to the end."""
        if not hasattr(self, "trained"):
            return
        for slot in list(self.started_under):
            self.scheduler.requeue([slot])
        while self.scheduler.trained < self.shape.steps:
            self.served = dict.fromkeys(self.served, self.scheduler.trained)
            before = self.scheduler.trained
            for slot in self.take_all():
                assert self.scheduler.sampled(slot)
                self.scheduler.graded(slot, str(slot))
            self.train_if_ready()
            assert self.scheduler.trained == before + 1

    def take_all(self) -> list[SlotId]:
        taken = self.scheduler.take("a", self.served["a"], 10_000)
        for slot in taken:
            self.started_under[slot] = self.served["a"]
        return taken


AnyRun.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestAnyRun = AnyRun.TestCase
