"""Decides which rollouts may start and what the next step trains. Keeps the policy lag bounded.

Terms. A group is one prompt with its G rollouts. A slot is one rollout of a group. The position of a group is the
index of its prompt in the prompt stream, from 0. A group is settled once its step is trained.

Position decides the step: step s trains the P groups at positions (s - 1) P to s P - 1.

States of a slot:

    WAITING --take_slots--> INFLIGHT --mark_sampled--> GRADING --mark_graded--> DONE
       ^                       |                          |
       +------- requeue -------+------ refuse_sample -----+

`requeue` follows the loss of a replica: the slot is sampled again with the same seed. `refuse_sample` follows a rollout
that cannot be trained on: the slot is sampled again with the seed of its next attempt.

States of a group:

    waiting --first rollout starts--> begun --> finished --all P of its step are--> chosen --step is trained--> settled

A group is finished when its G slots are DONE, or when it has failed. It fails when one slot is refused `MAX_ATTEMPTS`
times; lost replicas do not count.

Lag bound. A rollout of step d starts under policy version v only if d <= v + 1 + L, with L = maxPolicyLag. Its oldest
token then has a version >= v, so step d trains it with a lag of at most d - 1 - v <= L. Hence no rollout ever becomes
too old for its step, and none is dropped for its age.

No deadlock. Under the newest version v the next step is v + 1, and the rule always admits its groups. So every step
gets its P finished groups, as long as some replica serves the newest version and its rollouts end.

Cost. `choose_groups` is called after every graded rollout, with up to 100,000 rollouts in flight. It therefore reads
one counter: the finished groups of the next step.

Pure: no clock, no I/O, no concurrency. `rollouts/pipeline.py` calls it from one event loop, `restart.py` rebuilds it
after a restart, and the simulator runs on it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from specrl.errors import VersionConflict

MAX_ATTEMPTS = 5
"""Samples of one slot, each with a seed of its own, before its group fails. Bounds the cost of a broken prompt."""


@dataclass(frozen=True)
class ScheduleShape:
    """The constants of a run: steps, prompts per step (P), group size (G), maxPolicyLag (L)."""

    steps: int
    prompts_per_step: int
    group_size: int
    max_policy_lag: int

    @property
    def prompt_count(self) -> int:
        """How many prompts the run settles."""
        return self.steps * self.prompts_per_step

    def step_of(self, position: int) -> int:
        """Return the step, from 1, that trains the prompt at this position."""
        return position // self.prompts_per_step + 1

    def index_of(self, position: int) -> int:
        """Return the index of a position within its step, from 0 to P - 1."""
        return position % self.prompts_per_step

    def position_at(self, step: int, index: int) -> int:
        """Return the position that has this index within this step."""
        return (step - 1) * self.prompts_per_step + index

    def positions_of_step(self, step: int) -> range:
        """Return the P positions that a step trains."""
        return range(self.position_at(step, 0), self.position_at(step + 1, 0))

    def group_id_at(self, position: int) -> str:
        """Return the id of the group at a position."""
        return format_group_id(self.step_of(position), self.index_of(position))

    def position_of_group(self, group: str) -> int:
        """Return the position of the group with this id."""
        step, index = map(int, group.split("-"))
        return self.position_at(step, index)


@dataclass(frozen=True, order=True)
class SlotId:
    """Identifies one rollout: sample `sample`, from 0 to G - 1, of group `index` of step `step`.

    attempt: how many samples of this slot were refused before. It is part of the seed. Sorts in stream order.
    """

    step: int
    index: int
    sample: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.group_id}-{self.sample:03d}-{self.attempt}"

    @property
    def group_id(self) -> str:
        return format_group_id(self.step, self.index)

    @classmethod
    def from_name(cls, name: str) -> SlotId | None:
        """Parse a rollout id. Returns None for a rollout of no step: validation, canary, drafter initialisation."""
        is_slot = re.fullmatch(r"\d{6,}-\d{5,}-\d{3,}-\d+", name)
        return cls(*map(int, name.split("-"))) if is_slot else None


def format_group_id(step: int, index: int) -> str:
    """Format the id of a group. Ids sort in stream order."""
    return f"{step:06d}-{index:05d}"


class SlotState(StrEnum):
    WAITING = "waiting"
    INFLIGHT = "inflight"
    GRADING = "grading"
    DONE = "done"


@dataclass
class _Slot[R]:
    """oldest_version: policy version that the rollout started under; once it is DONE, version of its oldest token."""

    state: SlotState = SlotState.WAITING
    attempt: int = 0
    oldest_version: int = 0
    result: R | None = None


@dataclass
class _Group[R]:
    position: int
    slots: list[_Slot[R]]
    failure: str | None = None

    @property
    def is_complete(self) -> bool:
        return all(slot.state is SlotState.DONE for slot in self.slots)

    @property
    def has_begun(self) -> bool:
        return any(slot.state is not SlotState.WAITING for slot in self.slots)

    @property
    def waiting_samples(self) -> list[int]:
        """Indexes of the samples that may be started."""
        if self.failure is not None:
            return []  # a failed group is not trained, so none of its slots is sampled again
        return [sample for sample, slot in enumerate(self.slots) if slot.state is SlotState.WAITING]

    @property
    def done_count(self) -> int:
        return self.count_slots(SlotState.DONE)

    def count_slots(self, state: SlotState) -> int:
        return sum(slot.state is state for slot in self.slots)


@dataclass(frozen=True)
class StepChoice[R]:
    """What one step trains and what it gives up, in stream order.

    groups: trained ones, as (position, results in sample order). failures: failed groups, as (position, reason).
    """

    step: int
    groups: Sequence[tuple[int, list[R]]]
    failures: Sequence[tuple[int, str]]


@dataclass(frozen=True)
class ScheduleOccupancy:
    """Progress of the next step, and the amount of open work in total."""

    step: int
    """The first step that is not chosen yet; the last step of the run once all are."""
    done: int
    """Graded rollouts of that step."""
    grading: int
    """Rollouts of that step that are sampled and not graded yet."""
    wanted: int
    """Rollouts that it needs: P G, or 0 once all steps are chosen."""
    groups_in_flight: int
    """Groups that have begun and have slots that are not DONE."""
    groups_buffered: int
    """Groups with all slots DONE that are not trained yet."""
    held: int
    """Graded rollouts of untrained steps, including those of failed groups."""


@dataclass
class Scheduler[R]:
    """Holds the state of all groups that are not settled. R is the result of a slot: a graded rollout.

    trained: the last trained step, 0 before the first. Groups up to this step are settled.
    """

    shape: ScheduleShape
    trained: int = 0
    _groups: dict[int, _Group[R]] = field(default_factory=dict)
    """Open groups by position. A group is opened when it, or a later one, is first needed; removed when chosen."""
    _next_position: int = field(init=False)
    """The first position whose group is not open yet. Groups are opened in stream order."""
    _waiting: set[int] = field(default_factory=set)
    """Positions of the open groups that have waiting slots. Saves `_admissible_groups` from scanning all groups."""
    _finished: Counter[int] = field(default_factory=Counter)
    """Finished open groups by step. The one counter that `choose_groups` reads."""
    _chosen: StepChoice[R] | None = None
    """The choice for step `trained + 1`, from `choose_groups` until `mark_trained`."""
    _taken: list[_Group[R]] = field(default_factory=list)
    """The groups of `_chosen`, kept for the numbers of `measure_occupancy` and `mark_trained`."""

    def __post_init__(self) -> None:
        self._next_position = self.shape.position_at(self.trained + 1, 0)

    def begin_after(self, step: int) -> None:
        """Continue after a step that was trained with another store. Must be the first call on this scheduler."""
        assert not self._groups, "no group may be open"
        self.trained = step
        self._next_position = self.shape.position_at(step + 1, 0)

    # -- starting rollouts ---------------------------------------------------------------------------------------

    def take_slots(self, policy_version: int, room: int) -> list[SlotId]:
        """Start up to `room` waiting slots under this policy version, in stream order, group by group.

        Returns the slots, which are now INFLIGHT. Fewer, or none, if the lag bound admits no more.
        """
        taken: list[SlotId] = []
        for group in self._admissible_groups(policy_version):
            taken += self._start_samples(group, group.waiting_samples[: room - len(taken)], policy_version)
            if len(taken) == room:
                break
        return taken

    def assign_all_slots(self, replicas: list[str], policy_version: int) -> dict[str, list[SlotId]]:
        """Start all admissible slots at once, those of group i of a step at replica i mod N. Returns them by replica.

        The split depends on the replicas and the step alone, so a synchronous run repeats bit by bit.
        """
        assigned: dict[str, list[SlotId]] = {replica: [] for replica in replicas}
        for group in self._admissible_groups(policy_version) if replicas else ():
            replica = replicas[self.shape.index_of(group.position) % len(replicas)]
            assigned[replica] += self._start_samples(group, group.waiting_samples, policy_version)
        return assigned

    # -- rollouts that ended -------------------------------------------------------------------------------------

    def mark_sampled(self, slot_id: SlotId) -> bool:
        """Note that a replica finished this sample: the slot is GRADING.

        Returns False if the sample is no longer needed: it is a duplicate, an old attempt, or its group failed.
        """
        found = self._find_inflight_slot(slot_id)
        if found is None:
            return False
        _, slot = found
        slot.state = SlotState.GRADING
        return True

    def mark_graded(self, slot_id: SlotId, result: R, oldest_version: int) -> bool:
        """Note that the verifier graded this sample: the slot is DONE.

        oldest_version: policy version of its oldest token. Returns False if its group has failed meanwhile. Raises
        VersionConflict for a token older than the version that the rollout started under. That is a bug: the caller
        must check the versions first (`Rollout.check`).
        """
        found = self._find_slot(slot_id)
        if found is None or found[1].state is not SlotState.GRADING:
            return False
        group, slot = found
        if oldest_version < slot.oldest_version:
            raise VersionConflict(
                f"{slot_id} must have no token older than version {slot.oldest_version}, which it was started under, "
                f"got oldest_version={oldest_version}; this is a bug"
            )
        self._complete_slot(group, slot, result, oldest_version)
        return True

    def refuse_sample(self, slot_id: SlotId, reason: str) -> None:
        """Note that this sample cannot be trained on: it is malformed, or the verifier could not grade it.

        The slot waits again under its next attempt. After MAX_ATTEMPTS its group fails with this reason.
        """
        found = self._find_slot(slot_id)
        if found is None or found[1].state is SlotState.DONE:
            return
        group, slot = found
        slot.attempt += 1  # part of the seed: the same seed would give the same rollout again
        if slot.attempt >= MAX_ATTEMPTS:
            self.fail_group(group.position, reason)
        else:
            self._release_slot(group, slot)

    def requeue(self, slot_ids: Iterable[SlotId]) -> int:
        """Let samples that were lost with their replica wait again, under the same attempt. Returns how many do.

        Samples that are no longer INFLIGHT are left alone.
        """
        count = 0
        for slot_id in slot_ids:
            found = self._find_inflight_slot(slot_id)
            if found is not None:
                self._release_slot(*found)
                count += 1
        return count

    def mark_trained(self, step: int) -> int:
        """Settle the chosen step, which is trained and durable, and forget its groups.

        Returns how many graded rollouts of failed groups are forgotten with it. Raises VersionConflict if another step
        was chosen, or none.
        """
        if self._chosen is None or step != self._chosen.step:
            raise VersionConflict(
                f"steps must be chosen and then trained in order, got step={step} after {self.trained}; this is a bug"
            )
        # The pipeline's balance of graded rollouts needs this number: these leave without being trained or left out.
        untrained = sum(group.done_count for group in self._taken if group.failure is not None)
        self.trained = step
        self._chosen = None
        self._taken = []
        return untrained

    # -- after a restart -----------------------------------------------------------------------------------------

    def restore_slot(self, slot_id: SlotId, result: R, oldest_version: int) -> bool:
        """Put back a graded rollout from the store: its slot is DONE. Returns False if the run no longer needs it.

        Raises VersionConflict if training it would break the lag bound, as after a change of maxPolicyLag.
        """
        if not self._is_slot_open(slot_id):
            return False
        if slot_id.step > self._newest_admissible_step(oldest_version):
            raise VersionConflict(
                f"{slot_id} must have tokens of at most maxPolicyLag={self.shape.max_policy_lag} versions before "
                f"{slot_id.step - 1}, got oldest_version={oldest_version}"
            )
        group = self._open_group(slot_id)
        slot = group.slots[slot_id.sample]
        slot.attempt = slot_id.attempt
        self._complete_slot(group, slot, result, oldest_version)
        self._drop_if_started(group)
        return True

    def resume_slot(self, slot_id: SlotId, policy_version: int) -> bool:
        """Mark a sample INFLIGHT that a replica still has from before the coordinator's restart.

        policy_version: what the sample was started under. Returns False if it is no longer needed, or if the lag bound
        does not admit it.
        """
        may_start = slot_id.step <= self._newest_admissible_step(policy_version)
        if not may_start or not self._is_slot_open(slot_id) or slot_id.attempt >= MAX_ATTEMPTS:
            return False
        group = self._open_group(slot_id)
        slot = group.slots[slot_id.sample]
        if group.failure is not None or slot.state is not SlotState.WAITING or slot_id.attempt < slot.attempt:
            return False  # failed, or given to another replica since, or refused since
        slot.attempt = slot_id.attempt
        self._start_samples(group, [slot_id.sample], policy_version)
        return True

    def fail_group(self, position: int, reason: str) -> None:
        """Give up a group: its step reports it as failed. Does nothing once the step is chosen."""
        step = self.shape.step_of(position)
        if step < self._first_open_step:
            return
        group = self._open_group(SlotId(step, self.shape.index_of(position), 0))
        if group.failure is None and not group.is_complete:  # else it is counted already
            self._finished[step] += 1
        group.failure = reason
        self._waiting.discard(position)

    # -- choosing a step -----------------------------------------------------------------------------------------

    def choose_groups(self) -> StepChoice[R] | None:
        """Choose what the next step trains. Returns None until all P groups of that step are finished.

        Idempotent: returns the same choice until the step is marked as trained.
        """
        if self._chosen is None and self._finished[self._first_open_step] == self.shape.prompts_per_step:
            self._chosen = self._build_choice(self._first_open_step)
        return self._chosen

    def measure_occupancy(self) -> ScheduleOccupancy:
        """Count open work for the status. Visits every open group, so it is not for the hot path."""
        step = min(self._first_open_step, self.shape.steps)
        size = self.shape.group_size
        is_over = self._first_open_step > self.shape.steps
        done = [(group, group.done_count) for group in self._groups.values()]
        taken = [group.done_count for group in self._taken]
        of_step = [group for group in self._groups.values() if self.shape.step_of(group.position) == step]
        return ScheduleOccupancy(
            step=step,
            done=sum(group.done_count for group in of_step),
            grading=sum(group.count_slots(SlotState.GRADING) for group in of_step if group.failure is None),
            wanted=0 if is_over else self.shape.prompts_per_step * size,
            groups_in_flight=sum(count < size and group.has_begun for group, count in done),
            groups_buffered=sum(count == size for _, count in done) + taken.count(size),
            held=sum(count for _, count in done) + sum(taken),
        )

    # -- internals -----------------------------------------------------------------------------------------------

    @property
    def _first_open_step(self) -> int:
        """The first step that is not chosen yet."""
        return self.trained + 1 + (self._chosen is not None)

    def _newest_admissible_step(self, oldest_version: int) -> int:
        """Return the last step that may train a rollout whose oldest token has this version. This is the lag bound."""
        return oldest_version + 1 + self.shape.max_policy_lag

    def _is_slot_open(self, slot_id: SlotId) -> bool:
        """Whether the run has this slot and its step is not chosen. After a change of the run file it may not have."""
        is_of_this_run = slot_id.index < self.shape.prompts_per_step and slot_id.sample < self.shape.group_size
        return is_of_this_run and self._first_open_step <= slot_id.step <= self.shape.steps

    def _admissible_groups(self, policy_version: int) -> Iterator[_Group[R]]:
        """Yield groups whose waiting slots may start under this version, in stream order. Opens new groups last."""
        end = min(self.shape.position_at(self._newest_admissible_step(policy_version) + 1, 0), self.shape.prompt_count)
        for position in sorted(self._waiting):  # a copy: the caller starts slots, which changes the set
            if position < end:
                yield self._groups[position]
        while self._next_position < end:
            yield self._open_next_group()

    def _open_group(self, slot_id: SlotId) -> _Group[R]:
        """Return the group of a slot for which `_is_slot_open` holds. Opens it, and all before it, if necessary."""
        position = self.shape.position_at(slot_id.step, slot_id.index)
        while self._next_position <= position:
            self._open_next_group()
        return self._groups[position]

    def _open_next_group(self) -> _Group[R]:
        position = self._next_position
        self._next_position += 1
        self._waiting.add(position)
        group = self._groups[position] = _Group(position, [_Slot() for _ in range(self.shape.group_size)])
        return group

    def _start_samples(self, group: _Group[R], samples: list[int], policy_version: int) -> list[SlotId]:
        for sample in samples:
            slot = group.slots[sample]
            slot.state = SlotState.INFLIGHT
            slot.oldest_version = policy_version  # a lower bound; its first token may come after an update
        self._drop_if_started(group)
        step = self.shape.step_of(group.position)
        index = self.shape.index_of(group.position)
        return [SlotId(step, index, sample, group.slots[sample].attempt) for sample in samples]

    def _drop_if_started(self, group: _Group[R]) -> None:
        if not group.waiting_samples:
            self._waiting.discard(group.position)

    def _release_slot(self, group: _Group[R], slot: _Slot[R]) -> None:
        slot.state = SlotState.WAITING
        self._waiting.add(group.position)

    def _complete_slot(self, group: _Group[R], slot: _Slot[R], result: R, oldest_version: int) -> None:
        slot.state = SlotState.DONE
        slot.result = result
        slot.oldest_version = oldest_version
        if group.is_complete and group.failure is None:
            self._finished[self.shape.step_of(group.position)] += 1

    def _build_choice(self, step: int) -> StepChoice[R]:
        self._taken = [self._groups.pop(position) for position in self.shape.positions_of_step(step)]
        del self._finished[step]
        return StepChoice(
            step=step,
            groups=[
                (group.position, [slot.result for slot in group.slots if slot.result is not None])
                for group in self._taken
                if group.failure is None
            ],
            failures=[(group.position, group.failure) for group in self._taken if group.failure is not None],
        )

    def _find_inflight_slot(self, slot_id: SlotId) -> tuple[_Group[R], _Slot[R]] | None:
        """Return the slot with its group; None if this sample of it is not, or no longer, INFLIGHT.

        A slot that is requeued may be sampled twice, by the replica that seemed lost and by another one. The first
        result counts. The second finds the slot no longer INFLIGHT, or at a later attempt.
        """
        found = self._find_slot(slot_id)
        if found is None or found[1].state is not SlotState.INFLIGHT or found[1].attempt != slot_id.attempt:
            return None
        return found

    def _find_slot(self, slot_id: SlotId) -> tuple[_Group[R], _Slot[R]] | None:
        """Return the slot with its group; None if the group is not open or has failed."""
        group = self._groups.get(self.shape.position_at(slot_id.step, slot_id.index))
        return None if group is None or group.failure is not None else (group, group.slots[slot_id.sample])
