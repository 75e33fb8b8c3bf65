"""Starts the ranks of one node as processes, and ends them together.

    STARTED --all have exited with 0--> 0
       |
       +----a rank has failed--> ENDING: others may end by themselves for ENDING_S, then they are killed --> its code

torchrun does the same, but exits with 1 whatever its ranks exit with, and prints a banner after their last words. So
nobody could tell a refusal (exit code 2), a stop (143) and a lost rank (1) apart. Of torchrun's features this has
those that the trainer uses: the environment variables of a static rendezvous. Rank 0 itself serves the rendezvous.

Called by `trainer.main` in a pod. A local run's supervisor starts ranks itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrl.termination import NEEDS_USER

ENDING_S = 10.0
"""Time that the other ranks have to end after one has failed: a rank that refuses its input prints why."""
POLL_S = 0.1
"""Seconds between two looks at the processes. Nothing else wakes the wait, and only the ranks' ends bound it."""


@dataclass(frozen=True)
class Node:
    """One of the nodes that the ranks are spread over, the same number on each.

    ranks: on this node. count: nodes. number: of this node, from 0. address, port: of rank 0's rendezvous. Port 0 picks
    a free one, if there is only one node.
    """

    ranks: int
    count: int = 1
    number: int = 0
    address: str = "127.0.0.1"
    port: int = 0


def run_ranks(node: Node, command: Sequence[str], outer: Mapping[str, str] = os.environ) -> int:
    """Run a command once per rank of this node, and return the exit code for all of them.

    Each gets the rendezvous variables of torch.distributed. SIGTERM and SIGINT are passed on. The code is that of the
    first rank that failed, but 2 if any rank refused its input, since another may have failed first by losing it. A
    rank that signal N has killed counts as 128 + N.
    """
    port = node.port or _find_free_port()
    told: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        _signal_all(processes, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    for local in range(node.ranks):
        own = {
            "RANK": str(node.number * node.ranks + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(node.count * node.ranks),
            "LOCAL_WORLD_SIZE": str(node.ranks),
            "MASTER_ADDR": node.address,
            "MASTER_PORT": str(port),
        }
        processes.append(subprocess.Popen(list(command), env={**outer, **own}))
    if told:  # some ranks had not started when it came
        _signal_all(processes, told[-1])
    return _wait_for_all(processes)


def _signal_all(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        process.send_signal(number)  # does nothing to a process that has exited


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    codes: dict[int, int] = {}  # by pid, in the order in which they ended
    deadline = None
    while len(codes) < len(processes):
        for process in processes:
            code = process.poll()
            if code is not None:
                codes.setdefault(process.pid, code if code >= 0 else 128 - code)
        if deadline is None and any(codes.values()):
            deadline = time.monotonic() + ENDING_S
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                process.kill()
            deadline = float("inf")
        time.sleep(POLL_S)
    failed = [code for code in codes.values() if code]
    return NEEDS_USER if NEEDS_USER in failed else next(iter(failed), 0)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
