"""Rollouts that outlive the call that asked for them, so that a coordinator that was started again gets what it began.

    LIVE --the engine finishes it--> FINISHED
    attended by a call <-> unattended --for generation.reattachS--> forgotten (a LIVE one is aborted)

A call that breaks leaves its rollouts unattended: they go on, and are kept when finished; so are those that were
delivered, since whoever took them may have died before they were stored. A replica lists what it holds when it
registers, and a request that `resumes` attends to what is here. Any other for the same name begins anew: what was begun
for somebody who thinks it lost may be older than the caller can use, or sampled from weights that were bad.

One task for each engine call; timers of the event loop end what nobody attends to. Called by the service alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from specrl.errors import EngineFailed, PeerUnavailable, SpecrlError
from specrl.generation.engine import Engine, answers
from specrl.records import HeldRollout, Rollout, RolloutRequest

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _Held:
    """policy_version: what was served when it was begun; none of its tokens is older.

    job: the engine call that it is part of. siblings: names of those of that call that are not forgotten.
    """

    request: RolloutRequest
    policy_version: int
    arrival: asyncio.Future[Rollout]
    job: asyncio.Task[None]
    siblings: set[str]
    readers: int = 0
    expiry: asyncio.TimerHandle | None = None


class Holdings:
    """What one replica has begun for its coordinator and not yet forgotten, by rollout id."""

    def __init__(self, engine: Engine, keep_s: float) -> None:
        self._engine, self._keep_s = engine, keep_s
        self._held: dict[str, _Held] = {}

    def held(self) -> list[HeldRollout]:
        """What a call may resume: live, or finished."""
        return [HeldRollout(name, held.policy_version) for name, held in self._held.items()]

    async def stream(
        self, requests: Sequence[RolloutRequest], policy_version: int, *, admit_together: bool, resumes: bool
    ) -> AsyncGenerator[Rollout]:
        """Yield each rollout when it is finished. Ending the iterator early ends nothing but the attention.

        policy_version: what is served now. resumes: take what is held under these names, and begin only the rest.
        """
        fresh = [request for request in requests if not (resumes and self._is_held(request))]
        for request in fresh:
            self._forget(request.rollout_id)
        for call in [fresh] if admit_together and fresh else [[request] for request in fresh]:
            self._begin(call, policy_version, admit_together)
        if resumes:
            log.info("rollouts_resumed", held=len(requests) - len(fresh), begun_anew=len(fresh))
        attended = [self._held[request.rollout_id] for request in requests]
        for held in attended:
            self._attend(held)
        try:
            pending = {held.arrival for held in attended}
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for arrival in done:
                    yield arrival.result()
        finally:
            for held in attended:
                self._leave(held)

    def close(self) -> None:
        """Abort and forget everything."""
        for name in list(self._held):
            self._forget(name)

    def _is_held(self, request: RolloutRequest) -> bool:
        held = self._held.get(request.rollout_id)
        return held is not None and held.request == request

    def _begin(self, requests: Sequence[RolloutRequest], policy_version: int, admit_together: bool) -> None:
        loop = asyncio.get_running_loop()
        arrivals = {request.rollout_id: loop.create_future() for request in requests}
        job = loop.create_task(self._run(requests, arrivals, admit_together))
        siblings = set(arrivals)
        for request in requests:
            arrival = arrivals[request.rollout_id]
            self._held[request.rollout_id] = _Held(request, policy_version, arrival, job, siblings)

    async def _run(
        self, requests: Sequence[RolloutRequest], arrivals: dict[str, asyncio.Future[Rollout]], admit_together: bool
    ) -> None:
        """One engine call; every arrival has a result or an error when it ends."""
        failure: SpecrlError = EngineFailed("an engine must finish what it takes, got less; the replica is at fault")
        try:
            async with aclosing(answers(self._engine, requests, admit_together)) as rollouts:
                async for rollout in rollouts:
                    if not arrivals[rollout.rollout_id].done():  # it may be forgotten, and its siblings not
                        arrivals[rollout.rollout_id].set_result(rollout)
        except SpecrlError as error:
            failure = error
        finally:
            for name, arrival in arrivals.items():
                if not arrival.done():
                    _fail(arrival, failure)
                    self._forget(name)

    def _attend(self, held: _Held) -> None:
        held.readers += 1
        if held.expiry is not None:
            held.expiry.cancel()

    def _leave(self, held: _Held) -> None:
        held.readers -= 1
        name = held.request.rollout_id
        if held.readers == 0 and self._held.get(name) is held:
            held.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._forget, name)

    def _forget(self, name: str) -> None:
        """Drop one; its engine call is aborted when it is the last of it."""
        held = self._held.pop(name, None)
        if held is None:
            return
        if held.expiry is not None:
            held.expiry.cancel()
        if not held.arrival.done():
            _fail(held.arrival, PeerUnavailable("a rollout must be kept, got dropped by its replica; ask for it again"))
        held.siblings.discard(name)
        if not held.siblings:
            held.job.cancel()


def _fail(arrival: asyncio.Future[Rollout], error: SpecrlError) -> None:
    arrival.set_exception(error)
    arrival.exception()  # nobody may be there to see it
