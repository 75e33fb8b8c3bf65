"""A model of everything around the scheduler: replicas, trainer, store, and a coordinator that may die.

`World` drives one scheduler, and checks the promises of a run at every event:

    (a) no trained rollout has a token older than version step - 1 - maxPolicyLag
    (b) every prompt is either trained once or reported as failed; a step has one batch, which never changes
    (c) no rollout is dropped for its age or its length: a graded rollout is never sampled again, and is trained with
        its group
    (d) no deadlock: from any state, replicas that serve the newest version lead to the end of the run

`AnyRun` lets hypothesis choose the events. A restart keeps only `Durable`, which is what the store keeps. The product's
`rebuild_schedule` then rebuilds the schedule from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specrl.coordinator.schedule.restart import FinishedSlot, rebuild_schedule
from specrl.coordinator.schedule.scheduler import MAX_ATTEMPTS, Scheduler, ScheduleShape, SlotId, StepChoice

REPLICAS = ("a", "b", "c")


def settled_positions(choice: StepChoice[Any]) -> list[int]:
    """The positions that a step trains or gives up, sorted."""
    return sorted(position for position, _ in [*choice.groups, *choice.failures])


@dataclass(frozen=True)
class Sample:
    """A graded rollout: its position and sample index, the version of its oldest token, its length."""

    position: int
    sample: int
    oldest_version: int
    length: int


@dataclass
class Replica:
    """version: None from its registration to its first update."""

    version: int | None = None
    is_paused: bool = False


@dataclass
class Job:
    """A rollout in progress. versions: of its tokens so far, and of the next one."""

    slot: SlotId
    replica: str
    versions: list[int]


@dataclass
class Durable:
    """What the store keeps. trained: the last trained step."""

    trained: int = 0
    rollouts: dict[tuple[int, int], FinishedSlot[Sample]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    batches: dict[int, StepChoice[Sample]] = field(default_factory=dict)


class World:
    """One run. kind: class of the scheduler, which may be a mutant."""

    def __init__(self, shape: ScheduleShape, kind: type[Scheduler[Sample]]) -> None:
        self.shape = shape
        self.kind = kind
        self.durable = Durable()
        self.replicas: dict[str, Replica] = {}
        self.graded: dict[tuple[int, int], Sample] = {}
        self.trained: dict[int, int] = {}
        self.trainer_version = 0
        self.jobs: list[Job] = []
        self.start_coordinator()

    # -- the coordinator -----------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Start a coordinator that knows only what is durable. Replicas must register and be updated again.

        They still have their unfinished rollouts.
        """
        self.held = self.jobs
        self.jobs = []
        self.grading: list[tuple[SlotId, Sample]] = []
        self.stage = "collecting"
        self.replicas = {name: Replica() for name in self.replicas}
        self.scheduler = self.kind(self.shape, self.durable.trained)
        stored = list(self.durable.rollouts.values())
        expected = [item for item in stored if item.slot.step > self.durable.trained]
        assert rebuild_schedule(self.scheduler, stored, self.durable.failures) == len(expected), (
            "every stored rollout of an untrained step is restored"
        )

    def choose(self, *, dies_before_the_batch: bool = False) -> bool:
        """Choose the next step and store its batch. Returns False while it has to wait."""
        choice = self.scheduler.choose_groups()
        if choice is None:
            return False
        assert choice.step == self.durable.trained + 1, "steps are chosen in order"
        assert settled_positions(choice) == list(self.shape.positions_of_step(choice.step)), (
            "a step takes its own prompts, each once"
        )
        self.durable.failures |= dict(choice.failures)
        if dies_before_the_batch:
            self.start_coordinator()
            return True
        first = self.durable.batches.setdefault(choice.step, choice)
        assert (settled_positions(first), list(first.groups)) == (settled_positions(choice), list(choice.groups)), (
            "two batches of a step"
        )
        assert self.scheduler.choose_groups() is choice, "a step is chosen once"
        self.stage = "stored"
        return True

    def train(self) -> None:
        """Train the step, unless the trainer has done so. The coordinator has not recorded it yet."""
        choice = self.durable.batches[self.durable.trained + 1]
        if self.trainer_version < choice.step:
            self.trainer_version = choice.step
            for position, results in choice.groups:
                self._check_group(choice.step, position, results)
                self.trained[position] = choice.step
        self.stage = "trained"

    def _check_group(self, step: int, position: int, results: list[Sample]) -> None:
        assert position not in self.trained, f"prompt {position} is trained twice"
        assert position not in self.durable.failures, f"prompt {position} was reported as failed"
        assert [item.sample for item in results] == list(range(self.shape.group_size)), "a group is trained whole"
        for item in results:
            assert item == self.graded[position, item.sample], "what was graded is what is trained"
            assert 0 <= step - 1 - item.oldest_version <= self.shape.max_policy_lag, f"lag of {item} at step {step}"

    def finish_step(self) -> None:
        """Record the step as trained; in the same transaction the store forgets its rollouts."""
        choice = self.durable.batches[self.durable.trained + 1]
        self.durable.trained = choice.step
        for position, sample in list(self.durable.rollouts):
            if self.shape.step_of(position) <= choice.step:
                del self.durable.rollouts[position, sample]
        self.scheduler.mark_trained(choice.step)
        assert self.scheduler.trained == self.durable.trained, "the scheduler settles what the store has as trained"
        self.stage = "collecting"

    # -- replicas ------------------------------------------------------------------------------------------------

    def update(self, name: str) -> None:
        """Update a replica in flight: its rollouts continue under the trainer's version."""
        self.replicas[name].version = self.trainer_version
        for job in [*self.jobs, *self.held]:
            if job.replica == name and job.versions[-1] != self.trainer_version:
                job.versions.append(self.trainer_version)

    def resume(self, name: str) -> int:
        """Register the rollouts that a replica holds from before the restart. Returns how many are resumed."""
        mine = [job for job in self.held if job.replica == name]
        self.held = [job for job in self.held if job.replica != name]
        resumed = [job for job in mine if self.scheduler.resume_slot(job.slot, job.versions[0])]
        for job in resumed:
            assert not any(other.slot == job.slot for other in self.jobs), f"{job.slot} is under way twice"
            assert not self.scheduler.resume_slot(job.slot, job.versions[0]), "a rollout is resumed only once"
        self.jobs += resumed
        return len(resumed)

    def lose(self, name: str) -> None:
        """Lose a replica. Rollouts that it still sends are refused."""
        del self.replicas[name]
        self.held = [job for job in self.held if job.replica != name]
        lost = [job for job in self.jobs if job.replica == name]
        self.jobs = [job for job in self.jobs if job.replica != name]
        self.scheduler.requeue([job.slot for job in lost])
        for job in lost:
            assert not self.scheduler.mark_sampled(job.slot), "a late duplicate was accepted"

    def take(self, name: str, room: int) -> int:
        """Give a replica slots. Returns how many."""
        replica = self.replicas[name]
        if replica.version is None or replica.is_paused:
            return 0
        slots = self.scheduler.take_slots(replica.version, room)
        assert len(slots) <= room, "a replica got more slots than it has room for"
        for slot in slots:
            assert not any(job.slot == slot for job in self.jobs), f"{slot} is under way twice"
            self.jobs.append(Job(slot, name, [replica.version]))
        return len(slots)

    def sample(self, job: Job, length: int) -> None:
        """End a rollout, which then waits for the verifier. Its oldest token may be newer than its start."""
        if self.replicas[job.replica].is_paused:
            return
        self.jobs.remove(job)
        if self.scheduler.mark_sampled(job.slot):
            assert not self.scheduler.mark_sampled(job.slot), "a rollout was accepted twice"
            position = self.shape.position_at(job.slot.step, job.slot.index)
            self.grading.append((job.slot, Sample(position, job.slot.sample, min(job.versions), length)))

    def grade(self, place: int) -> None:
        """Grade a rollout: first it is stored, then the scheduler counts it."""
        slot, item = self.grading.pop(place)
        key = (item.position, item.sample)
        assert key not in self.graded, f"{slot} was graded before: a finished rollout was dropped"
        self.graded[key] = item
        self.durable.rollouts[key] = FinishedSlot(slot, item, item.oldest_version)
        self.scheduler.mark_graded(slot, item, item.oldest_version)

    def refuse(self, place: int) -> None:
        """Refuse a rollout: the verifier hangs, or the rollout is malformed."""
        slot, _ = self.grading.pop(place)
        self.scheduler.refuse_sample(slot, "refused")

    def fail_prompt(self, name: str) -> None:
        """Refuse every attempt of the next slot that this replica is given, until its group fails."""
        if self.take(name, 1):
            slot = self.jobs[-1].slot
            for _ in range(MAX_ATTEMPTS):
                job = next((job for job in self.jobs if job.slot == slot), None)
                if job is None or self.replicas[job.replica].is_paused:
                    return
                self.sample(job, 1)
                if self.grading and self.grading[-1][0] == slot:
                    self.refuse(len(self.grading) - 1)
                self.take(name, 1)
                slot = SlotId(slot.step, slot.index, slot.sample, slot.attempt + 1)

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Run to the end without further faults, then check that every prompt and rollout is accounted for."""
        while self.durable.trained < self.shape.steps:
            self.go_on()
        everything = set(range(self.shape.prompt_count))
        failed = {position for position in self.durable.failures if position not in self.trained}
        assert set(self.trained) | failed == everything, "a prompt was lost"
        assert not set(self.trained) & set(self.durable.failures), "a prompt was trained and reported as failed"
        trained = [item for choice in self.durable.batches.values() for _, group in choice.groups for item in group]
        generated = [item for item in self.graded.values() if item.position not in failed]
        lengths = (sorted(item.length for item in trained), sorted(item.length for item in generated))
        assert lengths[0] == lengths[1], "lengths trained differ from those generated"
        assert not self.durable.rollouts, "the store keeps rollouts of trained steps"

    def go_on(self, stragglers: int = 0, room: int = 10_000) -> None:
        """Run one round in which every part makes progress; fail if none can.

        stragglers: how many rollouts, the first of the stream, do not end. room: most slots that a replica is given.
        """
        if self.stage == "stored":
            self.train()
        if self.stage == "trained":
            self.finish_step()
            return
        self.replicas.setdefault("a", Replica())
        for name, replica in self.replicas.items():
            replica.is_paused = False
            self.update(name)
        if self.choose():
            return
        taken = self.take("a", room)
        assert taken or self.jobs or self.grading, "deadlock: nothing can start, nothing is under way, no step is ready"
        for job in sorted(self.jobs, key=lambda job: job.slot)[stragglers:]:
            self.sample(job, 7)
        while self.grading:
            self.grade(0)


class AnyRun(RuleBasedStateMachine):
    """Any mix of latencies, failures, scaling, updates in flight, pauses and restarts. Subclasses set `kind`."""

    kind: type[Scheduler[Sample]] = Scheduler

    @initialize(
        lag=st.integers(0, 3),
        steps=st.integers(2, 6),
        prompts=st.integers(1, 3),
        group=st.integers(2, 3),
    )
    def begin(self, lag: int, steps: int, prompts: int, group: int) -> None:
        self.world = World(ScheduleShape(steps, prompts, group, lag), self.kind)
        for name in REPLICAS[:2]:
            self.world.replicas[name] = Replica()
            self.world.update(name)

    def is_stage(self, *stages: str) -> bool:
        return self.world.stage in stages and self.world.durable.trained < self.world.shape.steps

    def some_replica(self, place: int) -> str:
        return sorted(self.world.replicas)[place % len(self.world.replicas)]

    @precondition(lambda self: self.world.replicas)
    @rule(place=st.integers(0, 2), room=st.integers(1, 12))
    def take(self, place: int, room: int) -> None:
        self.world.take(self.some_replica(place), room)

    @precondition(lambda self: self.world.jobs)
    @rule(places=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), min_size=1, max_size=8))
    def sample_and_grade(self, places: list[tuple[int, int]]) -> None:
        for place, length in places:
            if self.world.jobs:
                self.world.sample(self.world.jobs[place % len(self.world.jobs)], length)
        while self.world.grading:
            self.world.grade(0)

    @precondition(lambda self: self.world.jobs)
    @rule(place=st.integers(0, 40), length=st.integers(1, 50))
    def sample(self, place: int, length: int) -> None:
        self.world.sample(self.world.jobs[place % len(self.world.jobs)], length)

    @precondition(lambda self: self.world.grading)
    @rule(place=st.integers(0, 40), is_refused=st.booleans())
    def judge(self, place: int, is_refused: bool) -> None:
        place %= len(self.world.grading)
        if is_refused:
            self.world.refuse(place)
        else:
            self.world.grade(place)

    @precondition(lambda self: self.world.replicas)
    @rule(place=st.integers(0, 2))
    def fail_prompt(self, place: int) -> None:
        self.world.fail_prompt(self.some_replica(place))

    @precondition(lambda self: self.world.held)
    @rule(place=st.integers(0, 40))
    def resume(self, place: int) -> None:
        """May happen late after a restart: new rollouts may have begun before the replica registers."""
        self.world.resume(self.world.held[place % len(self.world.held)].replica)

    @precondition(lambda self: self.world.replicas and self.world.stage == "collecting")
    @rule(place=st.integers(0, 2))
    def update(self, place: int) -> None:
        self.world.update(self.some_replica(place))

    @precondition(lambda self: self.world.replicas)
    @rule(place=st.integers(0, 2))
    def pause_or_resume(self, place: int) -> None:
        replica = self.world.replicas[self.some_replica(place)]
        replica.is_paused = not replica.is_paused

    @precondition(lambda self: self.world.replicas)
    @rule(place=st.integers(0, 2))
    def leave(self, place: int) -> None:
        self.world.lose(self.some_replica(place))

    @precondition(lambda self: len(self.world.replicas) < len(REPLICAS) and self.world.stage == "collecting")
    @rule()
    def join(self) -> None:
        name = next(name for name in REPLICAS if name not in self.world.replicas)
        self.world.replicas[name] = Replica()
        self.world.update(name)

    @precondition(lambda self: self.is_stage("collecting"))
    @rule(dies=st.booleans())
    def choose(self, dies: bool) -> None:
        self.world.choose(dies_before_the_batch=dies)

    @precondition(lambda self: self.is_stage("stored"))
    @rule()
    def train(self) -> None:
        self.world.train()

    @precondition(lambda self: self.is_stage("trained"))
    @rule()
    def finish_step(self) -> None:
        self.world.finish_step()

    @precondition(lambda self: self.is_stage("collecting", "stored", "trained"))
    @rule(rounds=st.integers(1, 12), stragglers=st.integers(0, 2), room=st.integers(1, 12))
    def go_on(self, rounds: int, stragglers: int, room: int) -> None:
        for _ in range(rounds):
            if self.world.durable.trained < self.world.shape.steps:
                self.world.go_on(stragglers, room)

    @rule()
    def restart_coordinator(self) -> None:
        self.world.start_coordinator()

    @invariant()
    def every_rollout_can_be_trained_at_its_step(self) -> None:
        if hasattr(self, "world"):
            shape = self.world.shape
            for job in self.world.jobs:
                assert job.slot.step <= job.versions[0] + 1 + shape.max_policy_lag, f"{job.slot} was started too early"

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
