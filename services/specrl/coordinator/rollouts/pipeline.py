"""The rollout pipeline: keeps serving replicas busy, and checks, grades and stores the rollouts that they finish.

    scheduler slot -> session of a replica -> record check -> verifier -> store -> scheduler

Tasks, all on the coordinator's event loop: one dispatcher (`run`); one per replica, which receives rollouts over its
session; one per rollout that is being graded.

Wake-ups: `wake_dispatcher` wakes the dispatcher when a rollout finishes, a version is committed, the gate opens, or the
run is resumed. `changed` wakes `collect_step` when a rollout is graded or refused.

Bounds of waits: a lost replica breaks its call or misses heartbeats (`Replica.gone`). A verifier has the time limit of
its pool. A rollout that waits for its replica's canary is released by `Registry.trust_version` after the transfer, or
sampled again.

Restart of the coordinator: replicas keep generating. When they register they list the rollouts that they hold. These
are INFLIGHT again, and no token is computed twice (`_resume_held_rollouts`).

Repeatability: with maxPolicyLag 0 all rollouts of a step are assigned at once and admitted together. What each engine
computes then depends on the step alone, so the run repeats bit by bit.

The loop owns the pipeline and drives it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import structlog

from specrl.coordinator.context import RunContext
from specrl.coordinator.ledger import StoredRollout
from specrl.coordinator.members.registry import Replica, abort_when_gone
from specrl.coordinator.members.replica_session import FinishedRollout, ReplicaSession
from specrl.coordinator.members.replica_states import ReplicaState
from specrl.coordinator.rollouts.learnable import find_reward_fault
from specrl.coordinator.rollouts.sampling import derive_seed, make_training_sampling
from specrl.coordinator.run_events import RolloutGraded, VerdictFailed
from specrl.coordinator.schedule.dispatch import ReplicaSeats, assign_to_least_loaded
from specrl.coordinator.schedule.restart import FinishedSlot, rebuild_schedule
from specrl.coordinator.schedule.scheduler import Scheduler, SlotId, StepChoice
from specrl.coordinator.stopwatch import Stopwatch
from specrl.errors import PeerUnavailable, RecordInvalid, SpecrlError, ToolFailed
from specrl.records import GradedRollout, Prompt, Rollout, RolloutRequest, wire
from specrl.rpc.clients import GenerateOptions
from specrl.spec.trainer import Routing
from specrl.telemetry.spans import OpenSpan

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _RequestedSlot:
    """A slot that a replica was given. oldest_version: the oldest policy version that its tokens may have."""

    slot: SlotId
    oldest_version: int
    span: OpenSpan


@dataclass
class _OpenSession:
    """The session of one replica, open as long as its record. asked: unfinished slots by rollout id."""

    session: ReplicaSession
    asked: dict[str, _RequestedSlot] = field(default_factory=dict)


class RolloutPipeline:
    """Feeds replicas from the scheduler until cancelled.

    changed: set when a slot changes its state. counters: rollouts by outcome, since the coordinator started.
    failure: error of a background task, raised by `collect_step`.
    """

    def __init__(self, context: RunContext, scheduler: Scheduler[GradedRollout], stopwatch: Stopwatch) -> None:
        """stopwatch: measures how long rollouts are in flight, and how long only verifiers are at work."""
        self._context = context
        self._spec = context.spec
        self._scheduler = scheduler
        self._stopwatch = stopwatch
        self._in_flight: Counter[int] = Counter()  # rollouts that replicas were given and have not returned, by step
        self._being_graded: Counter[int] = Counter()  # rollouts that verifiers were given, by step
        self._registry = context.registry
        self._ledger = context.ledger
        self._spans = context.spans
        self._events = context.events
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references to tasks
        self._sessions: dict[Replica, _OpenSession] = {}
        self._wake = asyncio.Event()
        self._freed_replicas: dict[str, Replica] | None = None  # replicas with free seats; None: look at all
        self._gate_open = False
        self._reserved_seats = 0
        self.changed = asyncio.Event()
        self.counters = context.outcomes
        self.failure: BaseException | None = None
        self._errors: dict[str, int] = {}  # last step in which each verifier error was logged

    async def restore_rollouts(self) -> None:
        """Restore stored rollouts of untrained steps into the scheduler.

        Rollouts on which the verifier failed are graded again, since the verifier may have been repaired. Slots of
        those that the trainer would refuse are sampled again.
        """
        shape = self._scheduler.shape
        step = self._scheduler.trained + 1
        failed = {shape.position_of_group(group): reason for group, reason in self._ledger.facts.failed_prompts.items()}
        is_next_fixed = await self._ledger.is_batch_fixed(step)
        graded: list[FinishedSlot[GradedRollout]] = []
        to_regrade: list[tuple[SlotId, Rollout]] = []
        for row in await self._ledger.read_rollouts():
            if row.step < 1:  # answers for the drafter's initialisation
                continue
            item = wire.graded_from_bytes(row.data)
            slot = SlotId(row.step, row.index, row.sample, row.attempt)
            # The next step's batch may be stored already. Its rollouts and rewards must not change: they are neither
            # sampled nor graded again.
            is_fixed = is_next_fixed and slot.step == step
            if not is_fixed and not self._is_well_formed(slot, item.rollout):
                continue
            if find_reward_fault(item.reward) and not is_fixed:
                to_regrade.append((slot, item.rollout))
            else:
                graded.append(FinishedSlot(slot, item, item.rollout.oldest_version))
        regraded = await asyncio.gather(*(self._grade_again(slot, rollout) for slot, rollout in to_regrade))
        graded += [found for found in regraded if found is not None]
        self.counters["restored"] += rebuild_schedule(self._scheduler, graded, failed)

    def _is_well_formed(self, slot: SlotId, stored: Rollout) -> bool:
        """Whether a stored rollout may be trained on. Earlier versions did not compare it with the policy."""
        try:
            self._check_rollout(slot, stored)
        except RecordInvalid as error:
            log.warning("stored_rollout_refused", slot=str(slot), replica=stored.replica_id, reason=str(error))
            return False
        return True

    async def _grade_again(self, slot: SlotId, rollout: Rollout) -> FinishedSlot[GradedRollout] | None:
        """Grade a stored rollout again. Returns None if the verifier still fails: then the slot is sampled again."""
        reward = await self._context.grader.grade(self._prompt_of(slot), rollout.text)
        if reward.value is None:
            return None
        graded = GradedRollout(rollout, reward)
        await self._ledger.keep_rollout(_to_stored_rollout(slot, graded))
        return FinishedSlot(slot, graded, rollout.oldest_version)

    def settle_step(self, step: int, rollouts: int) -> None:
        """Settle a step that is trained and durable. rollouts: graded ones of its groups, also those left out."""
        self.counters["settled"] += rollouts
        self.counters["of_failed_prompts"] += self._scheduler.mark_trained(step)
        self._in_flight = +self._in_flight  # forgets steps without any
        self._being_graded = +self._being_graded
        self._update_stopwatch()

    @property
    def unaccounted_rollouts(self) -> int:
        """Graded rollouts that are neither settled, nor held for their step, nor of a failed prompt. Must be 0.

        No rule drops a rollout for its age; this number would show if one were lost all the same.
        """
        count = self.counters
        came = count["graded"] + count["restored"]
        went = count["settled"] + count["of_failed_prompts"]
        return came - went - self._scheduler.measure_occupancy().held

    def open_gate(self) -> None:
        """Let new rollouts start."""
        self._gate_open = True
        self.wake_dispatcher()

    def close_gate(self) -> None:
        """Start no new rollouts until the gate opens. Rollouts in progress continue."""
        self._gate_open = False

    def reserve_seats(self, count: int) -> None:
        """Keep `count` seats of each replica free from now on; 0 ends that. Rollouts in progress keep their seats."""
        self._reserved_seats = count
        self.wake_dispatcher()

    def wake_dispatcher(self, replica: Replica | None = None) -> None:
        """Have the dispatcher look for slots for one replica that has a free seat, or for all replicas."""
        if replica is None:
            self._freed_replicas = None
        else:
            self._note_free_replica(replica)
        self._wake.set()

    def _note_free_replica(self, replica: Replica) -> None:
        if self._freed_replicas is not None:  # else the dispatcher looks at all of them anyway
            self._freed_replicas[replica.replica_id] = replica

    async def run(self) -> None:
        """Dispatch slots until cancelled, then cancel all tasks. `collect_step` raises its errors."""
        try:
            while True:
                self._wake.clear()  # before looking, so that a wake-up in the meantime is not lost
                self._resume_held_rollouts()
                freed = self._freed_replicas
                self._freed_replicas = {}
                if self._gate_open and not self._ledger.facts.is_paused:
                    self._dispatch_slots(freed)
                await self._wake.wait()
        except Exception as error:
            self._keep_failure(error)
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def collect_step(self) -> StepChoice[GradedRollout]:
        """Wait until all groups of the next step are finished, and return them. `changed` wakes it.

        Raises the error of a background task, such as ToolFailed, StoreFailed or a bug, so that it ends the run.
        """
        while True:
            choice = self._scheduler.choose_groups()
            if self.failure is not None:
                raise self.failure
            if choice is not None:
                return choice
            self.changed.clear()
            await self.changed.wait()

    # -- giving slots to replicas --------------------------------------------------------------------------------

    def _dispatch_slots(self, freed: dict[str, Replica] | None) -> None:
        """Start slots at the replicas in `freed`, which have free seats; None: at all serving replicas.

        `freed` keeps the cost of a finished rollout independent of the number of replicas.
        """
        if self._spec.schedule.max_policy_lag == 0:
            # Repeatable: a fixed split over all replicas, under the version that all of them serve.
            serving = self._registry.serving_replicas()
            version = min((replica.policy_version for replica in serving), default=-1)
            assigned = self._scheduler.assign_all_slots([replica.replica_id for replica in serving], version)
            for replica in serving:
                self._request_slots(replica, assigned[replica.replica_id], replica.policy_version, admit_together=True)
            return

        # Fill free seats. A replica that gets fewer slots than it has seats is looked at again at the next wake-up.
        most = self._spec.generation.max_live_rollouts - self._reserved_seats
        if freed is None:
            serving = self._registry.serving_replicas()
        else:
            serving = [r for r in freed.values() if r.state is ReplicaState.SERVING and not r.gone.is_set()]
        seats = [ReplicaSeats(r.replica_id, r.policy_version, r.inflight, most - r.inflight) for r in serving]
        assigned = assign_to_least_loaded(self._scheduler, seats)
        for replica in serving:
            self._request_slots(replica, assigned.get(replica.replica_id, []), replica.policy_version)
            if replica.inflight < most:
                self._note_free_replica(replica)

    def _resume_held_rollouts(self) -> None:
        """Resume rollouts that newly registered replicas hold from before the coordinator's restart."""
        # Only of versions that the ledger records as checked by a canary. Others may come from wrong weights.
        proved = self._ledger.facts.proved_version
        for replica in self._registry.take_holders():
            if replica.status is None or proved is None or replica.status.policy_version > proved:
                continue
            resumed: dict[int, list[SlotId]] = {}
            for item in replica.held_rollouts:
                slot = SlotId.from_name(item.rollout_id)
                if slot is not None and self._scheduler.resume_slot(slot, item.policy_version):
                    resumed.setdefault(item.policy_version, []).append(slot)
            for version, slots in resumed.items():
                self._context.count_outcome("resumed", len(slots))
                self._request_slots(replica, slots, version, resumes=True)

    def _request_slots(
        self,
        replica: Replica,
        slots: list[SlotId],
        oldest_version: int,
        *,
        admit_together: bool = False,
        resumes: bool = False,
    ) -> None:
        """Request the rollouts of INFLIGHT slots from a replica.

        oldest_version: version that the replica served when it was given the slots. The lag bound depends on it: the
        replica refuses to sample with an older version, and `_accept_rollout` refuses a rollout with an older token.
        resumes: the replica has these rollouts already.
        """
        if not slots:
            return
        self._add_load(replica, slots)
        opened = self._sessions.get(replica) or self._open_session(replica)
        requests = []
        for slot in slots:
            span = self._spans.open_rollout_span(slot, replica.replica_id, oldest_version)
            opened.asked[str(slot)] = _RequestedSlot(slot, oldest_version, span)
            prompt = self._prompt_of(slot)
            requests.append((self._make_request(slot, prompt, span.traceparent), prompt))
        # Rollouts outlive a broken call and this coordinator. Rollouts with several turns do not: only this process
        # knows their earlier turns.
        outlives_call = self._context.turns is None
        options = GenerateOptions(admit_together, oldest_version, outlives_call, resumes)
        try:
            opened.session.begin_rollouts(requests, options)
        except SpecrlError as error:
            self._registry.note_call_failure(replica, error)

    def _open_session(self, replica: Replica) -> _OpenSession:
        opened = self._sessions[replica] = _OpenSession(ReplicaSession(self._context.turns, replica.client.open_call()))
        self._spawn_task(self._receive_finished(replica, opened), f"session-{replica.replica_id}")
        return opened

    async def _receive_finished(self, replica: Replica, opened: _OpenSession) -> None:
        """Receive finished rollouts of one replica until it is lost. Then requeue those that it has not finished."""
        lost_by = "unanswered"
        try:
            async with abort_when_gone(replica), aclosing(opened.session.receive_finished()) as arrivals:
                async for ended in arrivals:
                    asked = opened.asked[ended.rollout.rollout_id]
                    end_rollout_span(asked.span, ended)
                    # Holds this rollout, and those behind it, during a canary. It stays in `asked` meanwhile, so that
                    # it is requeued if the canary fails.
                    await _wait_until_trusted(replica)
                    del opened.asked[ended.rollout.rollout_id]
                    self._remove_load(replica, [asked.slot])
                    self.wake_dispatcher(replica)
                    self._accept_rollout(asked.slot, ended, range(asked.oldest_version, replica.policy_version + 1))
        except ToolFailed:  # not the replica's fault: the tool pool is broken, which ends the run
            raise
        except SpecrlError as error:
            lost_by = type(error).__name__
            self._registry.note_call_failure(replica, error)
        finally:
            del self._sessions[replica]  # a new record of the same process opens a new session
            for asked in opened.asked.values():
                asked.span.end(lost_by)
            unfinished = [asked.slot for asked in opened.asked.values()]
            self._remove_load(replica, unfinished)
            lost = self._scheduler.requeue(unfinished)
            self._context.count_outcome("requeued", lost)
            self.wake_dispatcher(None if lost else replica)  # any replica may take the requeued slots

    def _add_load(self, replica: Replica, slots: Sequence[SlotId]) -> None:
        """Count rollouts that a replica was given."""
        replica.add_load(len(slots))
        self._in_flight.update(slot.step for slot in slots)
        self._update_stopwatch()

    def _remove_load(self, replica: Replica, slots: Sequence[SlotId]) -> None:
        """Count rollouts that a replica returned or lost."""
        replica.add_load(-len(slots))
        self._in_flight.subtract(slot.step for slot in slots)
        self._update_stopwatch()

    def _update_stopwatch(self) -> None:
        # Replicas are given the rollouts of the next step first. So if none is in flight, all of them are sampled.
        step = self._scheduler.trained + 1
        only_grading = self._being_graded[step] > 0 and not self._in_flight[step]
        self._stopwatch.set_rollouts(self._in_flight.total(), only_grading=only_grading)

    def _prompt_of(self, slot: SlotId) -> Prompt:
        return self._context.prompts.prompt(self._scheduler.shape.position_at(slot.step, slot.index))

    def _make_request(self, slot: SlotId, prompt: Prompt, traceparent: str) -> RolloutRequest:
        seed = derive_seed(self._spec.schedule.seed, slot.step, slot.index, slot.sample, slot.attempt)
        return RolloutRequest(
            rollout_id=str(slot),
            group_id=slot.group_id,
            sample_index=slot.sample,
            prompt_token_ids=prompt.token_ids,
            sampling=make_training_sampling(self._spec, seed),
            traceparent=traceparent,
        )

    # -- taking rollouts in --------------------------------------------------------------------------------------

    def _accept_rollout(self, slot: SlotId, ended: FinishedRollout, versions: range) -> None:
        """Check a finished rollout and have it graded. versions: policy versions that its tokens may have."""
        if not self._scheduler.mark_sampled(slot):
            return  # no longer needed: its group has failed
        if ended.failure:
            self._refuse_ungraded(slot, ended.failure)
            return
        rollout = ended.rollout
        try:
            self._check_rollout(slot, rollout, versions)
        except RecordInvalid as error:
            log.error("rollout_poisoned", slot=str(slot), replica=rollout.replica_id, reason=str(error))
            self._refuse_slot(slot, "poisoned", str(error))
            return
        self._spawn_task(self._grade_rollout(slot, rollout), f"grade-{slot}")

    def _check_rollout(self, slot: SlotId, rollout: Rollout, versions: range | None = None) -> None:
        """Raise RecordInvalid unless a slot's rollout may be trained on. versions: as in `Rollout.check`."""
        prompt_tokens = len(self._prompt_of(slot).token_ids)
        max_tokens = self._spec.generation.sampling.max_tokens
        self._context.check_rollout(rollout, prompt_tokens, max_tokens, versions)
        if self._spec.trainer.routing is Routing.REPLAY:
            rollout.check_replayed_experts(prompt_tokens)
        if self._spec.generation.sampling.is_truncated:
            rollout.check_recorded_sets()

    async def _grade_rollout(self, slot: SlotId, rollout: Rollout) -> None:
        with self._spans.open_reward_span(slot) as span:
            self._being_graded[slot.step] += 1
            self._update_stopwatch()
            try:
                reward = await self._context.grader.grade(self._prompt_of(slot), rollout.text)
            finally:
                self._being_graded[slot.step] -= 1
                self._update_stopwatch()
            span.end("" if reward.value is not None else "ungraded")
        if reward.value is None:
            self._refuse_ungraded(slot, reward.failure)
            return
        if reward.error and self._errors.get(reward.error, 0) < slot.step:  # each kind of error once per step
            self._errors[reward.error] = slot.step
            log.error("verifier_failed", error=reward.error, slot=str(slot), step=slot.step)
        if fault := find_reward_fault(reward):
            self._events.publish(VerdictFailed(fault))
        # Durable before the scheduler counts it: a step must not be chosen with a rollout that a restart would lose.
        graded = GradedRollout(rollout, reward)
        await self._ledger.keep_rollout(_to_stored_rollout(slot, graded))
        self._events.publish(RolloutGraded(self._prompt_of(slot), graded))
        # False, so not counted, if its group has failed meanwhile.
        self.counters["graded"] += self._scheduler.mark_graded(slot, graded, rollout.oldest_version)
        self.changed.set()

    def _refuse_ungraded(self, slot: SlotId, reason: str) -> None:
        log.error("rollout_ungraded", slot=str(slot), reason=reason)
        self._events.publish(VerdictFailed(reason))
        self._refuse_slot(slot, "ungraded", reason)

    def _refuse_slot(self, slot: SlotId, outcome: str, reason: str) -> None:
        self._scheduler.refuse_sample(slot, reason)
        self._context.count_outcome(outcome, 1)
        self.changed.set()
        self.wake_dispatcher()

    def _spawn_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._handle_task_end)

    def _handle_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._keep_failure(error)

    def _keep_failure(self, error: BaseException) -> None:
        """Keep the first error of a background task, for `collect_step` to raise."""
        self.failure = self.failure or error
        self.changed.set()


def _to_stored_rollout(slot: SlotId, graded: GradedRollout) -> StoredRollout:
    """Make the store's row of a graded rollout."""
    return StoredRollout(slot.step, slot.index, slot.sample, slot.attempt, wire.graded_to_bytes(graded))


def end_rollout_span(span: OpenSpan, ended: FinishedRollout) -> None:
    """End the span of a finished rollout, with its length and its finish reason."""
    span.add_attributes(tokens=len(ended.rollout.token_ids_T), finish_reason=ended.rollout.finish_reason.value)
    span.end("tool" if ended.failure else "")


async def _wait_until_trusted(replica: Replica) -> None:
    """Wait until the replica's rollouts may be stored: its update and canary have ended.

    Woken by `Replica.moved`, which is set when the record ends, too. Raises PeerUnavailable then.
    """
    while not replica.is_trusted and not replica.gone.is_set():
        replica.moved.clear()
        await replica.moved.wait()
    if replica.gone.is_set():
        raise PeerUnavailable(
            f"{replica.replica_id} was lost, or failed its canary, before its rollouts were stored; requeueing them"
        )
