"""How peers reconnect to a coordinator that they have lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from specrl.errors import PeerUnavailable, RunInvalid
from specrl.records import Peer, Registration, Role
from specrl.rpc.membership import FIRST_PAUSE_S, MAX_PAUSE_S, stay_registered

PEERS = 200
ATTEMPTS = 12


class LostCoordinator:
    """Answers each registration as given, and refuses for good after the last."""

    def __init__(self, *answers: bool) -> None:
        self._answers = list(answers)

    async def register_peer(self, *_: object) -> Registration:
        if not self._answers:
            raise RunInvalid("another run file")
        if self._answers.pop(0):
            return Registration("run", 1.0)
        raise PeerUnavailable("refused")

    async def send_heartbeat(self, *_: object) -> Any:
        raise PeerUnavailable("gone")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses made, in order. None takes time."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


async def attempt(coordinator: LostCoordinator, draw: Callable[[], float]) -> None:
    peer = Peer("gen-0", Role.GENERATION, "127.0.0.1:1", "digest")
    with pytest.raises(RunInvalid):
        await stay_registered(coordinator, peer, draw=draw)  # type: ignore[arg-type]


async def test_peers_that_lose_their_coordinator_together_reconnect_at_different_times(slept: list[float]) -> None:
    """Peers reconnected in lockstep: hundreds of registrations in the same millisecond, every two seconds."""
    for number in range(PEERS):
        await attempt(LostCoordinator(*[False] * ATTEMPTS), np.random.default_rng(number).random)
    assert len(slept) == PEERS * ATTEMPTS
    assert all(0 < pause_s <= MAX_PAUSE_S for pause_s in slept)
    for attempt_number, ceiling_s in ((0, FIRST_PAUSE_S), (ATTEMPTS - 1, MAX_PAUSE_S)):
        pauses = slept[attempt_number::ATTEMPTS]
        assert len(set(pauses)) == PEERS
        tenths = Counter(int(20 * (pause_s / ceiling_s - 0.5)) for pause_s in pauses)
        assert max(tenths.values()) < PEERS / 4, "no tenth of the range has a quarter of the peers"
    moments = [sum(slept[start : start + ATTEMPTS]) for start in range(0, len(slept), ATTEMPTS)]
    tenths_of_a_second = Counter(int(10 * moment_s) for moment_s in moments)
    assert max(tenths_of_a_second.values()) < PEERS / 4


@pytest.mark.parametrize(("drawn", "share"), [(0.0, 1.0), (1.0 - 2**-53, 0.5)])
async def test_a_pause_is_between_half_its_ceiling_and_its_ceiling_which_doubles(
    slept: list[float], drawn: float, share: float
) -> None:
    await attempt(LostCoordinator(*[False] * 7), lambda: drawn)
    ceilings = [FIRST_PAUSE_S * 2**count for count in range(5)] + [MAX_PAUSE_S] * 2
    assert slept == pytest.approx([share * ceiling for ceiling in ceilings])


async def test_a_registration_resets_the_pauses_and_each_loss_is_logged_once(slept: list[float]) -> None:
    with capture_logs() as logged:
        await attempt(LostCoordinator(False, False, True, False), lambda: 0.0)
    assert slept == pytest.approx([0.1, 0.2, 1.0, 0.1, 0.2])  # the 1.0 is a heartbeat's interval
    assert [it["event"] for it in logged] == ["coordinator_not_reached", "registered", "coordinator_lost"]
