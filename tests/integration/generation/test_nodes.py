"""A replica of two ranks: on two nodes, which share nothing but addresses on loopback, and on one, with its memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.vllm_cases import EAGLE3, Judge, Models, a_spec, collect, errors_of, running, some_requests, speculation
from tests.weight_sender import WeightSender, manifest_of, update

from specrl.errors import ChecksumMismatch, EngineFailed
from specrl.generation.nodes import Nodes
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.launcher.ports import free_port
from specrl.spec import RunSpec, dump

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PROGRAM = Path(sys.executable).parent / "specrl-generation"
END_S = 60.0


@contextmanager
def second_node(spec: RunSpec, nodes: Nodes, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of node 1, as a pod runs it."""
    run_file = folder / "run.yaml"
    run_file.write_text(dump(spec))
    command = [PROGRAM, "--spec", run_file, "--replica-id", "gen-0-1", "--coordinator", "127.0.0.1:1"]
    command += ["--nnodes", "2", "--node-rank", "1", "--master-port", str(nodes.port)]
    with (folder / "node-1.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def serve_two_versions(engine: VllmEngine, models: Models, sender: WeightSender) -> None:
    """Each is received, loaded, and what is sampled from then on."""
    requests = some_requests(4)
    for number, version in enumerate((models.first, models.second)):
        await update(engine, sender, version.tensors(True), number)
        judge = Judge(version.policy)
        for request, rollout in zip(requests, await collect(engine, requests), strict=True):
            assert errors_of(judge, request, rollout).max() < 1e-4
            assert {span.policy_version for span in rollout.versions} == {number}
    assert (await engine.status()).speculation.accepted_tokens > 0


async def test_two_ranks_of_a_node_load_a_version_that_lies_there_once(models: Models) -> None:
    spec = a_spec(models.first.policy, speculation(EAGLE3, models.first), generation={"tensorParallel": 2})
    sender, tensors = WeightSender(ranks=2), models.first.tensors(True)
    async with running(spec) as engine:
        await serve_two_versions(engine, models, sender)
        corrupted, sent = await asyncio.gather(
            engine.receive(sender.group(), manifest_of(tensors), 2), sender.send(tensors, 2, tensors[-1][0].name)
        )
        shared = [mapped_bytes(rank) for rank in psutil.Process().children(recursive=True)]
        size = sum(meta.size_bytes for meta, _ in tensors)
        assert [size <= found < 1.1 * size for found in shared if found] == [True, True], "both map all of it"
        assert corrupted != sent
        with pytest.raises(ChecksumMismatch, match=tensors[-1][0].name):
            await engine.load(sent)
        assert not any(mapped_bytes(rank) for rank in psutil.Process().children(recursive=True)), "dropped"
        sender.close()


def mapped_bytes(process: psutil.Process) -> int:
    """Of staging memory."""
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in maps if "memfd:specrl-weights" in line]
    return sum(int(end, 16) - int(first, 16) for first, end in ends)


async def test_two_nodes_are_one_replica_until_a_rank_is_lost(models: Models, tmp_path: Path) -> None:
    """They serve what transformers computes, drafts included, before and after an update that both ranks received; the
    loss of a rank ends both processes, in words."""
    spec = a_spec(models.first.policy, speculation(EAGLE3, models.first), generation={"tensorParallel": 2})
    nodes, sender = Nodes(count=2, port=free_port()), WeightSender(ranks=2)
    with second_node(spec, nodes, tmp_path) as member:
        async with running(spec, nodes=nodes) as engine:
            await serve_two_versions(engine, models, sender)
            sender.close()
            (rank,) = [it for it in psutil.Process(member.pid).children() if "tracker" not in str(it.cmdline())]
            rank.kill()
            with pytest.raises(EngineFailed):
                await asyncio.wait_for(collect(engine, some_requests(4)), END_S)
            _, said = await asyncio.to_thread(member.communicate, timeout=END_S)
            assert member.returncode == EngineFailed.exit_code
            assert "ranks of node 1 must live as long as their replica" in said
