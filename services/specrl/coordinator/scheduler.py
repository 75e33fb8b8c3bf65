"""Which rollout may start now, and what the next step trains: the lag bound, as a pure state machine.

A slot is one rollout that a group still needs or has:

    WAITING --take--> INFLIGHT --sampled--> GRADING --graded--> DONE
       ^                 |                     |
       +---- requeue ----+------- refuse ------+        (replica lost: same seed; poisoned or ungraded: the next one)

A group is finished when its G slots are DONE, or when one of them was refused `MAX_ATTEMPTS` times for what it is (not
for a lost replica): then it has failed, with that reason.

    WAITING --a rollout starts--> BEGUN --> FINISHED --step s takes it--> CHOSEN --s is trained--> settled

The bound. A rollout that starts under policy version v may be trained at step v + 1 + L at the latest: its oldest token
has version >= v, so its lag is at most L up to there. Its group has a deadline (`order.py`) that is never later, and
deadlines are kept because both things that could break them are not done:

    start    no rollout starts if afterwards there were a step d with more groups due by d than steps up to d can take
    choose   a step takes P finished groups, the nearest deadlines first; if what it leaves behind could not be trained
             in time, it waits, for that group then is due

So nothing is ever too old to be trained, and there is no rule that drops a rollout for its age.

No deadlock. A group that has begun may always go on under the newest version v: v + 1 + L is no earlier than any
deadline. If fewer than P groups have begun another may begin, since no step can be overbooked by them. So every step
gets its P finished groups as long as a replica serves the newest version and rollouts come back, or fail.

No clock, no I/O, no concurrency here: `rollouts.py` acts on it from one event loop, `restart.py` builds it again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import nsmallest

from specrl.coordinator.order import NEVER, Deadlines, InOrder
from specrl.coordinator.progress import Progress
from specrl.errors import VersionConflict

MAX_ATTEMPTS = 5


@dataclass(frozen=True)
class Shape:
    """The run's constants: steps, prompts per step (P), group size (G), maxPolicyLag (L)."""

    steps: int
    prompts_per_step: int
    group_size: int
    max_policy_lag: int

    @property
    def prompts(self) -> int:
        """Places of the stream that the run trains."""
        return self.steps * self.prompts_per_step

    def own_step(self, position: int) -> int:
        """The step that a place of the stream belongs to: the one that order InOrder trains it at."""
        return position // self.prompts_per_step + 1

    def index(self, position: int) -> int:
        """A place's number within its own step."""
        return position % self.prompts_per_step

    def position(self, own_step: int, index: int) -> int:
        """The place of the stream with this number within its own step."""
        return (own_step - 1) * self.prompts_per_step + index

    def group_id(self, position: int) -> str:
        """Name of the group at a place."""
        return group_id(self.own_step(position), self.index(position))

    def position_of(self, group: str) -> int:
        """The place of the group with this name."""
        own_step, index = map(int, group.split("-"))
        return self.position(own_step, index)


@dataclass(frozen=True, order=True)
class SlotId:
    """Sample `sample` of the prompt at place `index` of its own step; `attempt` counts samples refused before it.

    `step` is the prompt's own step, which names it for good; another step may train it.
    """

    step: int
    index: int
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.group_id}-{self.sample:03d}-{self.attempt}"

    @property
    def group_id(self) -> str:
        return group_id(self.step, self.index)

    @classmethod
    def parse(cls, name: str) -> SlotId | None:
        """The slot of this name; None for a rollout outside the stream of steps."""
        is_slot = re.fullmatch(r"\d{6,}-\d{5,}-\d{3,}-\d+", name)
        return cls(*map(int, name.split("-"))) if is_slot else None


def group_id(step: int, index: int) -> str:
    """Name of a group, sortable in stream order."""
    return f"{step:06d}-{index:05d}"


class SlotState(StrEnum):
    WAITING = "waiting"
    INFLIGHT = "inflight"
    GRADING = "grading"
    DONE = "done"


@dataclass
class _Slot[R]:
    """latest: last step that may train what is under way or done here."""

    state: SlotState = SlotState.WAITING
    attempt: int = 0
    latest: int | None = None
    result: R | None = None


@dataclass
class _Group[R]:
    position: int
    slots: list[_Slot[R]]
    deadline: int
    failure: str | None = None

    @property
    def is_complete(self) -> bool:
        return all(slot.state is SlotState.DONE for slot in self.slots)

    @property
    def is_finished(self) -> bool:
        return self.failure is not None or self.is_complete

    @property
    def waiting(self) -> list[int]:
        """Samples that wait to be started."""
        if self.failure is not None:
            return []
        return [sample for sample, slot in enumerate(self.slots) if slot.state is SlotState.WAITING]

    @property
    def done(self) -> int:
        return sum(slot.state is SlotState.DONE for slot in self.slots)


