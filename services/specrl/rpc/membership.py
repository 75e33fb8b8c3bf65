"""How a replica or the trainer stays known to the coordinator.

    UNKNOWN --register--> KNOWN --heartbeat--> KNOWN
    KNOWN --coordinator answers "unknown" (it restarted) or cannot be reached--> UNKNOWN

The loop never gives up by itself: a coordinator that is down comes back under the same address, and a peer that nobody
wants is stopped by whoever started it. Pauses between attempts grow to `MAX_PAUSE_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from specrl.errors import RunInvalid, SpecrlError
from specrl.records import GenerationStatus, Peer
from specrl.rpc.clients import CoordinatorClient

MAX_PAUSE_S = 2.0

log = structlog.get_logger(__name__)


async def stay_registered(
    coordinator: CoordinatorClient,
    peer: Peer,
    generation_status: Callable[[], Awaitable[GenerationStatus]] | None = None,
) -> None:
    """Register and heartbeat until cancelled. `generation_status` rides along with a replica's heartbeats.

    Raises RunInvalid when the coordinator refuses this peer for good: it runs another run file.
    """
    interval_s, pause_s, is_known = 1.0, 0.1, False
    while True:
        try:
            if not is_known:
                reply = await coordinator.register(peer)
                interval_s, pause_s, is_known = reply.heartbeat_interval_s, 0.1, True
                log.info("registered", peer=peer.peer_id, run=reply.run)
            await asyncio.sleep(interval_s)
            status = await generation_status() if generation_status is not None else None
            is_known = await coordinator.heartbeat(peer.peer_id, peer.incarnation, status)
        except RunInvalid:
            raise
        except SpecrlError as error:
            if is_known:
                log.warning("coordinator_lost", reason=str(error))
            is_known = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


async def say_goodbye(coordinator: CoordinatorClient, peer: Peer) -> None:
    """Leave, best effort: a coordinator that is gone already needs no goodbye."""
    try:
        await coordinator.leave(peer.peer_id, peer.incarnation)
    except SpecrlError as error:
        log.info("goodbye_unheard", reason=str(error))
