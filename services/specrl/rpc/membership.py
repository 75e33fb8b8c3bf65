"""How a replica or the trainer stays known to the coordinator.

    UNKNOWN --register--> KNOWN --heartbeat--> KNOWN
    KNOWN --coordinator answers "unknown" (it restarted) or cannot be reached--> UNKNOWN
    any --told to stop, or the coordinator answers "leave"--> LEAVING --drained, or nobody is there--> (ends)

The loop never gives up by itself: a coordinator that is down comes back under the same address, and a peer that nobody
wants is stopped by whoever started it. Pauses between attempts grow to `MAX_PAUSE_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from specrl.errors import RunInvalid, SpecrlError
from specrl.records import GenerationStatus, HeldRollout, Peer
from specrl.rpc.clients import CoordinatorClient

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0

log = structlog.get_logger(__name__)


async def stay_registered(
    coordinator: CoordinatorClient,
    peer: Peer,
    generation_status: Callable[[], Awaitable[GenerationStatus]] | None = None,
    held: Callable[[], Sequence[HeldRollout]] = tuple,
    leaving: asyncio.Event | None = None,
) -> None:
    """Register and heartbeat until cancelled. `generation_status` rides along with all that a replica says.

    held: what a replica that registers holds from before.
    leaving: set when the coordinator wants the peer to leave; once it is set nobody registers any more.
    Raises RunInvalid when the coordinator refuses this peer for good: it runs another run file.
    """
    leaving = leaving or asyncio.Event()
    interval_s, pause_s, is_known = 1.0, FIRST_PAUSE_S, False
    while True:
        try:
            if not is_known and not leaving.is_set():
                status = await generation_status() if generation_status is not None else None
                reply = await coordinator.register(peer, status, held())
                interval_s, pause_s, is_known = reply.heartbeat_interval_s, FIRST_PAUSE_S, True
                log.info("registered", peer=peer.peer_id, run=reply.run)
            await asyncio.sleep(interval_s)
            status = await generation_status() if generation_status is not None else None
            answer = await coordinator.heartbeat(peer.peer_id, peer.incarnation, status)
            is_known = answer.is_known
            if answer.must_leave and not leaving.is_set():
                log.info("dismissed", peer=peer.peer_id)
                leaving.set()
        except RunInvalid:
            raise
        except SpecrlError as error:
            if is_known or pause_s == FIRST_PAUSE_S:
                log.warning("coordinator_lost" if is_known else "coordinator_not_reached", reason=str(error))
            is_known = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


async def drain_when_told(
    coordinator: CoordinatorClient, peer: Peer, leaving: asyncio.Event, told: Awaitable[None], drain_s: float
) -> None:
    """Wait until `told` is done or `leaving` is set; then drain, for `drain_s` at most, and return.

    A coordinator that cannot be reached takes no rollouts: then there is nothing to wait for.
    """
    waits = [asyncio.ensure_future(told), asyncio.ensure_future(leaving.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    leaving.set()
    log.info("drain_begun", peer=peer.peer_id, at_most_s=drain_s)
    try:
        await coordinator.leave(peer.peer_id, peer.incarnation, drain_s)
    except SpecrlError as error:
        log.info("drain_broken_off", reason=str(error))


async def say_goodbye(coordinator: CoordinatorClient, peer: Peer) -> None:
    """Leave, best effort: a coordinator that is gone already needs no goodbye."""
    try:
        await coordinator.leave(peer.peer_id, peer.incarnation)
    except SpecrlError as error:
        log.info("goodbye_unheard", reason=str(error))
