"""A follower node of a replica: its lifetime, and vLLM's arguments."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.vllm_cases import a_spec

from specrl.generation.main import parse_arguments, run_follower
from specrl.generation.nodes import ReplicaNodes, until_leader_is_gone
from specrl.generation.vllm_backend import follower
from specrl.generation.vllm_backend.arguments import build_engine_arguments, build_environment
from specrl.launcher.processes.ports import find_free_port

WAIT_S = 30.0
RENDEZVOUS = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, wait_for_workers=False)
time.sleep(600)
"""


@pytest.mark.asyncio
async def test_a_follower_waits_for_its_leader_and_ends_with_it() -> None:
    """The leader is only a rendezvous store of torch here, which is all that a follower sees of it."""
    nodes = ReplicaNodes(count=2, rank=1, port=find_free_port())
    met = asyncio.Event()
    following = asyncio.create_task(until_leader_is_gone(nodes, met))
    await asyncio.sleep(0)
    assert not met.is_set()
    leader = await asyncio.create_subprocess_exec(sys.executable, "-c", RENDEZVOUS, str(nodes.port))
    try:
        await asyncio.wait_for(met.wait(), WAIT_S)
        assert not following.done()
    finally:
        leader.kill()
        await leader.wait()
    await asyncio.wait_for(following, WAIT_S)


class Ranks:
    """A stand-in for vLLM's ranks, which compute until they are closed."""

    def __init__(self) -> None:
        self.is_closed = False
        self.met = asyncio.Event()

    async def run(self, met: asyncio.Event) -> None:
        await met.wait()
        self.met.set()
        await asyncio.Event().wait()

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.asyncio
async def test_sigterm_stops_a_follower_without_a_leader_and_not_one_with_a_leader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All pods of a replica get SIGTERM at the same time, and the leader needs its followers to drain."""
    ranks = Ranks()
    monkeypatch.setattr(follower, "FollowerNode", lambda *_: ranks)
    nodes = ReplicaNodes(count=2, rank=1, port=find_free_port())
    spec = a_spec(tmp_path)

    async def told() -> None:
        """Send SIGTERM and return when it was handled. The process handles only the first one."""
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # noqa: ASYNC110 - it is about to be handled
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # noqa: ASYNC110
            await asyncio.sleep(0)

    alone = asyncio.create_task(run_follower(spec, nodes))
    await told()
    await asyncio.wait_for(alone, WAIT_S)
    assert ranks.is_closed

    came = asyncio.Queue[asyncio.StreamWriter]()
    async with await asyncio.start_server(lambda _, writer: came.put_nowait(writer), nodes.address, nodes.port):
        led = asyncio.create_task(run_follower(spec, nodes))
        connection = await asyncio.wait_for(came.get(), WAIT_S)
        await asyncio.wait_for(ranks.met.wait(), WAIT_S)
        await told()
        assert not led.done()
        connection.close()
        await asyncio.wait_for(led, WAIT_S)


def test_each_node_gets_its_rank_and_a_single_node_no_arguments(tmp_path: Path) -> None:
    spec = a_spec(tmp_path, generation={"tensorParallel": 2})
    places = [
        build_engine_arguments(spec, None, True, ReplicaNodes(2, rank, "gen-0", 1234, "10.0.0.7")) for rank in (0, 1)
    ]
    assert [place.pop("node_rank") for place in places] == [0, 1]
    assert places[0] == places[1]
    assert (places[0]["nnodes"], places[0]["master_addr"], places[0]["master_port"]) == (2, "gen-0", 1234)
    assert build_environment(spec, ReplicaNodes(2, 1, host="10.0.0.7"))["VLLM_HOST_IP"] == "10.0.0.7"
    assert "nnodes" not in build_engine_arguments(spec, None, True)
    assert "VLLM_HOST_IP" not in build_environment(spec)


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_a_node_rank_out_of_range_is_refused(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--spec", "run.yaml", "--replica-id", "gen-0", "--coordinator", "a:1", "--nnodes", "2"]
    with pytest.raises(SystemExit):
        parse_arguments([*command, f"--node-rank={rank}"])
    assert "--node-rank must be >= 0 and < --nnodes" in capsys.readouterr().err
