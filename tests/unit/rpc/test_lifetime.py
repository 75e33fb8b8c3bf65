"""When a serving process ends."""

from __future__ import annotations

import asyncio
import os
import signal

from specrl.rpc.lifetime import wait_for_signal

PATIENCE_S = 60.0


async def test_a_signal_counts_from_the_call_on() -> None:
    """A trainer that was told to stop right after its first line ended by Python's own handler, with another code."""
    waiting = wait_for_signal(signal.SIGWINCH)  # without a handler it is ignored
    os.kill(os.getpid(), signal.SIGWINCH)
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert signal.getsignal(signal.SIGWINCH) is signal.SIG_DFL
