"""Steps of a run as discrete events. What may start, and what a step trains, the coordinator's own scheduler decides.

    trainer   wait until a step can be chosen -> data -> logprob -> train -> mark trained -> prepare -> gate opens
    replica   is given slots, reads their prompts, emits tokens at the pace of its live batch and context; a slot that
              has ended is graded, and its seat given away

That is `coordinator/loop.py` and `coordinator/rollouts.py` without what can fail in them. As there, with maxPolicyLag 0
a step's slots are dealt at once and the gate is closed while the trainer works; otherwise seats are filled as they
become free, and replicas go on while weights travel and stand still while they are loaded.

All live rollouts of a replica emit tokens at one pace, so a replica has one clock that counts tokens, and a rollout is
a place on it where it ends; between two ends the pace is constant. One event is one slot that ends. In large runs a
slot is a bundle of rollouts of one group that go to one replica, as groups mostly do: `grain` of them, counted one by
one in everything but the scheduler. Seconds, tokens.

Where trainer and replicas share processors, all of them get slower together while more of them compute. So events keep
the time that they would take undisturbed, and a second clock says what time it is: it goes as many times faster as all
of them are slower (`costs.Sharing`).
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from specrl.coordinator.dispatch import Seats, share_out
from specrl.coordinator.order import deadlines
from specrl.coordinator.scheduler import Scheduler, Shape, SlotId
from specrl.simulator.costs import Costs
from specrl.simulator.lengths import Lengths
from specrl.simulator.pace import Pace
from specrl.simulator.scenario import Scenario

STAGES = ("data", "prepare", "generation", "logprob", "train")

TIMELINE = 100_000
"""Changes that a timeline holds; the rest of a long run looks like its beginning."""

SLOTS_IN_FULL = 20_000
"""Slots of a simulation up to which each rollout is one."""


@dataclass(frozen=True)
class Step:
    """One step: when it began, seconds by stage (their sum is its wall time), what it trained."""

    step: int
    began_s: float
    stages: dict[str, float]
    tokens: float
    rollouts: int
    policy_lag_max: int
    busy_share: float
    """Of the replicas' time since the step before, that they emitted tokens."""

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True)
class Trace:
    """A simulated run. live: (second, replica, live rollouts) at every change, for the timeline."""

    steps: list[Step]
    live: list[tuple[float, int, int]]
    requeued: int
    graded: int
    trained: int
    held: int


@dataclass(frozen=True)
class _Slot:
    """What was given to a replica: lengths of its rollouts, and the version that it was given them under."""

    lengths: list[float]
    longest: float
    version: int


@dataclass
class _Replica:
    """clock: tokens that each live rollout has emitted since the replica began. ends: ascending places on the clock."""

    number: int
    version: int = 0
    is_serving: bool = True
    clock: float = 0.0
    ends: list[float] = field(default_factory=list)
    began: float = 0.0  # sum of the clock's places at which live rollouts began
    slots: dict[SlotId, _Slot] = field(default_factory=dict)
    seated: list[tuple[float, SlotId]] = field(default_factory=list)  # a heap: where on the clock each slot ends
    waiting: deque[SlotId] = field(default_factory=deque)  # for seats
    at_s: float = 0.0  # when clock was true
    debt_s: float = 0.0  # prompts to be read, and weights to be loaded, before it emits again
    busy_s: float = 0.0
    tokens_per_s: float = 0.0  # with none beside it
    timer: int = 0

    @property
    def live(self) -> int:
        return len(self.ends)


