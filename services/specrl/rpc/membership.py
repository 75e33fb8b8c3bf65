"""Keeps a replica or the trainer registered with the coordinator.

    UNKNOWN --register--> KNOWN --heartbeat--> KNOWN
    KNOWN --coordinator replies "unknown" (it restarted) or is unreachable--> UNKNOWN
    any --signal, or the coordinator replies "leave"--> LEAVING --drained, or coordinator unreachable--> (ends)

The loop retries without a limit. A restarted coordinator has the same address, and the launcher or the operator stops a
peer that is no longer needed. Pauses between attempts double up to `MAX_PAUSE_S`. They have jitter, because all peers
of a run lose their coordinator at the same moment and must not all reconnect at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

import structlog

from specrl.errors import RunInvalid, SpecrlError
from specrl.records import GenerationStatus, HeldRollout, Peer
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.lifetime import run_until_first_ends

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
"""Bounds how long a peer stays away from a coordinator that is back."""

log = structlog.get_logger(__name__)


def draw_pauses(draw: Callable[[], float]) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt, for ever. draw: uniform in [0, 1).

    The ceiling of a pause doubles from FIRST_PAUSE_S to MAX_PAUSE_S. A pause lies between half of its ceiling and the
    ceiling ("equal jitter"). "Full jitter", between 0 and the ceiling, would let some peers retry at once.
    """
    ceiling_s = FIRST_PAUSE_S
    while True:
        yield ceiling_s * (1.0 - draw() / 2)
        ceiling_s = min(2 * ceiling_s, MAX_PAUSE_S)


async def stay_registered(  # noqa: PLR0913 - the source of chance is a parameter for tests alone
    coordinator: CoordinatorClient,
    peer: Peer,
    generation_status: Callable[[], Awaitable[GenerationStatus]] | None = None,
    list_held_rollouts: Callable[[], Sequence[HeldRollout]] = tuple,
    leaving: asyncio.Event | None = None,
    *,
    draw: Callable[[], float] = random.random,  # noqa: S311 - spreads retries; nothing secret
) -> None:
    """Register and send heartbeats until cancelled.

    generation_status: a replica's status, sent with registrations and heartbeats. list_held_rollouts: lists the
    rollouts that a replica holds, sent with registrations. leaving: is set here when the coordinator dismisses the
    peer; while it is set, the peer does not register again. draw: uniform in [0, 1), for the pauses between attempts.

    Raises RunInvalid if the coordinator refuses the peer for good, because its run file differs.
    """
    leaving = leaving or asyncio.Event()
    interval_s = 1.0  # until the first registration says
    is_known = False
    is_reported = False  # whether this loss of the coordinator has been logged: once, not once per attempt
    pauses = draw_pauses(draw)
    while True:
        try:
            if not is_known and not leaving.is_set():
                status = await generation_status() if generation_status is not None else None
                reply = await coordinator.register_peer(peer, status, list_held_rollouts())
                interval_s = reply.heartbeat_interval_s
                is_known = True
                is_reported = False
                pauses = draw_pauses(draw)
                log.info("registered", peer=peer.peer_id, run=reply.run)
            await asyncio.sleep(interval_s)
            # The status is read after the pause, so that a heartbeat never carries an old one.
            status = await generation_status() if generation_status is not None else None
            answer = await coordinator.send_heartbeat(peer.peer_id, peer.incarnation, status)
            is_known = answer.is_known  # False: registers in the next round, without a pause
            if answer.must_leave and not leaving.is_set():
                log.info("dismissed", peer=peer.peer_id)
                leaving.set()
        except RunInvalid:  # a retry cannot help: the run files differ
            raise
        except SpecrlError as error:
            if not is_reported:
                log.warning("coordinator_lost" if is_known else "coordinator_not_reached", reason=str(error))
            is_known = False
            is_reported = True
            await asyncio.sleep(next(pauses))


async def drain_on_request(
    coordinator: CoordinatorClient,
    peer: Peer,
    leaving: asyncio.Event,
    stop_requested: Coroutine[Any, Any, None],
    drain_s: float,
) -> None:
    """Wait until `stop_requested` completes or `leaving` is set. Then drain for at most `drain_s` seconds, and return.

    If the coordinator is unreachable, returns at once: nobody would receive the rollouts.
    """
    await run_until_first_ends(stop_requested, leaving.wait())
    leaving.set()  # before Leave: `stay_registered` must not register a peer again that is about to leave
    log.info("drain_begun", peer=peer.peer_id, at_most_s=drain_s)
    try:
        await coordinator.leave_run(peer.peer_id, peer.incarnation, drain_s)
    except SpecrlError as error:
        log.info("drain_failed", reason=str(error))


async def leave_without_drain(coordinator: CoordinatorClient, peer: Peer) -> None:
    """Leave the run without a drain. Errors are only logged: a coordinator that is gone has nothing to remove."""
    try:
        await coordinator.leave_run(peer.peer_id, peer.incarnation)
    except SpecrlError as error:
        log.info("leave_failed", reason=str(error))
