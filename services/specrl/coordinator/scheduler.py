"""Which rollout may start now, and which step may train: the lag bound, as a pure state machine.

The stream of prompts is dealt to steps by position: prompts [(s-1)P, sP) belong to step s, so every prompt is trained
exactly once, whatever happens in between. A slot is one rollout that a group still needs or has:

    WAITING --take--> INFLIGHT --sampled--> GRADING --graded--> DONE
       ^                 |                     |
       +----- release ---+------- release -----+        (replica lost, poisoned, ungraded: sampled again)

A group is complete when its G slots are DONE, and FAILED when one slot was refused `MAX_ATTEMPTS` times for what it
is (not for a lost replica). A step is ready when each of its P groups is one or the other.

The bound: a replica that serves policy version v is given slots of steps s <= v + 1 + L only. Then the oldest token of
a rollout trained at step s has version >= s - 1 - L, so its lag is at most L, and nothing is ever dropped for its age.

No clock, no I/O, no concurrency here: `rollouts.py` acts on it from one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from specrl.errors import VersionConflict

MAX_ATTEMPTS = 5

R = TypeVar("R")


@dataclass(frozen=True)
class Shape:
    """The run's constants: steps, prompts per step (P), group size (G), maxPolicyLag (L)."""

    steps: int
    prompts_per_step: int
    group_size: int
    max_policy_lag: int


@dataclass(frozen=True, order=True)
class SlotId:
    """Sample `sample` of prompt `index` of step `step`; `attempt` counts samples that were refused before it."""

    step: int
    index: int
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.group_id}-{self.sample:03d}-{self.attempt}"

    @property
    def group_id(self) -> str:
        return group_id(self.step, self.index)


def group_id(step: int, index: int) -> str:
    """Name of a group, sortable in stream order."""
    return f"{step:06d}-{index:05d}"


class SlotState(StrEnum):
    WAITING = "waiting"
    INFLIGHT = "inflight"
    GRADING = "grading"
    DONE = "done"


@dataclass
class _Slot(Generic[R]):
    state: SlotState = SlotState.WAITING
    attempt: int = 0
    replica: str | None = None
    result: R | None = None


@dataclass
class _Group(Generic[R]):
    slots: list[_Slot[R]]
    failure: str | None = None

    @property
    def is_complete(self) -> bool:
        return all(slot.state is SlotState.DONE for slot in self.slots)


@dataclass(frozen=True)
class Occupancy:
    """How far the step that is collected next has come, and how much is under way altogether."""

    step: int
    done: int
    wanted: int
    groups_in_flight: int
    groups_buffered: int
    held: int
    """Graded rollouts of untrained steps, whatever their group."""