class Pipeline:
    """One simulation. `tick(step)` is called after every trained step."""

    def __init__(
        self, scenario: Scenario, costs: Costs, pace: Pace, lengths: Lengths, tick: Callable[[int], None] | None = None
    ) -> None:
        schedule = scenario.schedule
        self._scenario, self._costs, self._pace, self._tick = scenario, costs, pace, tick
        self._seats = len(pace.rows) - 1
        self._lag = schedule.max_policy_lag
        self._grain = _grain(scenario, self._seats)
        self._shape = Shape(schedule.steps, schedule.prompts_per_step, schedule.group_size // self._grain, self._lag)
        self._scheduler: Scheduler[tuple[int, float]] = Scheduler(self._shape, deadlines(schedule.order))
        random = np.random.default_rng(schedule.seed)
        self._lengths_PG = lengths.draw(self._shape.prompts, schedule.group_size, random).tolist()
        self._env = simpy.Environment()
        self._sharing = costs.sharing()
        self._time_s, self._time_at, self._slowdown, self._is_training = 0.0, 0.0, 1.0, False
        self._replicas = [_Replica(number) for number in range(scenario.layout.replicas)]
        self._gate_open, self._version = True, 0
        self._changed = self._env.event()
        self._steps: list[Step] = []
        self._live: list[tuple[float, int, int]] = []
        self._prompt_tokens = scenario.workload.prompt_tokens
        self._counts: Counter[str] = Counter()
        self._wanted = schedule.prompts_per_step * schedule.group_size

    def run(self) -> Trace:
        """Simulate all steps."""
        for failure in self._scenario.failures:
            self._env.process(self._fail(self._replicas[failure.replica], failure.at_s, failure.back_after_s))
        trainer = self._env.process(self._train())
        self._env.run(until=trainer)
        count = self._counts
        held = self._scheduler.occupancy().held * self._grain
        return Trace(self._steps, self._live, count["requeued"], count["graded"], count["trained"], held)

    # -- trainer ---------------------------------------------------------------------------------------------------

    def _train(self) -> Generator[simpy.Event, Any, None]:
        env, costs = self._env, self._costs
        self._dispatch(self._replicas)
        for step in range(1, self._shape.steps + 1):
            began, undisturbed = self._now(), env.now
            busy_before = sum(replica.busy_s for replica in self._replicas)
            while (choice := self._scheduler.choose()) is None:
                self._changed = env.event()
                yield self._changed
            generation = self._now() - began
            self._trainer_computes(True)
            if self._lag == 0:
                self._gate_open = False
            else:  # groups that the choice has taken stand in no other group's way any more
                self._dispatch(self._replicas)
            results = [result for _, found in choice.groups for result in found]
            tokens = sum(length for _, length in results)
            rollouts = len(results) * self._grain
            self._counts["taken"] += rollouts
            trained_tokens = tokens + rollouts * self._scenario.workload.prompt_tokens
            stages = {"generation": generation}
            for stage, seconds in (
                ("data", costs.data_s()),
                ("logprob", costs.logprob_s(trained_tokens)),
                ("train", costs.train_s(trained_tokens)),
            ):
                stages[stage] = yield from self._spend(seconds)
            self._scheduler.mark_trained(step)
            self._counts["trained"] += rollouts
            stages["prepare"] = yield from self._spend(costs.prepare_s())
            self._trainer_computes(False)
            self._publish()
            for replica in self._replicas:
                self._catch_up(replica)
            busy = sum(replica.busy_s for replica in self._replicas) - busy_before
            self._steps.append(
                Step(
                    step=step,
                    began_s=began,
                    stages=stages,
                    tokens=tokens,
                    rollouts=rollouts,
                    policy_lag_max=max((step - 1 - version for version, _ in results), default=0),
                    busy_share=busy / max(1e-12, (env.now - undisturbed) * len(self._replicas)),
                )
            )
            if self._tick is not None:
                self._tick(step)

    def _publish(self) -> None:
        """Every serving replica has the next version; those under way stand still while it is loaded."""
        self._version += 1
        for replica in self._replicas:
            if replica.is_serving:
                self._catch_up(replica)
                replica.version = self._version
                if self._lag:
                    replica.debt_s += self._costs.load_s()
                self._set_timer(replica)
        self._gate_open = True
        self._dispatch(self._replicas)

    # -- the second clock ------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """What time it is."""
        self._time_s += (self._env.now - self._time_at) * self._slowdown
        self._time_at = self._env.now
        return self._time_s

    def _spend(self, seconds: float) -> Generator[simpy.Event, Any, float]:
        """What the trainer does undisturbed in so many seconds. Returns those that it takes."""
        began = self._now()
        yield self._env.timeout(seconds)
        return self._now() - began

    def _trainer_computes(self, is_training: bool) -> None:
        self._is_training = is_training
        self._share()

    def _replica_computes(self, replica: _Replica) -> None:
        """As many rollouts as are live in it now."""
        row = self._pace.rows[replica.live]
        replica.tokens_per_s = replica.live / row[len(row) // 2]
        self._share()

    def _share(self) -> None:
        if self._sharing is not None:
            self._now()
            rates = [replica.tokens_per_s for replica in self._replicas if replica.live]
            self._slowdown = self._sharing.slowdown(len(rates), sum(rates), is_training=self._is_training)

    # -- replicas --------------------------------------------------------------------------------------------------

    def _dispatch(self, replicas: list[_Replica]) -> None:
        """As `RolloutStage._dispatch`."""
        if not self._gate_open:
            return
        if self._lag == 0:
            serving = [replica for replica in self._replicas if replica.is_serving]
            names = [str(replica.number) for replica in serving]
            dealt = self._scheduler.deal(names, min((replica.version for replica in serving), default=-1))
            for replica in serving:
                self._start(replica, dealt[str(replica.number)])
            return
        for replica in replicas:
            self._catch_up(replica)
        seats = [
            Seats(str(replica.number), replica.version, replica.live // self._grain, self._free(replica))
            for replica in replicas
            if replica.is_serving
        ]
        for name, slots in share_out(self._scheduler, seats).items():
            self._start(self._replicas[int(name)], slots)

    def _free(self, replica: _Replica) -> int:
        """Slots that a replica may be given. Nothing waits for a seat: no more is ever given out than there are."""
        return (self._seats - replica.live) // self._grain

    def _start(self, replica: _Replica, slots: list[SlotId]) -> None:
        """Give a replica slots. Those beyond its seats wait at it, as requests wait in an engine's queue."""
        if not slots:
            return
        self._catch_up(replica)
        groups = set()
        for slot in slots:
            place = self._shape.position(slot.step, slot.index)
            first = slot.sample * self._grain
            lengths = self._lengths_PG[place][first : first + self._grain]
            replica.slots[slot] = _Slot(lengths, max(lengths), replica.version)
            replica.waiting.append(slot)
            groups.add(place)
        self._seat(replica)
        tokens = len(groups) * self._scenario.workload.prompt_tokens
        replica.debt_s += self._costs.start_s(len(slots) * self._grain, tokens)
        self._set_timer(replica)

    def _seat(self, replica: _Replica) -> None:
        """Begin waiting slots while there are seats."""
        while replica.waiting and replica.live + self._grain <= self._seats:
            name = replica.waiting.popleft()
            slot = replica.slots[name]
            for length in slot.lengths:
                bisect.insort(replica.ends, replica.clock + length)
            replica.began += replica.clock * len(slot.lengths)
            heapq.heappush(replica.seated, (replica.clock + slot.longest, name))
        self._note(replica)

    def _walk(self, replica: _Replica, seconds: float, target: float) -> tuple[float, float, int, float]:
        """Along the replica's clock, until so many seconds are spent or a place on it is reached.

        Returns the clock, `began`, how many rollouts ended on the way, and the seconds spent. Between two ends the pace
        is that of the middle context, since costs are linear in it. Most of a simulation's time is spent here.
        """
        ends, clock, began = replica.ends, replica.clock, replica.began
        rows, bin_tokens, prompt_tokens = self._pace.rows, self._pace.bin_tokens, self._prompt_tokens
        last, live, ended, spent = len(rows[0]) - 1, len(ends), 0, 0.0
        while live and clock < target:
            end = ends[ended]
            place = int((prompt_tokens + (clock + end) / 2 - began / live) / bin_tokens)
            pace = rows[live][place if place < last else last]
            span = (end - clock) * pace
            if spent + span > seconds:
                return clock + (seconds - spent) / pace, began, ended, seconds
            spent += span
            began -= began / live
            clock = end
            ended += 1
            live -= 1
        return clock, began, ended, spent

    def _catch_up(self, replica: _Replica) -> None:
        """Move the replica's clock to now; rollouts that end on the way leave the live batch."""
        left = self._env.now - replica.at_s
        replica.at_s = self._env.now
        paid = min(left, replica.debt_s)
        replica.debt_s -= paid
        replica.busy_s += paid
        if left <= paid:
            return
        replica.clock, replica.began, ended, spent = self._walk(replica, left - paid, math.inf)
        replica.busy_s += spent
        if ended:
            del replica.ends[:ended]
            if not replica.ends:
                replica.began = 0.0
            self._note(replica)

    def _set_timer(self, replica: _Replica) -> None:
        """Wake up when the next slot ends, unless something changes before."""
        replica.timer += 1
        if not replica.seated or not replica.is_serving:
            return
        target = replica.seated[0][0]
        *_, seconds = self._walk(replica, math.inf, target)
        timeout = self._env.timeout(replica.debt_s + seconds, value=(replica, replica.timer, target))
        assert timeout.callbacks is not None
        timeout.callbacks.append(self._slot_ended)

    def _slot_ended(self, event: simpy.Event) -> None:
        found: tuple[_Replica, int, float] = event.value  # type: ignore[assignment]  # simpy: Any or None
        replica, timer, target = found
        if timer != replica.timer:
            return  # something has changed since; another timer is set
        self._catch_up(replica)
        place = bisect.bisect_right(replica.ends, target)
        if place:  # rounding left the clock a hair before the place where it ends
            replica.began *= 1 - place / replica.live
            del replica.ends[:place]
            replica.clock = max(replica.clock, target)
        while replica.seated and replica.seated[0][0] <= target:
            name = heapq.heappop(replica.seated)[1]
            slot = replica.slots.pop(name)
            self._scheduler.sampled(name)
            is_kept = self._scheduler.graded(name, (slot.version, sum(slot.lengths)), slot.version)
            self._counts["graded"] += is_kept * len(slot.lengths)
        self._seat(replica)
        if self._lag:  # without lag a step's slots were all given out when it began
            self._dispatch([replica])
        self._set_timer(replica)
        # Fewer rollouts than a step trains let no step be chosen; of more, the scheduler is asked.
        if self._counts["graded"] - self._counts["taken"] >= self._wanted and not self._changed.triggered:
            self._changed.succeed()

    def _note(self, replica: _Replica) -> None:
        if self._sharing is not None:
            self._replica_computes(replica)
        if len(self._live) < TIMELINE:
            self._live.append((self._now(), replica.number, replica.live))

    # -- failures --------------------------------------------------------------------------------------------------

    def _fail(self, replica: _Replica, at_s: float, back_after_s: float | None) -> Generator[simpy.Event, Any, None]:
        """Its unfinished rollouts wait again; when it is back it catches up with the present version and serves.

        Both times are of the events' clock.
        """
        yield self._env.timeout(at_s)
        self._catch_up(replica)
        replica.is_serving = False
        replica.timer += 1
        self._counts["requeued"] += self._scheduler.requeue(replica.slots) * self._grain
        replica.slots.clear()
        replica.seated.clear()
        replica.waiting.clear()
        replica.ends.clear()
        replica.began = replica.debt_s = 0.0
        self._note(replica)
        self._dispatch(self._replicas)
        if back_after_s is not None:
            yield self._env.timeout(back_after_s + self._costs.prepare_s())
            replica.is_serving, replica.version, replica.at_s = True, self._version, self._env.now
            self._dispatch(self._replicas)


def _grain(scenario: Scenario, seats: int) -> int:
    """Rollouts of a slot: 1, or in large runs the largest part of a group that leaves few enough slots."""
    schedule = scenario.schedule
    size, grain = schedule.group_size, 1
    total = schedule.steps * schedule.prompts_per_step * size
    for part in range(2, size + 1):
        if size % part == 0 and part <= seats and total / grain > SLOTS_IN_FULL:
            grain = part
    return grain
