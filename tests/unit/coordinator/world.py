"""All that can go any way around the scheduler, as a model: replicas, trainer, store, a coordinator that dies.

`World` drives one scheduler and checks at every event what a run promises:

    (a) no trained rollout has a token older than step - 1 - maxPolicyLag
    (b) every prompt is trained once or reported as failed, and never both; a step has one batch for good
    (c) nothing is dropped for its age, (e) nor for its length: what was graded is never sampled again, and is what its
        group is trained on
    (d) from any state, replicas that serve the newest version lead to the end

`AnyRun` has hypothesis choose the events. What is durable here is what the store keeps, and a restart keeps nothing
else: `take_up`, the product's own, builds the schedule again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specrl.coordinator.order import Deadlines, InOrder
from specrl.coordinator.progress import Progress
from specrl.coordinator.restart import Finished, Remains, take_up
from specrl.coordinator.scheduler import MAX_ATTEMPTS, Choice, Scheduler, Shape, SlotId

REPLICAS = ("a", "b", "c")


@dataclass(frozen=True)
class Sample:
    """A graded rollout: where it belongs, its oldest token's version, its length."""

    position: int
    sample: int
    oldest_version: int
    length: int


@dataclass
class Replica:
    """version: None while it has registered and serves nothing yet."""

    version: int | None = None
    is_paused: bool = False


@dataclass
class Job:
    """A rollout under way; `versions` are those of its tokens so far, and of the next one."""

    slot: SlotId
    replica: str
    versions: list[int]


