"""The generation stage: keeps every serving replica busy with admissible rollouts, grades what comes back, stores it.

    scheduler slot -> replica's stream -> record check -> verifier -> store -> scheduler

One task per stream, one per verdict, all on the coordinator's event loop. Who wakes whom: `Registry.changed` and
`wake()` (a rollout finished, a version was committed, the gate opened) wake the dispatcher; `changed` wakes whoever
waits for a step to be ready. What bounds each wait: a dead replica breaks its stream or misses heartbeats
(`Replica.gone`), a verifier has the pool's time limit; a rollout that is held for its replica's canary is let go by the
loop after every transfer (`Registry.trust`), or asked again.

With maxPolicyLag 0 all rollouts of a step are dealt at once and admitted together, so that what each engine computes
depends on nothing but the step: that is what makes a run repeatable bit by bit.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from specrl.coordinator.parts import Grader, Parts
from specrl.coordinator.registry import Registry, Replica
from specrl.coordinator.scheduler import Scheduler, SlotId
from specrl.coordinator.store import StoredRollout
from specrl.errors import PeerUnavailable, RecordInvalid, SpecrlError
from specrl.records import GradedRollout, Prompt, Reward, Rollout, RolloutRequest, Sampling, wire
from specrl.spec import RunSpec
from specrl.telemetry import metrics

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


class RolloutStage:
    """Feeds replicas from the scheduler until cancelled."""

    def __init__(self, parts: Parts, scheduler: Scheduler[GradedRollout]) -> None:
        self._spec, self._scheduler, self._registry = parts.spec, scheduler, parts.registry
        self._store, self._prompts, self._grader = parts.store, parts.prompts, parts.grader
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._gate_open = False
        self._spare_seats = 0
        self.changed = asyncio.Event()
        self.counters: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def restore(self) -> None:
        """Take up the finished rollouts of untrained steps from the store."""
        for row in self._store.rollouts():
            slot = SlotId(row.step, row.index, row.sample, row.attempt)
            self.counters["restored"] += self._scheduler.restore(slot, wire.graded_from_bytes(row.data))

    def trained(self, step: int, rollouts: int) -> None:
        """Step `step` was trained on so many rollouts, and is durable."""
        self.counters["trained"] += rollouts
        self.counters["of_failed_prompts"] += self._scheduler.mark_trained(step)

    @property
    def discarded(self) -> int:
        """Graded rollouts that were neither trained, nor wait for their step, nor belong to a failed prompt.

        The scheduler has no rule that drops a rollout for its age; this counts whether any was lost all the same.
        """
        count = self.counters
        came, went = count["graded"] + count["restored"], count["trained"] + count["of_failed_prompts"]
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

    def wake(self) -> None:
        """Look again for work to give out."""
        self._wake.set()

    async def run(self) -> None:
        """Give out work until cancelled; then abort every stream."""
        try:
            while True:
                self._wake.clear()
                if self._gate_open:
                    self._dispatch()
                await self._wake.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def collect(self, step: int) -> list[tuple[int, list[GradedRollout]]]:
        """Wait until step `step` is ready; returns its complete groups in stream order.

        Raises whatever broke a stream's or verdict's task (a bug or a dead store), so that the run ends with it.
        """
        while not self._scheduler.is_ready(step):
            self.raise_failure()
            self.changed.clear()
            await self.changed.wait()
        self.raise_failure()
        return self._scheduler.results(step)

    def raise_failure(self) -> None:
        """Raise what broke one of this stage's tasks, if anything did."""
        if self.failure is not None:
            raise self.failure

    # -- out -----------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        serving = self._registry.serving()
        if self._spec.schedule.max_policy_lag == 0:
            version = min((replica.policy_version for replica in serving), default=-1)
            dealt = self._scheduler.deal([replica.replica_id for replica in serving], version)
            for replica in serving:
                self._start(replica, dealt[replica.replica_id], admit_together=True)
            return
        for replica in serving:
            room = self._spec.generation.max_live_rollouts - self._spare_seats - replica.inflight
            if room > 0:
                slots = self._scheduler.take(replica.replica_id, replica.policy_version, room)
                self._start(replica, slots, admit_together=False)

    def _start(self, replica: Replica, slots: list[SlotId], *, admit_together: bool) -> None:
        if slots:
            replica.inflight += len(slots)
            self._spawn(self._stream(replica, slots, admit_together), f"stream-{replica.replica_id}")

    async def _stream(self, replica: Replica, slots: list[SlotId], admit_together: bool) -> None:
        """One Generate call: INFLIGHT slots of one replica until each came back or the replica is lost."""
        waiting = {str(slot): slot for slot in slots}
        oldest = max(slot.step for slot in slots) - 1 - self._spec.schedule.max_policy_lag
        requests = [self._request(slot) for slot in slots]
        gone = asyncio.ensure_future(replica.gone.wait())
        stream = replica.client.generate(requests, admit_together, max(oldest, 0))
        try:
            while waiting:
                arrival = asyncio.ensure_future(anext(stream, None))
                try:
                    await asyncio.wait({arrival, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not arrival.done():
                        raise PeerUnavailable(f"{replica.replica_id} must stay, got lost; its rollouts are requeued")
                    rollout = arrival.result()
                finally:  # also when this task is cancelled: a stream that is being read cannot be closed
                    arrival.cancel()
                    await asyncio.gather(arrival, return_exceptions=True)
                if rollout is None:
                    break
                await _until_trusted(replica, gone)
                slot = waiting.pop(rollout.rollout_id, None)
                if slot is not None:
                    replica.inflight -= 1
                    self._accept(slot, rollout)
        except SpecrlError as error:
            self._registry.fail(replica, error)
        finally:
            gone.cancel()
            await stream.aclose()
            replica.inflight -= len(waiting)
            lost = self._scheduler.requeue(waiting.values())
            self._count("requeued", lost)
            self.wake()

    def _request(self, slot: SlotId) -> RolloutRequest:
        prompt = self._prompts.prompt(self._position(slot))
        seed = seed_of(self._spec.schedule.seed, slot.step, slot.index, slot.sample, slot.attempt)
        return RolloutRequest(
            rollout_id=str(slot),
            group_id=slot.group_id,
            sample_index=slot.sample,
            prompt_token_ids=prompt.token_ids,
            sampling=training_sampling(self._spec, seed),
        )

    def _position(self, slot: SlotId) -> int:
        return (slot.step - 1) * self._spec.schedule.prompts_per_step + slot.index

    # -- back ----------------------------------------------------------------------------------------------------

    def _accept(self, slot: SlotId, rollout: Rollout) -> None:
        if not self._scheduler.sampled(slot):
            return
        try:
            rollout.check(self._spec.generation.sampling.max_tokens)
        except RecordInvalid as error:
            log.error("rollout_poisoned", slot=str(slot), replica=rollout.replica_id, reason=str(error))
            self._refuse(slot, "poisoned", str(error))
            return
        self._spawn(self._grade(slot, rollout), f"grade-{slot}")
        self.wake()

    async def _grade(self, slot: SlotId, rollout: Rollout) -> None:
        reward = await self._grader.grade(self._prompts.prompt(self._position(slot)), rollout.text)
        if reward.value is None:
            log.error("rollout_ungraded", slot=str(slot), reason=reward.failure)
            self._refuse(slot, "ungraded", reward.failure)
            return
        graded = GradedRollout(rollout, reward)
        row = StoredRollout(slot.step, slot.index, slot.sample, slot.attempt, wire.graded_to_bytes(graded))
        self._store.put_rollout(row)
        self.counters["graded"] += self._scheduler.graded(slot, graded)
        self.changed.set()

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
        if not task.cancelled() and task.exception() is not None:
            self.failure = self.failure or task.exception()
            self.changed.set()


async def _until_trusted(replica: Replica, gone: asyncio.Future[Any]) -> None:
    """Wait until an update and its canary are over. Raises PeerUnavailable when the replica is gone by then."""
    while not replica.is_trusted and not replica.gone.is_set():
        replica.moved.clear()
        moved = asyncio.ensure_future(replica.moved.wait())
        await asyncio.wait({moved, gone}, return_when=asyncio.FIRST_COMPLETED)
        moved.cancel()
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
    registry: Registry,
    grader: Grader | None,
    requests: Sequence[tuple[RolloutRequest, Prompt]],
    keep: Callable[[Rollout], None] | None = None,
) -> list[GradedRollout]:
    """Rollouts outside the stream of steps (validation, drafter initialisation), spread over the serving replicas.

    Returns them in request order; `keep` is called with each as soon as it is finished. What a lost replica still had
    is asked of another one. Without a grader every reward is ungraded. Raises PeerUnavailable when no replica is left.
    """
    finished: dict[str, Rollout] = {}
    while len(finished) < len(requests):
        serving = registry.serving()
        if not serving:
            raise PeerUnavailable("at least one replica must serve, got none; wait for one to register")
        open_requests = [request for request, _ in requests if request.rollout_id not in finished]

        async def ask(replica: Replica, share: list[RolloutRequest]) -> None:
            try:
                async for rollout in replica.client.generate(share, True, 0):
                    finished[rollout.rollout_id] = rollout
                    if keep is not None:
                        keep(rollout)
            except PeerUnavailable as error:
                registry.remove(replica, str(error))

        count = len(serving)
        await asyncio.gather(*(ask(r, open_requests[place::count]) for place, r in enumerate(serving)))
    rollouts = [finished[request.rollout_id] for request, _ in requests]
    if grader is None:
        return [GradedRollout(rollout, Reward(None, "not graded")) for rollout in rollouts]
    rewards = await asyncio.gather(
        *(grader.grade(prompt, rollout.text) for rollout, (_, prompt) in zip(rollouts, requests, strict=True))
    )
    return [GradedRollout(rollout, reward) for rollout, reward in zip(rollouts, rewards, strict=True)]
