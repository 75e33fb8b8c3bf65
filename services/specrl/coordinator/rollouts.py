"""The generation stage: keeps every serving replica busy with admissible rollouts, grades what comes back, stores it.

    scheduler slot -> replica's line -> record check -> verifier -> store -> scheduler

One task for each replica's line (the open call over which it is asked for all that it is given), one for each verdict,
all on the coordinator's event loop. Who wakes whom: `Registry.changed` and `wake()` (a rollout finished, a version was
committed, the gate opened, the run was resumed) wake the dispatcher; `changed` wakes whoever waits for a step to be
ready. What bounds each wait: a dead replica breaks its call or misses heartbeats (`Replica.gone`), a verifier has the
pool's time limit; a rollout that is held for its replica's canary is let go by the loop after every transfer
(`Registry.trust`), or asked again.

A replica that registers says what it holds from before the coordinator was started again: those rollouts are INFLIGHT
there once more, and nothing of them is computed twice (`_resume`).

With maxPolicyLag 0 all rollouts of a step are dealt at once and admitted together, so that what each engine computes
depends on nothing but the step: that is what makes a run repeatable bit by bit.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from specrl.coordinator.board import FAILED_PROMPTS
from specrl.coordinator.dispatch import Seats, share_out
from specrl.coordinator.learnable import fault_of
from specrl.coordinator.parts import Grader, Parts
from specrl.coordinator.registry import Replica, while_there
from specrl.coordinator.replica_states import ReplicaState
from specrl.coordinator.restart import Finished, Remains, take_up
from specrl.coordinator.scheduler import Choice, Scheduler, SlotId
from specrl.coordinator.store import StoredRollout
from specrl.coordinator.turns import Ended, Talk
from specrl.errors import EngineFailed, PeerUnavailable, RecordInvalid, SpecrlError, ToolFailed
from specrl.records import GradedRollout, Prompt, Reward, Rollout, RolloutRequest, Sampling, wire
from specrl.rpc.clients import Terms
from specrl.spec import RunSpec
from specrl.spec.trainer import Routing
from specrl.telemetry import metrics
from specrl.telemetry.spans import VERIFIERS, OpenSpan, SpanName

PROVED_VERSION = "provedVersion"
"""Fact of the store: newest policy version that every replica served and that its canary, where one was due, proved."""

log = structlog.get_logger(__name__)


def seed_of(run_seed: int, *place: object) -> int:
    """A 63-bit sampling seed that depends on nothing but the run's seed and the rollout's place."""
    digest = hashlib.blake2b(repr((run_seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def training_sampling(spec: RunSpec, seed: int) -> Sampling:
    """How a training rollout is drawn."""
    sampling = spec.generation.sampling
    return Sampling(
        max_tokens=sampling.max_tokens,
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=sampling.top_k,
        seed=seed,
        stop=sampling.stop,
    )


@dataclass(frozen=True)
class _Asked:
    """A slot that a replica was given, and the oldest version that a token of it may have."""

    slot: SlotId
    oldest_version: int
    span: OpenSpan


@dataclass
class _Line:
    """The call over which one replica is asked for rollouts for as long as it is there. asked: by rollout id."""

    talk: Talk
    asked: dict[str, _Asked] = field(default_factory=dict)


class RolloutStage:
    """Feeds replicas from the scheduler until cancelled."""

    def __init__(self, parts: Parts, scheduler: Scheduler[GradedRollout]) -> None:
        self._spec, self._scheduler, self._registry = parts.spec, scheduler, parts.registry
        self._store, self._prompts, self._grader = parts.store, parts.prompts, parts.grader
        self._turns, self._spans = parts.turns, parts.spans
        self._controls, self._samples, self._board = parts.controls, parts.samples, parts.board
        self._tasks: set[asyncio.Task[None]] = set()
        self._lines: dict[Replica, _Line] = {}
        self._wake = asyncio.Event()
        self._freed: dict[str, Replica] | None = None
        self._gate_open = False
        self._spare_seats = 0
        self.changed = asyncio.Event()
        self.counters: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self._errors: dict[str, int] = {}

    async def restore(self) -> None:
        """Take up from the store what is finished and not trained.

        A verdict on which the verifier failed is asked for again, since the verifier may have been repaired.
        """
        self.counters["restored"] += take_up(self._scheduler, await self._remains())

    async def _remains(self) -> Remains[GradedRollout]:
        shape, step = self._scheduler.shape, self._scheduler.trained + 1
        reasons = self._store.fact(FAILED_PROMPTS) or {}
        failed = {shape.position_of(group): reason for group, reason in reasons.items()}
        data = await self._store.batch(step)
        own = range(shape.position(step, 0), shape.position(step + 1, 0))
        batch = None if data is None else wire.batch_positions(data) or own
        rollouts: list[Finished[GradedRollout]] = []
        doubtful: list[tuple[SlotId, Rollout]] = []
        for row in await self._store.rollouts():
            if row.step < 1:  # not of the stream of prompts: the drafter's
                continue
            item = wire.graded_from_bytes(row.data)
            slot = SlotId(row.step, row.index, row.sample, row.attempt)
            is_fixed = batch is not None and shape.position(slot.step, slot.index) in batch
            if fault_of(item.reward) and not is_fixed:
                doubtful.append((slot, item.rollout))
            else:
                rollouts.append(Finished(slot, item, item.rollout.oldest_version))
        again = await asyncio.gather(*(self._graded_again(slot, rollout) for slot, rollout in doubtful))
        return Remains([*rollouts, *(found for found in again if found is not None)], failed, batch)

    async def _graded_again(self, slot: SlotId, rollout: Rollout) -> Finished[GradedRollout] | None:
        """Another verdict on a stored rollout; None when there is none now, and the slot has to be sampled again."""
        reward = await self._grader.grade(self._prompt(slot), rollout.text)
        if reward.value is None:
            return None
        graded = GradedRollout(rollout, reward)
        await self._store.put_rollout(_row(slot, graded))
        return Finished(slot, graded, rollout.oldest_version)

    def settled(self, step: int, rollouts: int) -> None:
        """Step `step` was trained, and is durable; its groups have so many rollouts, trained on or left out."""
        self.counters["settled"] += rollouts
        self.counters["of_failed_prompts"] += self._scheduler.mark_trained(step)

    @property
    def discarded(self) -> int:
        """Graded rollouts that were neither settled, nor wait for their step, nor belong to a failed prompt.

        The scheduler has no rule that drops a rollout for its age; this counts whether any was lost all the same.
        """
        count = self.counters
        came, went = count["graded"] + count["restored"], count["settled"] + count["of_failed_prompts"]
        return came - went - self._scheduler.occupancy().held

    def open_gate(self) -> None:
        """New rollouts may start from now on."""
        self._gate_open = True
        self.wake()

    def close_gate(self) -> None:
        """No new rollout starts until the gate opens; those under way go on."""
        self._gate_open = False

    def spare_seats(self, count: int) -> None:
        """Give no replica its last `count` seats from now on; 0 gives them all. Rollouts under way keep theirs."""
        self._spare_seats = count
        self.wake()

    def wake(self, replica: Replica | None = None) -> None:
        """Look again for work to give out: to one replica, a seat of which is free, or to all."""
        if replica is None:
            self._freed = None
        else:
            self._note_free(replica)
        self._wake.set()

    def _note_free(self, replica: Replica) -> None:
        if self._freed is not None:
            self._freed[replica.replica_id] = replica

    async def run(self) -> None:
        """Give out work until cancelled; then end every call."""
        try:
            while True:
                self._wake.clear()
                self._resume()
                freed, self._freed = self._freed, {}
                if self._gate_open and not self._controls.is_paused:
                    self._dispatch(freed)
                await self._wake.wait()
        except Exception as error:
            self._fail(error)
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def collect(self) -> Choice[GradedRollout]:
        """Wait until what the next step trains can be chosen; returns the choice.

        Raises whatever broke the dispatcher, or a line's or verdict's task (a bug or a dead store), so that the run
        ends with it.
        """
        while (choice := self._scheduler.choose()) is None:
            self.raise_failure()
            self.changed.clear()
            await self.changed.wait()
        self.raise_failure()
        self.wake()  # groups that the choice has taken stand in no other group's way any more
        return choice

    def raise_failure(self) -> None:
        """Raise what broke one of this stage's tasks, if anything did."""
        if self.failure is not None:
            raise self.failure

    # -- out -----------------------------------------------------------------------------------------------------

    def _dispatch(self, freed: dict[str, Replica] | None) -> None:
        """Give waiting slots to `freed`: replicas with free seats, those included that there was nothing for before.

        None: to all that serve. Looking at every replica for each rollout would cost more the more of them there are.
        """
        if self._spec.schedule.max_policy_lag == 0:
            serving = self._registry.serving()
            version = min((replica.policy_version for replica in serving), default=-1)
            dealt = self._scheduler.deal([replica.replica_id for replica in serving], version)
            for replica in serving:
                self._start(replica, dealt[replica.replica_id], admit_together=True)
            return
        most = self._spec.generation.max_live_rollouts - self._spare_seats
        replicas = {r.replica_id: r for r in (self._registry.serving() if freed is None else _serving(freed.values()))}
        dealt = share_out(
            self._scheduler,
            [Seats(name, r.policy_version, r.inflight, most - r.inflight) for name, r in replicas.items()],
        )
        for name, replica in replicas.items():
            self._start(replica, dealt.get(name, []), admit_together=False)
            if replica.inflight < most:
                self._note_free(replica)

    def _resume(self) -> None:
        """Take up what replicas hold since before this coordinator was started.

        Not from one whose last version no canary has proved, as far as is durable: what it sampled may be wrong.
        """
        proved = self._store.fact(PROVED_VERSION)
        for replica in self._registry.take_holders():
            if replica.status is None or proved is None or replica.status.policy_version > proved:
                continue
            resumed: dict[int, list[SlotId]] = {}
            for item in replica.held:
                slot = SlotId.parse(item.rollout_id)
                if slot is not None and self._scheduler.resume(slot, item.policy_version):
                    resumed.setdefault(item.policy_version, []).append(slot)
            for version, slots in resumed.items():
                self._count("resumed", len(slots))
                self._begin(replica, slots, version, resumes=True)

    def _start(self, replica: Replica, slots: list[SlotId], *, admit_together: bool) -> None:
        if slots:
            self._begin(replica, slots, replica.policy_version, admit_together=admit_together)

    def _begin(
        self,
        replica: Replica,
        slots: list[SlotId],
        oldest_version: int,
        *,
        admit_together: bool = False,
        resumes: bool = False,
    ) -> None:
        """Ask the replica for INFLIGHT slots. What it is asked for outlives the call, and this coordinator.

        Not where a rollout has several turns: a coordinator that was started again does not know those before.
        oldest_version: what the replica served when the slots were given to it. The lag bound rests on it, so the
        replica refuses to sample under an older one, and a rollout that has an older token is refused here.
        """
        replica.add_load(len(slots))
        line = self._lines.get(replica) or self._open(replica)
        requests = []
        for slot in slots:
            span = self._spans.rollout(slot, replica.replica_id, oldest_version)
            line.asked[str(slot)] = _Asked(slot, oldest_version, span)
            requests.append((self._request(slot, span.traceparent), self._prompt(slot)))
        outlives_call = self._turns is None
        try:
            line.talk.begin(requests, Terms(admit_together, oldest_version, outlives_call, resumes))
        except SpecrlError as error:
            self._registry.fail(replica, error)

    def _open(self, replica: Replica) -> _Line:
        line = self._lines[replica] = _Line(Talk(self._turns, replica.client.converse()))
        self._spawn(self._listen(replica, line), f"line-{replica.replica_id}")
        return line

    async def _listen(self, replica: Replica, line: _Line) -> None:
        """Take what a replica finishes, until it is gone; what it then has not finished waits again.

        While one rollout is held for the replica's canary, those behind it are not read.
        """
        lost_by = "unanswered"
        try:
            async with while_there(replica), aclosing(line.talk.rollouts()) as arrivals:
                async for ended in arrivals:
                    asked = line.asked[ended.rollout.rollout_id]
                    _came_back(asked.span, ended)
                    await _until_trusted(replica)
                    del line.asked[ended.rollout.rollout_id]
                    replica.add_load(-1)
                    self.wake(replica)
                    self._accept(asked.slot, ended, range(asked.oldest_version, replica.policy_version + 1))
        except ToolFailed:  # no replica's fault: no call can be answered any more, and the run ends
            raise
        except SpecrlError as error:
            lost_by = type(error).__name__
            self._registry.fail(replica, error)
        finally:
            del self._lines[replica]
            for asked in line.asked.values():
                asked.span.end(lost_by)
            replica.add_load(-len(line.asked))
            lost = self._scheduler.requeue(asked.slot for asked in line.asked.values())
            self._count("requeued", lost)
            self.wake(None if lost else replica)

    def _prompt(self, slot: SlotId) -> Prompt:
        return self._prompts.prompt(self._scheduler.shape.position(slot.step, slot.index))

    def _request(self, slot: SlotId, traceparent: str) -> RolloutRequest:
        seed = seed_of(self._spec.schedule.seed, slot.step, slot.index, slot.sample, slot.attempt)
        return RolloutRequest(
            rollout_id=str(slot),
            group_id=slot.group_id,
            sample_index=slot.sample,
            prompt_token_ids=self._prompt(slot).token_ids,
            sampling=training_sampling(self._spec, seed),
            traceparent=traceparent,
        )

    # -- back ----------------------------------------------------------------------------------------------------

    def _accept(self, slot: SlotId, ended: Ended, versions: range) -> None:
        if not self._scheduler.sampled(slot):
            return
        if ended.failure:
            self._ungraded(slot, ended.failure)
            return
        rollout = ended.rollout
        try:
            rollout.check(self._spec.generation.sampling.max_tokens, versions)
            if self._spec.trainer.routing is Routing.REPLAY:
                rollout.check_replayed(len(self._prompt(slot).token_ids))
        except RecordInvalid as error:
            log.error("rollout_poisoned", slot=str(slot), replica=rollout.replica_id, reason=str(error))
            self._refuse(slot, "poisoned", str(error))
            return
        self._spawn(self._grade(slot, rollout), f"grade-{slot}")

    async def _grade(self, slot: SlotId, rollout: Rollout) -> None:
        with self._spans.reward(slot) as span:
            reward = await self._grader.grade(self._prompt(slot), rollout.text)
            span.end("" if reward.value is not None else "ungraded")
        if reward.value is None:
            self._ungraded(slot, reward.failure)
            return
        if reward.error and self._errors.get(reward.error, 0) < slot.step:  # once a step
            self._errors[reward.error] = slot.step
            log.error("verifier_erred", error=reward.error, slot=str(slot), step=slot.step)
        if fault := fault_of(reward):
            self._board.verdict_failed(fault)
        graded = GradedRollout(rollout, reward)
        await self._store.put_rollout(_row(slot, graded))
        self._samples.offer(self._prompt(slot), graded)
        self.counters["graded"] += self._scheduler.graded(slot, graded, rollout.oldest_version)
        self.changed.set()

    def _ungraded(self, slot: SlotId, reason: str) -> None:
        log.error("rollout_ungraded", slot=str(slot), reason=reason)
        self._board.verdict_failed(reason)
        self._refuse(slot, "ungraded", reason)

    def _refuse(self, slot: SlotId, outcome: str, reason: str) -> None:
        self._scheduler.refuse(slot, reason)
        self._count(outcome, 1)
        self.changed.set()
        self.wake()

    def _count(self, outcome: str, count: int) -> None:
        self.counters[outcome] += count
        metrics.ROLLOUTS.labels(self._spec.name, outcome).inc(count)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Have `collect` raise it."""
        self.failure = self.failure or error
        self.changed.set()


def _row(slot: SlotId, graded: GradedRollout) -> StoredRollout:
    """A graded rollout of a slot, as it is kept."""
    return StoredRollout(slot.step, slot.index, slot.sample, slot.attempt, wire.graded_to_bytes(graded))


def _serving(replicas: Iterable[Replica]) -> list[Replica]:
    """Those that may be given work still."""
    return [r for r in replicas if r.state is ReplicaState.SERVING and not r.gone.is_set()]


def _came_back(span: OpenSpan, ended: Ended) -> None:
    """End the span of a rollout that its replica has finished, with what is worth seeing of it."""
    span.note(tokens=len(ended.rollout.token_ids_T), finish_reason=ended.rollout.finish_reason.value)
    span.end("tool" if ended.failure else "")


async def _until_trusted(replica: Replica) -> None:
    """Wait until an update and its canary are over. Raises PeerUnavailable when the replica is gone by then."""
    while not replica.is_trusted and not replica.gone.is_set():
        replica.moved.clear()
        events = [asyncio.ensure_future(event.wait()) for event in (replica.moved, replica.gone)]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()
    if replica.gone.is_set():
        raise PeerUnavailable(
            f"{replica.replica_id} must be trusted, got lost or started over; its rollouts are requeued"
        )


def side_requests(
    kind: str, prompts: Sequence[Prompt], samples: int, sampling: Callable[[int, int], Sampling]
) -> list[tuple[RolloutRequest, Prompt]]:
    """Requests outside the stream of steps: `samples` for each prompt; `sampling` is asked with (place, sample)."""
    return [
        (
            RolloutRequest(
                rollout_id=f"{kind}-{place:06d}-{sample}",
                group_id=f"{kind}-{place:06d}",
                sample_index=sample,
                prompt_token_ids=prompt.token_ids,
                sampling=sampling(place, sample),
            ),
            prompt,
        )
        for place, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


async def sample_and_grade(
    parts: Parts,
    grader: Grader | None,
    requests: Sequence[tuple[RolloutRequest, Prompt]],
    keep: Callable[[Rollout], Awaitable[None]] | None = None,
) -> list[GradedRollout]:
    """Rollouts outside the stream of steps (validation, drafter initialisation), spread over the serving replicas.

    Returns them in request order; `keep` is called with each as soon as it is finished. What a lost replica still had
    is asked of another one. Without a grader every reward is ungraded, and so is that of a rollout whose tool failed.
    Raises PeerUnavailable when no replica is left.
    """
    registry = parts.registry

    def begin(replica: Replica, request: RolloutRequest) -> OpenSpan:
        return parts.spans.recorder.begin(SpanName.ROLLOUT, replica.replica_id, rollout=request.rollout_id)

    finished: dict[str, Ended] = {}
    while len(finished) < len(requests):
        serving = registry.serving()
        if not serving:
            raise PeerUnavailable("at least one replica must serve, got none; wait for one to register")
        open_requests = [item for item in requests if item[0].rollout_id not in finished]

        async def ask(replica: Replica, share: list[tuple[RolloutRequest, Prompt]]) -> None:
            spans = {request.rollout_id: begin(replica, request) for request, _ in share}
            traced = [
                (replace(request, traceparent=spans[request.rollout_id].traceparent), prompt)
                for request, prompt in share
            ]
            lost_by = "unanswered"
            try:
                talk = Talk(parts.turns, replica.client.converse())
                talk.begin(traced, Terms(admit_together=True, min_policy_version=0))
                talk.end()
                async with while_there(replica), aclosing(talk.rollouts()) as arrivals:
                    async for ended in arrivals:
                        finished[ended.rollout.rollout_id] = ended
                        _came_back(spans[ended.rollout.rollout_id], ended)
                        if keep is not None:
                            await keep(ended.rollout)
            except (PeerUnavailable, EngineFailed) as error:
                lost_by = type(error).__name__
                registry.fail(replica, error)
            finally:
                for span in spans.values():  # those that came back have ended before
                    span.end(lost_by)

        asked = serving[: len(open_requests)]  # a call without requests is refused
        await asyncio.gather(*(ask(r, open_requests[place :: len(asked)]) for place, r in enumerate(asked)))

    async def graded(ended: Ended, prompt: Prompt) -> GradedRollout:
        if ended.failure or grader is None:
            return GradedRollout(ended.rollout, Reward(None, ended.failure or "not graded"))
        with parts.spans.recorder.begin(SpanName.REWARD, VERIFIERS, rollout=ended.rollout.rollout_id):
            return GradedRollout(ended.rollout, await grader.grade(prompt, ended.rollout.text))

    return await asyncio.gather(*(graded(finished[request.rollout_id], prompt) for request, prompt in requests))