@dataclass
class Durable:
    """What the store keeps."""

    progress: Progress = field(default_factory=Progress)
    rollouts: dict[tuple[int, int], Finished[Sample]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    batches: dict[int, Choice[Sample]] = field(default_factory=dict)


class World:
    """One run of `kind`, a scheduler, with `deadlines`."""

    def __init__(self, shape: Shape, kind: type[Scheduler[Sample]], deadlines: Deadlines) -> None:
        self.shape, self.kind, self.deadlines = shape, kind, deadlines
        self.durable = Durable()
        self.replicas: dict[str, Replica] = {}
        self.graded: dict[tuple[int, int], Sample] = {}
        self.trained: dict[int, int] = {}
        self.trainer_version = 0
        self.jobs: list[Job] = []
        self.start_coordinator()

    # -- the coordinator -----------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """A coordinator that knows nothing but what is durable; replicas must register and be updated again.

        What replicas had under way they still have.
        """
        self.held, self.jobs = self.jobs, []
        self.grading: list[tuple[SlotId, Sample]] = []
        self.stage = "collecting"
        self.replicas = {name: Replica() for name in self.replicas}
        self.scheduler = self.kind(self.shape, self.deadlines, self.durable.progress)
        batch = self.durable.batches.get(self.durable.progress.step + 1)
        stored = list(self.durable.rollouts.values())
        remains = Remains(stored, self.durable.failures, batch.positions if batch else None)
        expected = [item for item in stored if not self.durable.progress.is_settled(item.result.position)]
        assert take_up(self.scheduler, remains) == len(expected), "what is stored and not settled is taken up"

    def choose(self, *, dies_before_the_batch: bool = False) -> bool:
        """Fix what the next step trains. False while it has to wait."""
        choice = self.scheduler.choose()
        if choice is None:
            return False
        assert choice.step == self.durable.progress.step + 1, "steps are chosen in order"
        own = {self.shape.own_step(position) for position in choice.positions}
        assert own == {choice.step} or not isinstance(self.deadlines, InOrder), "InOrder overtakes nobody"
        count = self.shape.prompts_per_step
        assert len(choice.positions) == len(set(choice.positions)) == count, "a step takes promptsPerStep prompts"
        self.durable.failures |= dict(choice.failures)
        if dies_before_the_batch:
            self.start_coordinator()
            return True
        first = self.durable.batches.setdefault(choice.step, choice)
        assert (first.positions, list(first.groups)) == (choice.positions, list(choice.groups)), "two batches of a step"
        assert self.scheduler.choose() is choice, "a step is chosen once"
        self.stage = "stored"
        return True

    def train(self) -> None:
        """The trainer takes the step, unless it has already; the coordinator does not know yet."""
        choice = self.durable.batches[self.durable.progress.step + 1]
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
        """The step's report is durable, in one transaction with what the store forgets."""
        choice = self.durable.batches[self.durable.progress.step + 1]
        self.durable.progress = choice.progress
        for position, sample in list(self.durable.rollouts):
            if self.shape.own_step(position) <= choice.step and position not in choice.overtaken:
                del self.durable.rollouts[position, sample]
        self.scheduler.mark_trained(choice.step)
        assert self.scheduler.progress == self.durable.progress, "what is settled is what is durable"
        self.stage = "collecting"

    # -- replicas ------------------------------------------------------------------------------------------------

    def update(self, name: str) -> None:
        """Weights change in flight: what is under way goes on under the trainer's version."""
        self.replicas[name].version = self.trainer_version
        for job in [*self.jobs, *self.held]:
            if job.replica == name and job.versions[-1] != self.trainer_version:
                job.versions.append(self.trainer_version)

    def resume(self, name: str) -> int:
        """A replica says what it holds from before the restart. Returns how much of it is taken up."""
        mine = [job for job in self.held if job.replica == name]
        self.held = [job for job in self.held if job.replica != name]
        resumed = [job for job in mine if self.scheduler.resume(job.slot, job.versions[0])]
        for job in resumed:
            assert not any(other.slot == job.slot for other in self.jobs), f"{job.slot} is under way twice"
            assert not self.scheduler.resume(job.slot, job.versions[0]), "it is taken up once"
        self.jobs += resumed
        return len(resumed)

    def lose(self, name: str) -> None:
        """A replica dies. What it still says is not wanted."""
        del self.replicas[name]
        self.held = [job for job in self.held if job.replica != name]
        lost = [job for job in self.jobs if job.replica == name]
        self.jobs = [job for job in self.jobs if job.replica != name]
        self.scheduler.requeue([job.slot for job in lost])
        for job in lost:
            assert not self.scheduler.sampled(job.slot), "a late duplicate"

    def take(self, name: str, room: int) -> int:
        """Give a replica work. Returns how much it was."""
        replica = self.replicas[name]
        if replica.version is None or replica.is_paused:
            return 0
        slots = self.scheduler.take(replica.version, room)
        assert len(slots) <= room, "no more than there is room for"
        for slot in slots:
            assert not any(job.slot == slot for job in self.jobs), f"{slot} is under way twice"
            self.jobs.append(Job(slot, name, [replica.version]))
        return len(slots)

    def sample(self, job: Job, length: int) -> None:
        """A rollout ends, and waits for its verdict. Its oldest token may be younger than its start."""
        if self.replicas[job.replica].is_paused:
            return
        self.jobs.remove(job)
        if self.scheduler.sampled(job.slot):
            assert not self.scheduler.sampled(job.slot), "it came twice"
            position = self.shape.position(job.slot.step, job.slot.index)
            self.grading.append((job.slot, Sample(position, job.slot.sample, min(job.versions), length)))

    def grade(self, place: int) -> None:
        """The verifier speaks: the rollout is durable, then counted."""
        slot, item = self.grading.pop(place)
        key = (item.position, item.sample)
        assert key not in self.graded, f"{slot} was graded before: a finished rollout was dropped"
        self.graded[key] = item
        self.durable.rollouts[key] = Finished(slot, item, item.oldest_version)
        self.scheduler.graded(slot, item, item.oldest_version)

    def refuse(self, place: int) -> None:
        """The verifier hangs, or the rollout is poisoned."""
        slot, _ = self.grading.pop(place)
        self.scheduler.refuse(slot, "refused")

    def fail_prompt(self, name: str) -> None:
        """Every sample of whatever this replica is given next is refused."""
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
        """No deadlock: serving, finishing and training alone lead to the end, and then all is accounted for."""
        while self.durable.progress.step < self.shape.steps:
            self.go_on()
        everything = set(range(self.shape.prompts))
        failed = {position for position in self.durable.failures if position not in self.trained}
        assert set(self.trained) | failed == everything, "a prompt was lost"
        assert not set(self.trained) & set(self.durable.failures), "a prompt was trained and reported as failed"
        assert self.durable.progress == Progress(self.shape.steps, self.shape.prompts), "the stream is settled"
        trained = [item for choice in self.durable.batches.values() for _, group in choice.groups for item in group]
        generated = [item for item in self.graded.values() if item.position not in failed]
        lengths = (sorted(item.length for item in trained), sorted(item.length for item in generated))
        assert lengths[0] == lengths[1], "lengths trained differ from those generated"
        assert not self.durable.rollouts, "the store has forgotten what is trained"

    def go_on(self, stragglers: int = 0, room: int = 10_000) -> None:
        """One round in which everybody does what they can; something must have happened, or stragglers are waited for.

        stragglers: so many rollouts, the first of the stream, do not end. room: most that a replica is given.
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
    """Any mix of latencies, failures, scale events, swaps in flight, pauses, restarts. Subclasses choose the kind."""

    kind: type[Scheduler[Sample]] = Scheduler
    deadlines: tuple[Deadlines, ...] = ()

    @initialize(
        order=st.integers(0, 1),
        lag=st.integers(0, 3),
        steps=st.integers(2, 6),
        prompts=st.integers(1, 3),
        group=st.integers(2, 3),
    )
    def begin(self, order: int, lag: int, steps: int, prompts: int, group: int) -> None:
        shape = Shape(steps, prompts, group, lag)
        self.world = World(shape, self.kind, self.deadlines[order % len(self.deadlines)])
        for name in REPLICAS[:2]:
            self.world.replicas[name] = Replica()
            self.world.update(name)

    def is_stage(self, *stages: str) -> bool:
        return self.world.stage in stages and self.world.durable.progress.step < self.world.shape.steps

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
        """At any time after a restart: new rollouts may have begun before the replica registers."""
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
            if self.world.durable.progress.step < self.world.shape.steps:
                self.world.go_on(stragglers, room)

    @rule()
    def restart_coordinator(self) -> None:
        self.world.start_coordinator()

    @invariant()
    def every_begun_group_can_be_trained_in_time(self) -> None:
        if hasattr(self, "world"):
            assert self.world.scheduler.has_kept_deadlines(), "more groups are due than steps can take"

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
