"""The scheduler keeps its promises under any order of events, and this suite catches schedulers that break one.

`world.py` has the events and the promises. Each mutant below is the scheduler with one mistake that another project has
made, or that we could make, and must be caught. `make test` runs few examples, and the mutants that few examples catch.
`make test-deep` runs the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.unit.coordinator.world import AnyRun, Sample

from specrl.coordinator.schedule.scheduler import Scheduler, ScheduleShape, SlotId, SlotState, StepChoice, _Group, _Slot
from specrl.errors import VersionConflict


def test_any_run_keeps_every_promise() -> None:
    check_any_run(examples=50)


@pytest.mark.deep
def test_any_of_many_runs_keeps_every_promise() -> None:
    check_any_run(examples=1000)


def check_any_run(examples: int) -> None:
    run_state_machine_as_test(AnyRun, settings=settings(max_examples=examples, stateful_step_count=60))


class LagIsOffByOne(Scheduler[Sample]):
    def _newest_admissible_step(self, oldest_version: int) -> int:
        return super()._newest_admissible_step(oldest_version) + 1


class OvertakesAtWill(Scheduler[Sample]):
    """Never waits for a straggler: chooses the first groups that are finished."""

    def choose_groups(self) -> StepChoice[Sample] | None:
        finished = [group for group in self._groups.values() if group.is_complete]
        if self._chosen is None and len(finished) >= self.shape.prompts_per_step:
            taken = finished[: self.shape.prompts_per_step]
            results = [(group.position, [slot.result for slot in group.slots if slot.result]) for group in taken]
            self._chosen = StepChoice(self._first_open_step, results, [])
        return super().choose_groups()


def discard(scheduler: Scheduler[Sample], group: _Group[Sample], slot: _Slot[Sample]) -> None:
    """Drop a graded rollout, as a rule against old rollouts would."""
    if group.is_complete:
        scheduler._finished[scheduler.shape.step_of(group.position)] -= 1
    slot.result = None
    scheduler._release_slot(group, slot)


class DiscardsTheOld(Scheduler[Sample]):
    """Samples a rollout again when it has waited for long."""

    def mark_trained(self, step: int) -> int:
        dropped = super().mark_trained(step)
        for group in self._groups.values():
            for slot in group.slots:
                if slot.state is SlotState.DONE and self._newest_admissible_step(slot.oldest_version) <= step + 1:
                    discard(self, group, slot)
        return dropped


class DiscardsTheLong(Scheduler[Sample]):
    def mark_graded(self, slot_id: SlotId, result: Sample, oldest_version: int) -> bool:
        is_taken = super().mark_graded(slot_id, result, oldest_version)
        found = self._find_slot(slot_id)
        if is_taken and found is not None and result.length > 40:
            discard(self, *found)
        return is_taken


class LosesWhatWasUnderWay(Scheduler[Sample]):
    def requeue(self, slot_ids: Iterable[SlotId]) -> int:
        return len(list(slot_ids))


class LosesARefusedSlot(Scheduler[Sample]):
    def refuse_sample(self, slot_id: SlotId, reason: str) -> None:
        found = self._find_slot(slot_id)
        if found is not None:
            found[1].attempt += 1


class TakesDuplicates(Scheduler[Sample]):
    def mark_sampled(self, slot_id: SlotId) -> bool:
        found = self._find_slot(slot_id)
        if found is not None:
            found[1].state = SlotState.GRADING
        return found is not None


class ForgetsASlotAtRestart(Scheduler[Sample]):
    def restore_slot(self, slot_id: SlotId, result: Sample, oldest_version: int) -> bool:
        return slot_id.sample == 1 or super().restore_slot(slot_id, result, oldest_version)


class ForgetsWhatIsTrainedAtRestart(Scheduler[Sample]):
    def __init__(self, shape: ScheduleShape, trained: int) -> None:
        super().__init__(shape, max(trained - 1, 0))


class SkipsAStepAtRestart(Scheduler[Sample]):
    def __init__(self, shape: ScheduleShape, trained: int) -> None:
        super().__init__(shape, trained + (trained > 1))


class ForgetsFailuresAtRestart(Scheduler[Sample]):
    has_begun = False

    def fail_group(self, position: int, reason: str) -> None:
        if self.has_begun:
            super().fail_group(position, reason)

    def take_slots(self, policy_version: int, room: int) -> list[SlotId]:
        self.has_begun = True
        return super().take_slots(policy_version, room)


class TakesFewerThanAStepNeeds(Scheduler[Sample]):
    """Trains the finished groups, and drops the others."""

    def choose_groups(self) -> StepChoice[Sample] | None:
        step = self._first_open_step
        if self._chosen is None and self._finished[step]:
            for position in self.shape.positions_of_step(step):
                group = self._open_group(SlotId(step, self.shape.index_of(position), 0))
                if not group.is_complete and group.failure is None:
                    del self._groups[position]
            taken = [
                self._groups.pop(position)
                for position in self.shape.positions_of_step(step)
                if position in self._groups
            ]
            results = [(group.position, [slot.result for slot in group.slots if slot.result]) for group in taken]
            self._chosen = StepChoice(step, results, [])
        return super().choose_groups()


class CountsAGroupBeforeItIsWhole(Scheduler[Sample]):
    def _complete_slot(self, group: _Group[Sample], slot: _Slot[Sample], result: Sample, oldest_version: int) -> None:
        super()._complete_slot(group, slot, result, oldest_version)
        if group.done_count == self.shape.group_size - 1:
            self._finished[self.shape.step_of(group.position)] += 1


class ForgetsToCountAFailure(Scheduler[Sample]):
    def fail_group(self, position: int, reason: str) -> None:
        counted = self._finished[self.shape.step_of(position)]
        super().fail_group(position, reason)
        self._finished[self.shape.step_of(position)] = counted


class WaitsForTheWholeWindow(Scheduler[Sample]):
    """Waits until no group is unfinished. Deadlocks: some may not start before the step is trained."""

    def choose_groups(self) -> StepChoice[Sample] | None:
        if self._chosen is None and self.trained < self.shape.steps:
            last = min(self._newest_admissible_step(self.trained) + 1, self.shape.steps)
            self._open_group(SlotId(last, self.shape.prompts_per_step - 1, 0))
        if any(not group.is_complete and group.failure is None for group in self._groups.values()):
            return None
        return super().choose_groups()


BROKEN: list[type[Scheduler[Sample]]] = [
    LagIsOffByOne,
    OvertakesAtWill,
    DiscardsTheOld,
    LosesWhatWasUnderWay,
    TakesDuplicates,
    ForgetsASlotAtRestart,
    ForgetsWhatIsTrainedAtRestart,
    SkipsAStepAtRestart,
    ForgetsFailuresAtRestart,
    TakesFewerThanAStepNeeds,
    CountsAGroupBeforeItIsWhole,
    ForgetsToCountAFailure,
    WaitsForTheWholeWindow,
]

HARDER: list[type[Scheduler[Sample]]] = [DiscardsTheLong, LosesARefusedSlot]
"""Mutants that only an unlikely order of events reveals."""


@pytest.mark.parametrize("mutant", BROKEN, ids=[mutant.__name__ for mutant in BROKEN])
def test_a_broken_scheduler_is_caught(mutant: type[Scheduler[Sample]]) -> None:
    check_mutant_is_caught(mutant)


@pytest.mark.deep
@pytest.mark.parametrize("mutant", HARDER, ids=[mutant.__name__ for mutant in HARDER])
def test_a_broken_scheduler_that_is_rarely_seen_is_caught(mutant: type[Scheduler[Sample]]) -> None:
    check_mutant_is_caught(mutant)


def check_mutant_is_caught(mutant: type[Scheduler[Sample]]) -> None:
    class Machine(AnyRun):
        kind = mutant

    # No shrinking and no database: only whether it is caught matters. Derandomised, so that the test is repeatable.
    found = settings(
        max_examples=2000, stateful_step_count=60, phases=[Phase.generate], derandomize=True, database=None
    )
    with pytest.raises((AssertionError, VersionConflict, ExceptionGroup)) as caught:
        run_state_machine_as_test(Machine, settings=found)
    errors = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert all(isinstance(error, AssertionError | VersionConflict) for error in errors), "a promise was broken"