@dataclass
class Scheduler(Generic[R]):
    """State of all steps that are not trained yet. R is what a finished slot holds (a graded rollout)."""

    shape: Shape
    trained: int = 0
    _steps: dict[int, list[_Group[R]]] = field(default_factory=dict)

    # -- what may start ------------------------------------------------------------------------------------------

    def newest_admissible(self, policy_version: int) -> int:
        """Newest step that a replica with this policy version may work for."""
        return min(policy_version + 1 + self.shape.max_policy_lag, self.shape.steps)

    def take(self, replica: str, policy_version: int, room: int) -> list[SlotId]:
        """Give a replica up to `room` waiting slots, oldest step first, group by group. They become INFLIGHT."""
        taken: list[SlotId] = []
        for slot_id, slot in self._walk(self.newest_admissible(policy_version)):
            if len(taken) == room:
                break
            if slot.state is SlotState.WAITING:
                self._start(slot, replica)
                taken.append(slot_id)
        return taken

    def deal(self, replicas: list[str], policy_version: int) -> dict[str, list[SlotId]]:
        """Give all waiting slots at once, group i to replica i mod N: the same split every time."""
        dealt: dict[str, list[SlotId]] = {replica: [] for replica in replicas}
        for slot_id, slot in self._walk(self.newest_admissible(policy_version)):
            if slot.state is SlotState.WAITING and replicas:
                replica = replicas[slot_id.index % len(replicas)]
                self._start(slot, replica)
                dealt[replica].append(slot_id)
        return dealt

    # -- what happened -------------------------------------------------------------------------------------------

    def sampled(self, slot_id: SlotId) -> bool:
        """A replica finished this sample. False when it is no longer wanted (a duplicate, or its group failed)."""
        slot = self._find(slot_id)
        if slot is None or slot.state is not SlotState.INFLIGHT or slot.attempt != slot_id.attempt:
            return False
        slot.state, slot.replica = SlotState.GRADING, None
        return True

    def graded(self, slot_id: SlotId, result: R) -> bool:
        """The verifier spoke; the slot is DONE. False when its group has failed meanwhile."""
        slot = self._find(slot_id)
        if slot is None or slot.state is not SlotState.GRADING:
            return False
        slot.state, slot.result = SlotState.DONE, result
        return True

    def restore(self, slot_id: SlotId, result: R) -> bool:
        """Put back a finished slot from the store, after a restart. False when its step is trained already."""
        if not self.trained < slot_id.step <= self.shape.steps:
            return False
        slot = self._groups(slot_id.step)[slot_id.index].slots[slot_id.sample]
        slot.state, slot.result, slot.attempt = SlotState.DONE, result, slot_id.attempt
        return True

    def refuse(self, slot_id: SlotId, reason: str) -> None:
        """This sample cannot be trained on (poisoned, ungraded): sample again, or give the group up."""
        slot = self._find(slot_id)
        if slot is None or slot.state is SlotState.DONE:
            return
        slot.attempt += 1
        slot.state, slot.replica = SlotState.WAITING, None
        if slot.attempt >= MAX_ATTEMPTS:
            self._groups(slot_id.step)[slot_id.index].failure = reason

    def requeue(self, slot_ids: Iterable[SlotId]) -> int:
        """These samples were lost with their replica: they wait again, unchanged. Returns how many there were."""
        count = 0
        for slot_id in slot_ids:
            slot = self._find(slot_id)
            if slot is not None and slot.state is SlotState.INFLIGHT and slot.attempt == slot_id.attempt:
                slot.state, slot.replica = SlotState.WAITING, None
                count += 1
        return count

    def mark_trained(self, step: int) -> int:
        """Step `step` is trained and durable; its groups are forgotten. Raises VersionConflict out of order.

        Returns how many graded rollouts of failed groups are forgotten with it, untrained.
        """
        if step != self.trained + 1:
            raise VersionConflict(f"steps must be trained in order, got {step} after {self.trained}; this is a bug")
        failed = [group for group in self._steps.pop(step, []) if group.failure]
        self.trained = step
        return sum(slot.state is SlotState.DONE for group in failed for slot in group.slots)

    # -- what can train ------------------------------------------------------------------------------------------

    def is_ready(self, step: int) -> bool:
        """Every group of the step is complete or failed."""
        return all(group.is_complete or group.failure for group in self._groups(step))

    def results(self, step: int) -> list[tuple[int, list[R]]]:
        """(index, results in sample order) of the step's complete groups, in stream order."""
        return [
            (index, [slot.result for slot in group.slots if slot.result is not None])
            for index, group in enumerate(self._groups(step))
            if not group.failure
        ]

    def failures(self, step: int) -> list[tuple[int, str]]:
        """(index, reason) of the step's failed groups."""
        return [(index, group.failure) for index, group in enumerate(self._groups(step)) if group.failure]

    def occupancy(self) -> Occupancy:
        """Numbers for the status page."""
        step = min(self.trained + 1, self.shape.steps)
        wanted = self.shape.prompts_per_step * self.shape.group_size if step > self.trained else 0
        in_flight = buffered = done = held = 0
        for number, groups in self._steps.items():
            for group in groups:
                finished = sum(slot.state is SlotState.DONE for slot in group.slots)
                held += finished
                done += finished if number == step else 0
                buffered += group.is_complete
                begun = any(slot.state is not SlotState.WAITING for slot in group.slots)
                in_flight += begun and not group.is_complete
        return Occupancy(step, done, wanted, in_flight, buffered, held)

    # -- inside --------------------------------------------------------------------------------------------------

    def _groups(self, step: int) -> list[_Group[R]]:
        if step not in self._steps:
            shape = self.shape
            self._steps[step] = [
                _Group([_Slot() for _ in range(shape.group_size)]) for _ in range(shape.prompts_per_step)
            ]
        return self._steps[step]

    def _walk(self, last: int) -> Iterator[tuple[SlotId, _Slot[R]]]:
        """Slots of untrained steps up to `last`, in stream order, failed groups left out."""
        for step in range(self.trained + 1, last + 1):
            for index, group in enumerate(self._groups(step)):
                if group.failure:
                    continue
                for sample, slot in enumerate(group.slots):
                    yield SlotId(step, index, sample, slot.attempt), slot

    def _find(self, slot_id: SlotId) -> _Slot[R] | None:
        """The slot, unless its step is trained already or its group failed."""
        if not self.trained < slot_id.step <= self.shape.steps:
            return None
        group = self._groups(slot_id.step)[slot_id.index]
        return None if group.failure else group.slots[slot_id.sample]

    @staticmethod
    def _start(slot: _Slot[R], replica: str) -> None:
        slot.state, slot.replica = SlotState.INFLIGHT, replica
