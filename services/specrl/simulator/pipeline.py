"""Simulates the steps of a run as discrete events. The coordinator's own scheduler decides what starts and what trains.

    trainer   wait until a step can be chosen -> data -> logprob -> train -> mark trained -> prepare -> gate opens
    replica   gets slots, reads their prompts, emits tokens at the pace of its live batch and context; a slot that has
              ended is graded, and its seat is free for another

This is the coordinator's `loop.py` and `rollouts/pipeline.py` without failures. As there, with maxPolicyLag 0 all slots
of a step are assigned at once, and the gate is closed while the trainer works. With more lag, seats are filled as they
become free; replicas go on while weights travel and pause while they load.

All live rollouts of a replica emit tokens at the same pace. So a replica has one clock that counts tokens, and a
rollout is the position on it at which it ends. Between two ends the pace is constant. An event is a slot that ends. In
large runs a slot bundles `grain` rollouts of one group on one replica, where groups mostly stay together. Only the
scheduler sees the bundle; everything else counts rollouts. Units are seconds and tokens.

Where trainer and replicas share processors, all of them slow down while more of them compute. So events are scheduled
in undisturbed time, and a second clock converts to real time: it runs faster by the common slowdown
(`costs.interface.ProcessorSharing`). Called by `simulate`.
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

from specrl.coordinator.schedule.dispatch import ReplicaSeats, assign_to_least_loaded
from specrl.coordinator.schedule.scheduler import Scheduler, ScheduleShape, SlotId
from specrl.simulator.costs.interface import CostModel
from specrl.simulator.costs.pace import PaceTable
from specrl.simulator.scenarios.lengths import LengthModel
from specrl.simulator.scenarios.scenario import Scenario

PHASES = ("data", "prepare", "generation", "logprob", "train")

# Most changes that a trace records. The rest of a long run looks like its beginning.
MAX_TIMELINE_CHANGES = 100_000

# Up to this many rollouts per simulation, each has its own slot. Beyond it, rollouts are bundled for speed.
MAX_UNBUNDLED_SLOTS = 20_000


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step. phases: seconds by phase; their sum is the step's wall time."""

    step: int
    began_s: float
    phases: dict[str, float]
    rollouts: int
    policy_lag_max: int
    busy_share: float
    """Share of the time since the previous step in which the replicas emitted tokens."""

    @property
    def wall_s(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class SimulationTrace:
    """A simulated run. live: (second, replica, live rollouts) at every change, for the timeline.

    requeued, graded, trained, held: numbers of rollouts.
    """

    steps: list[SimulatedStep]
    live: list[tuple[float, int, int]]
    requeued: int
    graded: int
    trained: int
    held: int


@dataclass(frozen=True)
class _Slot:
    """A slot on a replica: the lengths of its rollouts, and the policy version they were assigned under."""

    lengths: list[float]
    longest: float
    version: int


@dataclass
class _Replica:
    """The state of one replica. clock: tokens that a rollout live since the start would have emitted.

    ends: ascending positions on the clock at which live rollouts end. timer: number of the latest timer; others are
    stale.
    """

    number: int
    version: int = 0
    is_serving: bool = True
    clock: float = 0.0
    ends: list[float] = field(default_factory=list)
    began: float = 0.0  # sum of the positions at which live rollouts began; gives their mean context in O(1)
    slots: dict[SlotId, _Slot] = field(default_factory=dict)
    seated: list[tuple[float, SlotId]] = field(default_factory=list)  # heap of (position where the slot ends, slot)
    waiting: deque[SlotId] = field(default_factory=deque)  # slots without a seat
    at_s: float = 0.0  # event time at which `clock` was updated
    debt_s: float = 0.0  # seconds of prefill and weight loading before it emits tokens again
    busy_s: float = 0.0
    tokens_per_s: float = 0.0  # if nothing else computed on the machine
    timer: int = 0

    @property
    def live_rollouts(self) -> int:
        return len(self.ends)


class PipelineSimulation:
    """One simulation. `tick(step)` is called after every trained step."""

    def __init__(
        self,
        scenario: Scenario,
        costs: CostModel,
        pace: PaceTable,
        lengths: LengthModel,
        tick: Callable[[int], None] | None = None,
    ) -> None:
        schedule = scenario.schedule
        self._scenario = scenario
        self._costs = costs
        self._pace = pace
        self._tick = tick
        self._seats = len(pace.rows) - 1
        self._lag = schedule.max_policy_lag
        self._grain = _choose_grain(scenario, self._seats)
        self._shape = ScheduleShape(
            schedule.steps, schedule.prompts_per_step, schedule.group_size // self._grain, self._lag
        )
        self._scheduler: Scheduler[tuple[int, float]] = Scheduler(self._shape)
        random = np.random.default_rng(schedule.seed)
        self._lengths_PG = lengths.draw_lengths(self._shape.prompt_count, schedule.group_size, random).tolist()
        self._env = simpy.Environment()
        self._sharing = costs.sharing
        self._time_s = 0.0
        self._time_at = 0.0
        self._slowdown = 1.0
        self._is_training = False
        self._replicas = [_Replica(number) for number in range(scenario.layout.replica_count)]
        self._gate_open = True
        self._version = 0
        self._changed = self._env.event()
        self._steps: list[SimulatedStep] = []
        self._live: list[tuple[float, int, int]] = []
        self._prompt_tokens = scenario.workload.prompt_tokens
        self._counts: Counter[str] = Counter()
        self._wanted = schedule.rollouts_per_step

    def run(self) -> SimulationTrace:
        """Simulate all steps and return the trace."""
        for failure in self._scenario.failures:
            self._env.process(self._fail_replica(self._replicas[failure.replica], failure.at_s, failure.back_after_s))
        trainer = self._env.process(self._run_trainer())
        self._env.run(until=trainer)
        count = self._counts
        held = self._scheduler.measure_occupancy().held * self._grain
        return SimulationTrace(self._steps, self._live, count["requeued"], count["graded"], count["trained"], held)

    # -- trainer ---------------------------------------------------------------------------------------------------

    def _run_trainer(self) -> Generator[simpy.Event, Any, None]:
        env = self._env
        costs = self._costs
        self._dispatch_slots(self._replicas)
        for step in range(1, self._shape.steps + 1):
            began = self._current_time_s()
            undisturbed = env.now
            busy_before = sum(replica.busy_s for replica in self._replicas)
            # Woken by `_end_slots` when enough rollouts are graded for a step.
            while (choice := self._scheduler.choose_groups()) is None:
                self._changed = env.event()
                yield self._changed
            generation = self._current_time_s() - began
            self._trainer_computes(True)
            if self._lag == 0:
                self._gate_open = False
            else:  # the groups just chosen have left the window, so new groups may start
                self._dispatch_slots(self._replicas)
            results = [result for _, found in choice.groups for result in found]
            rollouts = len(results) * self._grain
            self._counts["taken"] += rollouts
            # The trainer also computes the prompts.
            trained_tokens = sum(length for _, length in results) + rollouts * self._prompt_tokens
            phases = {"generation": generation}
            for phase, seconds in (
                ("data", costs.data_s),
                ("logprob", costs.logprob_s(trained_tokens)),
                ("train", costs.train_s(trained_tokens)),
            ):
                phases[phase] = yield from self._spend_time(seconds)
            # Trained before the weights are published, as in the coordinator: the commit comes first.
            self._scheduler.mark_trained(step)
            self._counts["trained"] += rollouts
            phases["prepare"] = yield from self._spend_time(costs.prepare_s)
            self._trainer_computes(False)
            self._publish_version()
            for replica in self._replicas:
                self._catch_up(replica)
            busy = sum(replica.busy_s for replica in self._replicas) - busy_before
            self._steps.append(
                SimulatedStep(
                    step=step,
                    began_s=began,
                    phases=phases,
                    rollouts=rollouts,
                    policy_lag_max=max((step - 1 - version for version, _ in results), default=0),
                    busy_share=busy / max(1e-12, (env.now - undisturbed) * len(self._replicas)),
                )
            )
            if self._tick is not None:
                self._tick(step)

    def _publish_version(self) -> None:
        """Give every serving replica the next version. With lag, replicas pause while they load it."""
        self._version += 1
        for replica in self._replicas:
            if replica.is_serving:
                self._catch_up(replica)
                replica.version = self._version
                if self._lag:
                    replica.debt_s += self._costs.load_s
                self._set_timer(replica)
        self._gate_open = True
        self._dispatch_slots(self._replicas)

    # -- the second clock ------------------------------------------------------------------------------------------

    def _current_time_s(self) -> float:
        """Return the real time, in seconds."""
        self._time_s += (self._env.now - self._time_at) * self._slowdown
        self._time_at = self._env.now
        return self._time_s

    def _spend_time(self, seconds: float) -> Generator[simpy.Event, Any, float]:
        """Let the trainer compute for `seconds` of undisturbed time. Returns the real seconds that this takes."""
        began = self._current_time_s()
        yield self._env.timeout(seconds)
        return self._current_time_s() - began

    def _trainer_computes(self, is_training: bool) -> None:
        self._is_training = is_training
        self._update_slowdown()

    def _update_slowdown(self) -> None:
        if self._sharing is not None:
            self._current_time_s()  # the time so far passed at the old slowdown
            rates = [replica.tokens_per_s for replica in self._replicas if replica.live_rollouts]
            self._slowdown = self._sharing.slowdown_factor(len(rates), sum(rates), is_training=self._is_training)

    # -- replicas --------------------------------------------------------------------------------------------------

    def _dispatch_slots(self, replicas: list[_Replica]) -> None:
        """Assign slots to replicas, like the coordinator's `RolloutPipeline._dispatch_slots`."""
        if not self._gate_open:
            return
        serving = [replica for replica in replicas if replica.is_serving]
        if self._lag == 0:
            names = [str(replica.number) for replica in serving]
            dealt = self._scheduler.assign_all_slots(names, min((replica.version for replica in serving), default=-1))
            for replica in serving:
                self._start_slots(replica, dealt[str(replica.number)])
            return
        for replica in replicas:
            self._catch_up(replica)
        seats = []
        for replica in serving:
            live = replica.live_rollouts
            # As many slots as it has free seats for, so that none waits.
            free = (self._seats - live) // self._grain
            seats.append(ReplicaSeats(str(replica.number), replica.version, live // self._grain, free))
        for name, slots in assign_to_least_loaded(self._scheduler, seats).items():
            self._start_slots(self._replicas[int(name)], slots)

    def _start_slots(self, replica: _Replica, slots: list[SlotId]) -> None:
        """Give slots to a replica. Slots beyond its seats wait there, like requests in an engine's queue."""
        if not slots:
            return
        self._catch_up(replica)
        groups = set()
        for slot in slots:
            place = self._shape.position_at(slot.step, slot.index)
            first = slot.sample * self._grain
            lengths = self._lengths_PG[place][first : first + self._grain]
            replica.slots[slot] = _Slot(lengths, max(lengths), replica.version)
            replica.waiting.append(slot)
            groups.add(place)
        self._seat_waiting_slots(replica)
        # A prompt is counted once, however many rollouts of its group start here.
        tokens = len(groups) * self._prompt_tokens
        replica.debt_s += self._costs.start_s(len(slots) * self._grain, tokens)
        self._set_timer(replica)

    def _seat_waiting_slots(self, replica: _Replica) -> None:
        """Start waiting slots while there are seats."""
        while replica.waiting and replica.live_rollouts + self._grain <= self._seats:
            name = replica.waiting.popleft()
            slot = replica.slots[name]
            for length in slot.lengths:
                bisect.insort(replica.ends, replica.clock + length)
            replica.began += replica.clock * len(slot.lengths)
            heapq.heappush(replica.seated, (replica.clock + slot.longest, name))
        self._record_live_rollouts(replica)

    def _advance_clock(self, replica: _Replica, seconds: float, target: float) -> tuple[float, float, int, float]:
        """Advance along the replica's clock until `seconds` are spent or position `target` is reached.

        Returns the new clock, the new `began`, the number of rollouts that ended, and the seconds spent. Between two
        ends it uses the pace at the middle context, since costs are nearly linear in it. A simulation spends most of
        its time here, hence the local variables.
        """
        ends = replica.ends
        clock = replica.clock
        began = replica.began
        rows = self._pace.rows
        bin_tokens = self._pace.bin_tokens
        prompt_tokens = self._prompt_tokens
        last = len(rows[0]) - 1
        live = len(ends)
        ended = 0
        spent = 0.0
        while live and clock < target:
            end = ends[ended]
            place = int((prompt_tokens + (clock + end) / 2 - began / live) / bin_tokens)
            pace = rows[live][place if place < last else last]
            span = (end - clock) * pace
            if spent + span > seconds:
                return clock + (seconds - spent) / pace, began, ended, seconds
            spent += span
            # The rollout that ends takes an average share of `began` with it: their starts are not tracked one by one.
            began -= began / live
            clock = end
            ended += 1
            live -= 1
        return clock, began, ended, spent

    def _catch_up(self, replica: _Replica) -> None:
        """Advance the replica's clock to now. Rollouts that end on the way leave the live batch."""
        left = self._env.now - replica.at_s
        replica.at_s = self._env.now
        # Prefill and weight loading come before any token.
        paid = min(left, replica.debt_s)
        replica.debt_s -= paid
        replica.busy_s += paid
        if left <= paid:
            return
        replica.clock, replica.began, ended, spent = self._advance_clock(replica, left - paid, math.inf)
        replica.busy_s += spent
        if ended:
            del replica.ends[:ended]
            if not replica.ends:
                replica.began = 0.0
            self._record_live_rollouts(replica)

    def _set_timer(self, replica: _Replica) -> None:
        """Schedule the end of the next slot. Any change of the replica replaces the timer."""
        replica.timer += 1
        if not replica.seated or not replica.is_serving:
            return
        target = replica.seated[0][0]
        *_, seconds = self._advance_clock(replica, math.inf, target)
        timeout = self._env.timeout(replica.debt_s + seconds, value=(replica, replica.timer, target))
        assert timeout.callbacks is not None
        timeout.callbacks.append(self._end_slots)

    def _end_slots(self, event: simpy.Event) -> None:
        found: tuple[_Replica, int, float] = event.value  # type: ignore[assignment]  # simpy: Any or None
        replica, timer, target = found
        if timer != replica.timer:
            return  # stale: the replica has changed and has a newer timer
        self._catch_up(replica)
        place = bisect.bisect_right(replica.ends, target)
        if place:  # floating-point rounding left the clock just before the end of the slot
            replica.began *= 1 - place / replica.live_rollouts
            del replica.ends[:place]
            replica.clock = max(replica.clock, target)
        while replica.seated and replica.seated[0][0] <= target:
            name = heapq.heappop(replica.seated)[1]
            slot = replica.slots.pop(name)
            self._scheduler.mark_sampled(name)
            is_kept = self._scheduler.mark_graded(name, (slot.version, sum(slot.lengths)), slot.version)
            self._counts["graded"] += is_kept * len(slot.lengths)
        self._seat_waiting_slots(replica)
        if self._lag:  # without lag, all slots of a step were assigned when it began
            self._dispatch_slots([replica])
        self._set_timer(replica)
        # Wake the trainer only when a step might be possible; the scheduler then decides.
        if self._counts["graded"] - self._counts["taken"] >= self._wanted and not self._changed.triggered:
            self._changed.succeed()

    def _record_live_rollouts(self, replica: _Replica) -> None:
        if self._sharing is not None:
            row = self._pace.rows[replica.live_rollouts]
            # The pace at the middle context stands for all contexts.
            replica.tokens_per_s = replica.live_rollouts / row[len(row) // 2]
            self._update_slowdown()
        if len(self._live) < MAX_TIMELINE_CHANGES:
            self._live.append((self._current_time_s(), replica.number, replica.live_rollouts))

    # -- failures --------------------------------------------------------------------------------------------------

    def _fail_replica(
        self, replica: _Replica, at_s: float, back_after_s: float | None
    ) -> Generator[simpy.Event, Any, None]:
        """Take a replica away at `at_s` and requeue its unfinished rollouts. It returns after `back_after_s`, if given.

        On its return it first loads the present version. Both times are in undisturbed time.
        """
        yield self._env.timeout(at_s)
        self._catch_up(replica)
        replica.is_serving = False
        replica.timer += 1  # makes its pending timer stale
        self._counts["requeued"] += self._scheduler.requeue(replica.slots) * self._grain
        replica.slots.clear()
        replica.seated.clear()
        replica.waiting.clear()
        replica.ends.clear()
        replica.began = replica.debt_s = 0.0
        self._record_live_rollouts(replica)
        self._dispatch_slots(self._replicas)
        if back_after_s is not None:
            yield self._env.timeout(back_after_s + self._costs.prepare_s)
            replica.is_serving = True
            replica.version = self._version
            replica.at_s = self._env.now
            self._dispatch_slots(self._replicas)


def _choose_grain(scenario: Scenario, seats: int) -> int:
    """Return the rollouts per slot: 1, or in large runs the largest divisor of a group that leaves few enough slots."""
    schedule = scenario.schedule
    size = schedule.group_size
    grain = 1
    total = schedule.steps * schedule.rollouts_per_step
    for part in range(2, size + 1):
        if size % part == 0 and part <= seats and total / grain > MAX_UNBUNDLED_SLOTS:
            grain = part
    return grain
