"""The promises of the schedule under any order of events, and that this suite notices when one of them is broken.

The events and the promises are in `world.py`. Each mutant below is the scheduler with one mistake that a peer of ours
has made, or that we could make; each of them must be caught. `make test` tries fewer examples, and the mutants that
few examples catch. `make test-deep` tries the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.unit.coordinator.world import AnyRun, Sample

from specrl.coordinator.order import NEVER, Deadlines, InOrder, Windowed
from specrl.coordinator.progress import Progress
from specrl.coordinator.scheduler import Choice, Scheduler, Shape, SlotId, SlotState, _Group
from specrl.errors import VersionConflict

BOTH: tuple[Deadlines, ...] = (InOrder(), Windowed())


ORDERS = pytest.mark.parametrize("order", BOTH, ids=["in_order", "windowed"])


@ORDERS
def test_any_run_keeps_every_promise(order: Deadlines) -> None:
    check_any_run(order, examples=50)


@pytest.mark.deep
@ORDERS
def test_any_of_many_runs_keeps_every_promise(order: Deadlines) -> None:
    check_any_run(order, examples=1000)


def check_any_run(order: Deadlines, examples: int) -> None:
    class Machine(AnyRun):
        deadlines = (order,)

    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=60))


class LagIsOffByOne(Scheduler[Sample]):
    def _latest(self, oldest_version: int) -> int:
        return super()._latest(oldest_version) + 1


class NewestVersionDecides(Windowed):
    """As when a straggler that is sampled again gives its whole group a new deadline."""

    def of(self, own_step: int, latest: Iterable[int]) -> int:
        return max(latest, default=NEVER)


class RestartedGroupIsYoung(Scheduler[Sample]):
    """A requeued rollout takes the age of the group's other rollouts with it."""

    def _release(self, group: _Group[Sample], slot: object) -> None:
        super()._release(group, slot)  # type: ignore[arg-type]
        self._due -= Counter((group.deadline,))
        group.deadline = self._deadline(group.position, ())
        self._due[group.deadline] += 1


class OverbooksSteps(Scheduler[Sample]):
    """Starts whatever is young enough, however many groups are due by then."""

    def _may_start(self, position: int, deadline: int, policy_version: int) -> bool:
        latest = self._latest(policy_version)
        return self._deadline(position, (deadline, latest)) <= latest

    def has_kept_deadlines(self) -> bool:
        return True  # so that its consequences are what is noticed


class OverbooksWhileAStepTrains(Scheduler[Sample]):
    """Counts a step that is chosen as one that can still take groups."""

    @property
    def _first_open(self) -> int:
        return self.trained + 1


class OvertakesAtWill(Scheduler[Sample]):
    """Never waits for a group that is due."""

    def _fits(self, due: Counter[int], first: int) -> bool:
        return True


class DiscardsTheOld(Scheduler[Sample]):
    """Samples a group again when it has waited for long."""

    def mark_trained(self, step: int) -> int:
        dropped = super().mark_trained(step)
        for group in self._groups.values():
            for slot in group.slots:
                if slot.state is SlotState.DONE and slot.latest is not None and slot.latest <= step + 1:
                    slot.result = None
                    self._release(group, slot)
        return dropped


class DiscardsTheLong(Scheduler[Sample]):
    def graded(self, slot_id: SlotId, result: Sample, oldest_version: int) -> bool:
        is_taken = super().graded(slot_id, result, oldest_version)
        found = self._find(slot_id)
        if is_taken and found is not None and result.length > 40:
            self._release(*found)
        return is_taken


class LosesWhatWasUnderWay(Scheduler[Sample]):
    def requeue(self, slot_ids: Iterable[SlotId]) -> int:
        return len(list(slot_ids))


class LosesARefusedSlot(Scheduler[Sample]):
    def refuse(self, slot_id: SlotId, reason: str) -> None:
        found = self._find(slot_id)
        if found is not None:
            found[1].attempt += 1


class TakesDuplicates(Scheduler[Sample]):
    def sampled(self, slot_id: SlotId) -> bool:
        found = self._find(slot_id)
        if found is not None:
            found[1].state = SlotState.GRADING
        return found is not None


class ForgetsASlotAtRestart(Scheduler[Sample]):
    def restore(self, slot_id: SlotId, result: Sample, oldest_version: int) -> bool:
        return slot_id.sample == 1 or super().restore(slot_id, result, oldest_version)


class ForgetsAgesAtRestart(Scheduler[Sample]):
    """Takes restored rollouts for fresh ones."""

    def restore(self, slot_id: SlotId, result: Sample, oldest_version: int) -> bool:
        return super().restore(slot_id, result, max(oldest_version, self.trained))


class ForgetsWhoOvertookAtRestart(Scheduler[Sample]):
    def __init__(self, shape: Shape, deadlines: Deadlines, progress: Progress) -> None:
        super().__init__(shape, deadlines, Progress(progress.step, progress.cursor))


