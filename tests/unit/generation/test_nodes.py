"""A process that follows the leader of its replica: how long it lives, and what vLLM is told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.vllm_cases import a_spec

from specrl.generation.main import follow, parse
from specrl.generation.nodes import Nodes, until_leader_is_gone
from specrl.generation.vllm_backend import member
from specrl.generation.vllm_backend.arguments import engine_arguments, environment
from specrl.launcher.ports import free_port

WAIT_S = 30.0
RENDEZVOUS = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, wait_for_workers=False)
time.sleep(600)
"""


@pytest.mark.asyncio
async def test_member_waits_for_its_leader_and_ends_with_it() -> None:
    """The leader's ranks meet in a store of torch's, which is all that a member can see of it."""
    nodes, met = Nodes(count=2, rank=1, port=free_port()), asyncio.Event()
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
    """In place of vLLM's ranks: they compute for as long as they are let."""

    def __init__(self) -> None:
        self.is_closed, self.met = False, asyncio.Event()

    async def run(self, met: asyncio.Event) -> None:
        await met.wait()
        self.met.set()
        await asyncio.Event().wait()

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.asyncio
async def test_told_to_stop_it_leaves_first_what_has_no_leader_and_last_what_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pods of a group are told at the same moment, and the leader needs its members to finish what it has."""
    ranks = Ranks()
    monkeypatch.setattr(member, "Member", lambda *_: ranks)
    nodes, spec = Nodes(count=2, rank=1, port=free_port()), a_spec(tmp_path)

    async def told() -> None:
        """Returns when it has been heard: only the first SIGTERM is waited for."""
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # noqa: ASYNC110 - it is about to be handled
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # noqa: ASYNC110
            await asyncio.sleep(0)

    alone = asyncio.create_task(follow(spec, nodes))
    await told()
    await asyncio.wait_for(alone, WAIT_S)
    assert ranks.is_closed

    came = asyncio.Queue[asyncio.StreamWriter]()
    async with await asyncio.start_server(lambda _, writer: came.put_nowait(writer), nodes.address, nodes.port):
        led = asyncio.create_task(follow(spec, nodes))
        connection = await asyncio.wait_for(came.get(), WAIT_S)
        await asyncio.wait_for(ranks.met.wait(), WAIT_S)
        await told()
        assert not led.done()
        connection.close()
        await asyncio.wait_for(led, WAIT_S)


def test_each_node_is_told_its_place_and_one_node_nothing(tmp_path: Path) -> None:
    spec = a_spec(tmp_path, generation={"tensorParallel": 2})
    places = [engine_arguments(spec, None, True, Nodes(2, rank, "gen-0", 1234, "10.0.0.7")) for rank in (0, 1)]
    assert [place.pop("node_rank") for place in places] == [0, 1]
    assert places[0] == places[1]
    assert (places[0]["nnodes"], places[0]["master_addr"], places[0]["master_port"]) == (2, "gen-0", 1234)
    assert environment(spec, Nodes(2, 1, host="10.0.0.7"))["VLLM_HOST_IP"] == "10.0.0.7"
    assert "nnodes" not in engine_arguments(spec, None, True)
    assert "VLLM_HOST_IP" not in environment(spec)


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_rank_outside_of_the_nodes_is_refused(rank: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--spec", "run.yaml", "--replica-id", "gen-0", "--coordinator", "a:1", "--nnodes", "2"]
    with pytest.raises(SystemExit):
        parse([*command, f"--node-rank={rank}"])
    assert "--node-rank must be >= 0 and < --nnodes" in capsys.readouterr().err
