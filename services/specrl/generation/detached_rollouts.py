"""Keeps rollouts alive after the call that requested them breaks, so that a restarted coordinator can resume them.

    LIVE --the engine finishes it--> FINISHED
    attached to a call <-> detached --after generation.reattachS--> forgotten (a LIVE one is aborted)

When a call breaks, its rollouts become detached: the engine continues them, and results are kept. A delivered rollout
is kept, too, since the coordinator may have died before it stored it. A replica lists its rollouts when it registers,
as many as fit into the message.

A request with `resumes` attaches to a rollout that is held under its id. Any other request starts the rollout again.
The caller has given the held one up: it may be older than the caller accepts, or sampled from corrupt weights.

Each engine call has one task. Timers of the event loop forget detached rollouts. Called by the service only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from specrl.errors import EngineFailed, PeerUnavailable, SpecrlError
from specrl.generation.engine import Engine, generate_checked
from specrl.records import HeldRollout, Rollout, RolloutRequest
from specrl.rpc.limits import CONTROL_BYTES

HELD_BYTES = CONTROL_BYTES // 2
"""Room for held rollouts in a registration, whose other half is left for the status."""

HELD_FRAME_BYTES = 20
"""Bytes of a held rollout beside its id, rounded up: three tags, two lengths of two bytes, and a version of ten."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _HeldRollout:
    """One rollout that is held.

    policy_version: served when the rollout began, so a lower bound for all of its tokens.
    arrival: its result or error. job: the task of its engine call.
    siblings: ids of the rollouts of that call that are still held; the set is shared among them.
    readers: calls that are attached. expiry: the timer that forgets it while detached.
    """

    request: RolloutRequest
    policy_version: int
    arrival: asyncio.Future[Rollout]
    job: asyncio.Task[None]
    siblings: set[str]
    readers: int = 0
    expiry: asyncio.TimerHandle | None = None


class DetachedRollouts:
    """The rollouts that one replica holds for its coordinator, by rollout id.

    keep_s: seconds for which a detached rollout is kept.
    """

    def __init__(self, engine: Engine, keep_s: float) -> None:
        self._engine = engine
        self._keep_s = keep_s
        self._held: dict[str, _HeldRollout] = {}

    def list_held(self) -> list[HeldRollout]:
        """List the rollouts that a call can resume, live and finished ones, as many as a registration has room for.

        Live ones come first, then the newest. Rollouts without room are sampled again.
        """
        newest_first = reversed(self._held.items())
        found: list[HeldRollout] = []
        left_bytes = HELD_BYTES
        for name, held in sorted(newest_first, key=lambda item: item[1].arrival.done()):
            left_bytes -= len(name.encode()) + HELD_FRAME_BYTES
            if left_bytes < 0:
                break
            found.append(HeldRollout(name, held.policy_version))
        return found

    async def stream_finished(
        self, requests: Sequence[RolloutRequest], policy_version: int, *, admit_together: bool, resumes: bool
    ) -> AsyncGenerator[Rollout]:
        """Yield each rollout when it finishes. Closing the iterator early detaches from the rollouts; they go on.

        policy_version: the version that the engine serves now.
        resumes: attach to rollouts that are held for the same requests, and start only the others.
        """
        fresh = [request for request in requests if not (resumes and self._is_held(request))]
        for request in fresh:  # a held rollout under the same id is given up
            self._drop_held(request.rollout_id)
        for call in [fresh] if admit_together and fresh else [[request] for request in fresh]:
            self._start_call(call, policy_version, admit_together)
        if resumes:
            log.info("rollouts_resumed", held=len(requests) - len(fresh), started=len(fresh))
        attended = [self._held[request.rollout_id] for request in requests]
        for held in attended:
            self._attach_reader(held)
        try:
            pending = {held.arrival for held in attended}
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for arrival in done:
                    yield arrival.result()
        finally:
            for held in attended:
                self._detach_reader(held)

    def close(self) -> None:
        """Abort and forget all rollouts."""
        for name in list(self._held):
            self._drop_held(name)

    def _is_held(self, request: RolloutRequest) -> bool:
        held = self._held.get(request.rollout_id)
        return held is not None and held.request == request  # same prompt and seed, too

    def _start_call(self, requests: Sequence[RolloutRequest], policy_version: int, admit_together: bool) -> None:
        loop = asyncio.get_running_loop()
        arrivals = {request.rollout_id: loop.create_future() for request in requests}
        job = loop.create_task(self._run_call(requests, arrivals, admit_together))
        siblings = set(arrivals)
        for request in requests:
            arrival = arrivals[request.rollout_id]
            self._held[request.rollout_id] = _HeldRollout(request, policy_version, arrival, job, siblings)

    async def _run_call(
        self, requests: Sequence[RolloutRequest], arrivals: dict[str, asyncio.Future[Rollout]], admit_together: bool
    ) -> None:
        """Run one engine call. When it ends, every arrival has a result or an error."""
        failure: SpecrlError = EngineFailed("the engine call ended before its rollouts; they are sampled again")
        try:
            async with aclosing(generate_checked(self._engine, requests, admit_together)) as rollouts:
                async for rollout in rollouts:
                    if not arrivals[rollout.rollout_id].done():  # it was forgotten while siblings kept the call alive
                        arrivals[rollout.rollout_id].set_result(rollout)
        except SpecrlError as error:
            failure = error
        finally:
            for name, arrival in arrivals.items():
                if not arrival.done():
                    _set_error(arrival, failure)
                    self._drop_held(name)

    def _attach_reader(self, held: _HeldRollout) -> None:
        held.readers += 1
        if held.expiry is not None:
            held.expiry.cancel()

    def _detach_reader(self, held: _HeldRollout) -> None:
        held.readers -= 1
        name = held.request.rollout_id
        if held.readers == 0 and self._held.get(name) is held:
            held.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._drop_held, name)

    def _drop_held(self, name: str) -> None:
        """Drop a rollout. Dropping the last one of an engine call aborts the call."""
        held = self._held.pop(name, None)
        if held is None:
            return
        if held.expiry is not None:
            held.expiry.cancel()
        if not held.arrival.done():
            _set_error(held.arrival, PeerUnavailable(f"the replica dropped rollout {name}; it is requested again"))
        held.siblings.discard(name)
        if not held.siblings:
            held.job.cancel()


def _set_error(arrival: asyncio.Future[Rollout], error: SpecrlError) -> None:
    arrival.set_exception(error)
    arrival.exception()  # marks it as retrieved: without a reader asyncio would log an unhandled exception