@dataclass(frozen=True)
class Choice[R]:
    """What step `step` takes. groups: (position, results in sample order), failures: (position, reason); by position.

    progress: how far the stream is settled once the step is trained.
    overtaken: places of this and earlier steps that are not settled even then.
    """

    step: int
    groups: Sequence[tuple[int, list[R]]]
    failures: Sequence[tuple[int, str]]
    progress: Progress
    overtaken: Sequence[int]

    @property
    def positions(self) -> list[int]:
        """All places that the step settles."""
        return sorted([position for position, _ in [*self.groups, *self.failures]])


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
class Scheduler[R]:
    """State of all groups that are not settled yet. R is what a finished slot holds (a graded rollout)."""

    shape: Shape
    deadlines: Deadlines = field(default_factory=InOrder)
    progress: Progress = field(default_factory=Progress)
    _groups: dict[int, _Group[R]] = field(default_factory=dict)
    _next_position: int = 0
    _waiting: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _due: Counter[int] = field(default_factory=Counter)
    _has_moved: bool = True  # whether anything that lets a step be chosen has happened since none could be
    _chosen: Choice[R] | None = None
    _taken: list[_Group[R]] = field(default_factory=list)

    @property
    def trained(self) -> int:
        """Last step trained."""
        return self.progress.step

    def begin_after(self, progress: Progress) -> None:
        """Take the stream up where another run has left it; before anything else is asked or told."""
        assert not self._groups, "nothing has begun"
        self.progress = progress

    # -- what may start ------------------------------------------------------------------------------------------

    def take(self, policy_version: int, room: int) -> list[SlotId]:
        """Give a replica of this version up to `room` waiting slots, in stream order, group by group.

        They become INFLIGHT.
        """
        taken: list[SlotId] = []
        for group in self._admissible(policy_version):
            taken += self._start(group, group.waiting[: room - len(taken)], policy_version)
            if len(taken) == room:
                break
        return taken

    def deal(self, replicas: list[str], policy_version: int) -> dict[str, list[SlotId]]:
        """Give all waiting slots at once, group i of a step to replica i mod N: the same split every time."""
        dealt: dict[str, list[SlotId]] = {replica: [] for replica in replicas}
        for group in self._admissible(policy_version) if replicas else ():
            replica = replicas[self.shape.index(group.position) % len(replicas)]
            dealt[replica] += self._start(group, group.waiting, policy_version)
        return dealt

    # -- what happened -------------------------------------------------------------------------------------------

    def sampled(self, slot_id: SlotId) -> bool:
        """A replica finished this sample. False when it is no longer wanted (a duplicate, or its group failed)."""
        found = self._find(slot_id)
        if found is None or found[1].state is not SlotState.INFLIGHT or found[1].attempt != slot_id.attempt:
            return False
        found[1].state = SlotState.GRADING
        return True

    def graded(self, slot_id: SlotId, result: R, oldest_version: int) -> bool:
        """The verifier spoke; the slot is DONE. False when its group has failed meanwhile.

        Raises VersionConflict for a token older than the version that the rollout was started under: whoever takes
        rollouts in has checked that (`Rollout.check`).
        """
        found = self._find(slot_id)
        if found is None or found[1].state is not SlotState.GRADING:
            return False
        group, slot = found
        latest = self._latest(oldest_version)
        if slot.latest is None or latest < slot.latest:
            raise VersionConflict(
                f"{slot_id} must be trainable until step {slot.latest}, got oldest_version={oldest_version}; "
                "this is a bug"
            )
        slot.state, slot.result = SlotState.DONE, result
        if latest != slot.latest:
            slot.latest = latest
            self._note_deadline(group)
        self._note_end(group)
        return True

    def refuse(self, slot_id: SlotId, reason: str) -> None:
        """This sample cannot be trained on (poisoned, ungraded): sample again, or give the group up."""
        found = self._find(slot_id)
        if found is None or found[1].state is SlotState.DONE:
            return
        group, slot = found
        slot.attempt += 1
        if slot.attempt >= MAX_ATTEMPTS:
            self.fail(group.position, reason)
        else:
            self._release(group, slot)

    def requeue(self, slot_ids: Iterable[SlotId]) -> int:
        """These samples were lost with their replica: they wait again, unchanged. Returns how many there were."""
        count = 0
        for slot_id in slot_ids:
            found = self._find(slot_id)
            if found is None or found[1].state is not SlotState.INFLIGHT or found[1].attempt != slot_id.attempt:
                continue
            self._release(*found)
            count += 1
        return count

    def mark_trained(self, step: int) -> int:
        """The chosen step is trained and durable; its groups are forgotten. Raises VersionConflict for another step.

        Returns how many graded rollouts of failed groups are forgotten with it, untrained.
        """
        if self._chosen is None or step != self._chosen.step:
            raise VersionConflict(
                f"steps must be chosen and then trained in order, got step={step} after {self.trained}; this is a bug"
            )
        self._has_moved = True
        self.progress, taken = self._chosen.progress, self._taken
        self._chosen, self._taken = None, []
        return sum(group.done for group in taken if group.failure is not None)

    # -- after a restart -----------------------------------------------------------------------------------------

    def restore(self, slot_id: SlotId, result: R, oldest_version: int) -> bool:
        """Put back a finished slot from the store. False when its group is settled, or not of this run."""
        position = self.shape.position(slot_id.step, slot_id.index)
        if not 0 <= position < self.shape.prompts or self.progress.is_settled(position):
            return False
        group = self._opened(position)
        slot = group.slots[slot_id.sample]
        slot.state, slot.result, slot.attempt = SlotState.DONE, result, slot_id.attempt
        slot.latest = self._latest(oldest_version)
        self._note_deadline(group)
        self._note_start(group)
        self._note_end(group)
        return True

    def resume(self, slot_id: SlotId, policy_version: int) -> bool:
        """A replica has this sample since before the restart, begun under `policy_version`: it is INFLIGHT again.

        False when it is not wanted any more, or may not start under that version: others have begun meanwhile.
        """
        position = self.shape.position(slot_id.step, slot_id.index)
        is_of_this_run = 0 <= position < self.shape.prompts and slot_id.sample < self.shape.group_size
        if not is_of_this_run or self.progress.is_settled(position):
            return False
        self._open_up_to(position)
        found = self._find(slot_id)
        if found is None or slot_id.attempt >= MAX_ATTEMPTS:
            return False
        group, slot = found
        if slot.state is not SlotState.WAITING or slot_id.attempt < slot.attempt:
            return False
        if not self._may_start(position, group.deadline, policy_version):
            return False
        slot.attempt = slot_id.attempt
        self._start(group, [slot_id.sample], policy_version)
        return True

    def fail(self, position: int, reason: str) -> None:
        """Give a group up: the step that takes it reports it as failed. Nothing happens once it is settled."""
        if not self.progress.is_settled(position):
            self._opened(position).failure = reason
            self._waiting.discard(position)
            self._finished.add(position)
            self._has_moved = True

    def has_kept_deadlines(self) -> bool:
        """Whether every group that has begun can still be trained in time: always so, by construction."""
        return self._fits(self._due, self._first_open)

    # -- what can train ------------------------------------------------------------------------------------------

    def choose(self) -> Choice[R] | None:
        """Choose what the next step trains; None while it has to wait. The same answer until the step is trained."""
        if self._chosen is not None or not self._has_moved:
            return self._chosen
        step = self._first_open
        self._open_up_to(min(step * self.shape.prompts_per_step, self.shape.prompts) - 1)
        finished = sorted(
            (self._groups[position] for position in self._finished), key=lambda group: (group.deadline, group.position)
        )
        taken = finished[: self.shape.prompts_per_step]
        left = self._due - Counter(group.deadline for group in taken)
        if len(taken) < self.shape.prompts_per_step or not self._fits(left, step + 1):
            self._has_moved = False  # nothing but a finished group or another deadline lets it be chosen
            return None
        return self._choose(step, taken)

    def choose_again(self, positions: Iterable[int]) -> Choice[R]:
        """Choose what the stored batch of the next step has taken, before a restart."""
        taken = [self._opened(position) for position in positions]
        for group in taken:
            if not group.is_finished:  # only a failed group can be in a batch without its rollouts
                self.fail(group.position, "it failed before the coordinator was started again")
        return self._choose(self._first_open, taken)

    def occupancy(self) -> Occupancy:
        """Numbers for the status page."""
        step = min(self._first_open, self.shape.steps)
        size, wanted = self.shape.group_size, self.shape.prompts_per_step
        groups = [(group, group.done) for group in self._groups.values()]
        taken = [group.done for group in self._taken]
        nearest = nsmallest(wanted, groups, key=lambda it: (it[0].deadline > step, -it[1], it[0].position))
        is_over = self._first_open > self.shape.steps
        return Occupancy(
            step=step,
            done=0 if is_over else sum(done for _, done in nearest),
            wanted=0 if is_over else wanted * size,
            groups_in_flight=sum(
                done < size and any(slot.state is not SlotState.WAITING for slot in group.slots)
                for group, done in groups
            ),
            groups_buffered=sum(done == size for _, done in groups) + taken.count(size),
            held=sum(done for _, done in groups) + sum(taken),
        )

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _first_open(self) -> int:
        """The first step whose batch is not chosen yet."""
        return self.trained + 1 + (self._chosen is not None)

    def _latest(self, oldest_version: int) -> int:
        """Last step that may train a rollout whose oldest token has this version."""
        return oldest_version + 1 + self.shape.max_policy_lag

    def _admissible(self, policy_version: int) -> Iterator[_Group[R]]:
        """Groups with waiting slots that may be filled under this version, in stream order; new ones are begun last."""
        for position in sorted(self._waiting):
            group = self._groups[position]
            if self._may_start(position, group.deadline, policy_version):
                yield group
        while self._next_position < self.shape.prompts:
            position = self._next_position
            if not self.progress.is_settled(position):
                if not self._may_start(position, self._deadline(position, ()), policy_version):
                    return
                yield self._opened(position)
            self._next_position = max(self._next_position, position + 1)

    def _may_start(self, position: int, deadline: int, policy_version: int) -> bool:
        """Whether a rollout of a group with this deadline may start: it stays trainable, and no step is overbooked."""
        latest = self._latest(policy_version)
        moved = self._deadline(position, (deadline, latest))
        if moved == deadline:
            return deadline <= latest
        return moved <= latest and self._fits(self._due - Counter((deadline,)) + Counter((moved,)), self._first_open)

    def _fits(self, due: Counter[int], first: int) -> bool:
        """Whether groups with these deadlines can all be trained in time, P a step from step `first` on."""
        count = 0
        for deadline in sorted(due):
            count += due[deadline]
            if deadline != NEVER and count > self.shape.prompts_per_step * (deadline - first + 1):
                return False
        return True

    def _deadline(self, position: int, latest: Iterable[int]) -> int:
        return self.deadlines.of(self.shape.own_step(position), latest)

    def _opened(self, position: int) -> _Group[R]:
        """The group at an unsettled place."""
        self._open_up_to(position)
        return self._groups[position]

    def _open_up_to(self, position: int) -> None:
        """Make the groups of unsettled places up to this one, where they are new."""
        while self._next_position <= position:
            new = self._next_position
            self._next_position += 1
            if not self.progress.is_settled(new) and new not in self._groups:
                slots: list[_Slot[R]] = [_Slot() for _ in range(self.shape.group_size)]
                self._groups[new] = _Group(new, slots, self._deadline(new, ()))
                self._due[self._groups[new].deadline] += 1
                self._waiting.add(new)

    def _start(self, group: _Group[R], samples: list[int], policy_version: int) -> list[SlotId]:
        latest = self._latest(policy_version)
        for sample in samples:
            slot = group.slots[sample]
            slot.state, slot.latest = SlotState.INFLIGHT, latest
        self._note_deadline(group)
        self._note_start(group)
        step, index = self.shape.own_step(group.position), self.shape.index(group.position)
        return [SlotId(step, index, sample, group.slots[sample].attempt) for sample in samples]

    def _release(self, group: _Group[R], slot: _Slot[R]) -> None:
        slot.state, slot.latest = SlotState.WAITING, None
        self._note_deadline(group)
        self._waiting.add(group.position)

    def _note_deadline(self, group: _Group[R]) -> None:
        """Something started or was lost: the group's oldest rollout may be another one now."""
        deadline = self._deadline(group.position, [slot.latest for slot in group.slots if slot.latest is not None])
        if deadline != group.deadline:
            self._due -= Counter((group.deadline,))  # which also drops what became zero
            self._due[deadline] += 1
            group.deadline, self._has_moved = deadline, True

    def _note_start(self, group: _Group[R]) -> None:
        if not group.waiting:
            self._waiting.discard(group.position)

    def _note_end(self, group: _Group[R]) -> None:
        if group.is_finished:
            self._finished.add(group.position)
            self._has_moved = True

    def _choose(self, step: int, taken: list[_Group[R]]) -> Choice[R]:
        taken = sorted(taken, key=lambda group: group.position)
        progress = self.progress.after(group.position for group in taken)
        own = min(step * self.shape.prompts_per_step, self.shape.prompts)
        self._chosen = Choice(
            step=step,
            groups=[
                (group.position, [slot.result for slot in group.slots if slot.result is not None])
                for group in taken
                if group.failure is None
            ],
            failures=[(group.position, group.failure) for group in taken if group.failure is not None],
            progress=progress,
            overtaken=[position for position in range(progress.cursor, own) if not progress.is_settled(position)],
        )
        for group in taken:
            del self._groups[group.position]
            self._due -= Counter((group.deadline,))
            self._waiting.discard(group.position)
            self._finished.discard(group.position)
        self._taken = taken
        return self._chosen

    def _find(self, slot_id: SlotId) -> tuple[_Group[R], _Slot[R]] | None:
        """The slot with its group, unless that is chosen or settled already, or failed."""
        group = self._groups.get(self.shape.position(slot_id.step, slot_id.index))
        return None if group is None or group.failure is not None else (group, group.slots[slot_id.sample])