class ForgetsWhoWasOvertakenAtRestart(Scheduler[Sample]):
    """A cursor that is a number alone."""

    def __init__(self, shape: Shape, deadlines: Deadlines, progress: Progress) -> None:
        super().__init__(shape, deadlines, Progress(progress.step, progress.step * shape.prompts_per_step))


class ForgetsTheBatchAtRestart(Scheduler[Sample]):
    def choose_again(self, positions: Iterable[int]) -> Choice[Sample]:
        return None  # type: ignore[return-value]


class ForgetsFailuresAtRestart(Scheduler[Sample]):
    has_begun = False

    def fail(self, position: int, reason: str) -> None:
        if self.has_begun:
            super().fail(position, reason)

    def take(self, policy_version: int, room: int) -> list[SlotId]:
        self.has_begun = True
        return super().take(policy_version, room)


class TakesFewerThanAStepNeeds(Scheduler[Sample]):
    """Trains what is there."""

    def choose(self) -> Choice[Sample] | None:
        finished = [group for group in self._groups.values() if group.is_finished]
        return self._choose(self._first_open, finished[:1]) if finished and self._chosen is None else super().choose()


class WaitsForTheWholeWindow(Scheduler[Sample]):
    """Chooses only when nothing is unfinished: it waits for what may not start before the step is trained."""

    def choose(self) -> Choice[Sample] | None:
        if self._chosen is None and self.trained < self.shape.steps:
            ahead = self.trained + 2 + self.shape.max_policy_lag
            self._open_up_to(min(ahead * self.shape.prompts_per_step, self.shape.prompts) - 1)
        if any(not group.is_finished for group in self._groups.values()):
            return None
        return super().choose()


Broken = tuple[type[Scheduler[Sample]], Deadlines]

BROKEN: list[Broken] = [
    (LagIsOffByOne, InOrder()),
    (LagIsOffByOne, Windowed()),
    (Scheduler, NewestVersionDecides()),
    (OverbooksSteps, Windowed()),
    (OvertakesAtWill, Windowed()),
    (OvertakesAtWill, InOrder()),
    (DiscardsTheOld, InOrder()),
    (DiscardsTheOld, Windowed()),
    (LosesWhatWasUnderWay, InOrder()),
    (LosesWhatWasUnderWay, Windowed()),
    (TakesDuplicates, Windowed()),
    (ForgetsASlotAtRestart, InOrder()),
    (ForgetsASlotAtRestart, Windowed()),
    (ForgetsFailuresAtRestart, Windowed()),
    (TakesFewerThanAStepNeeds, Windowed()),
    (WaitsForTheWholeWindow, InOrder()),
    (WaitsForTheWholeWindow, Windowed()),
]

HARDER: list[Broken] = [
    (RestartedGroupIsYoung, Windowed()),
    (OverbooksWhileAStepTrains, Windowed()),
    (DiscardsTheLong, InOrder()),
    (DiscardsTheLong, Windowed()),
    (LosesARefusedSlot, Windowed()),
    (ForgetsAgesAtRestart, Windowed()),
    (ForgetsWhoOvertookAtRestart, Windowed()),
    (ForgetsWhoWasOvertakenAtRestart, Windowed()),
    (ForgetsTheBatchAtRestart, Windowed()),
    (ForgetsFailuresAtRestart, InOrder()),
]
"""Mutants that only an unlikely order of events shows."""


def name_mutant(value: object) -> str:
    """A part of a test's name: of a mutant, or of an order."""
    return value.__name__ if isinstance(value, type) else type(value).__name__


@pytest.mark.parametrize(("mutant", "order"), BROKEN, ids=name_mutant)
def test_a_broken_scheduler_is_caught(mutant: type[Scheduler[Sample]], order: Deadlines) -> None:
    check_mutant_is_caught(mutant, order)


@pytest.mark.deep
@pytest.mark.parametrize(("mutant", "order"), HARDER, ids=name_mutant)
def test_a_broken_scheduler_that_is_rarely_seen_is_caught(mutant: type[Scheduler[Sample]], order: Deadlines) -> None:
    check_mutant_is_caught(mutant, order)


def check_mutant_is_caught(mutant: type[Scheduler[Sample]], order: Deadlines) -> None:
    class Machine(AnyRun):
        kind = mutant
        deadlines = (order,)

    # Not shrunk, not remembered, and the same examples every time: that it is caught is all that is asked.
    found = settings(
        max_examples=2000, stateful_step_count=60, phases=[Phase.generate], derandomize=True, database=None
    )
    with pytest.raises((AssertionError, VersionConflict, ExceptionGroup)) as caught:
        run_state_machine_as_test(Machine, settings=found)
    errors = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert all(isinstance(error, AssertionError | VersionConflict) for error in errors), "a promise was broken"
