"""How a replica or the trainer stays known to the coordinator.

    UNKNOWN --register--> KNOWN --heartbeat--> KNOWN
    KNOWN --coordinator answers "unknown" (it restarted) or cannot be reached--> UNKNOWN
    any --told to stop, or the coordinator answers "leave"--> LEAVING --drained, or nobody is there--> (ends)

The loop never gives up by itself: a coordinator that is down comes back under the same address, and a peer that nobody
wants is stopped by whoever started it. Pauses between attempts grow to `MAX_PAUSE_S`, less up to a half at random: the
peers of a run lose their coordinator at the same moment, and must not all ask the next one at the same moments.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence

import structlog

from specrl.errors import RunInvalid, SpecrlError
from specrl.records import GenerationStatus, HeldRollout, Peer
from specrl.rpc.clients import CoordinatorClient

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0

log = structlog.get_logger(__name__)


def draw_pauses(draw: Callable[[], float]) -> Iterator[float]:
    """Seconds to wait before each further attempt, without end. draw: uniform in [0, 1).

    A pause has a ceiling, which doubles from FIRST_PAUSE_S to MAX_PAUSE_S, and lies between its half and itself ("equal
    jitter"). So no peer asks again at once. "Full jitter", between 0 and the ceiling, would let some.
    """
    ceiling_s = FIRST_PAUSE_S
    while True:
        yield ceiling_s * (1.0 - draw() / 2)
        ceiling_s = min(2 * ceiling_s, MAX_PAUSE_S)


async def stay_registered(  # noqa: PLR0913 - the source of chance is a parameter for tests alone
    coordinator: CoordinatorClient,
    peer: Peer,
    generation_status: Callable[[], Awaitable[GenerationStatus]] | None = None,
    held: Callable[[], Sequence[HeldRollout]] = tuple,
    leaving: asyncio.Event | None = None,
    *,
    draw: Callable[[], float] = random.random,
) -> None:
    """Register and heartbeat until cancelled. `generation_status` rides along with all that a replica says.

    held: what a replica that registers holds from before.
    leaving: set when the coordinator wants the peer to leave; once it is set nobody registers any more.
    draw: uniform in [0, 1), for the pauses between attempts.
    Raises RunInvalid when the coordinator refuses this peer for good: it runs another run file.
    """
    leaving = leaving or asyncio.Event()
    interval_s, is_known, is_reported = 1.0, False, False
    pauses = draw_pauses(draw)
    while True:
        try:
            if not is_known and not leaving.is_set():
                status = await generation_status() if generation_status is not None else None
                reply = await coordinator.register(peer, status, held())
                interval_s, is_known, is_reported = reply.heartbeat_interval_s, True, False
                pauses = draw_pauses(draw)
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
            if not is_reported:
                log.warning("coordinator_lost" if is_known else "coordinator_not_reached", reason=str(error))
            is_known, is_reported = False, True
            await asyncio.sleep(next(pauses))


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
