"""A replica of two ranks, on one node with shared memory, and on two nodes that share only loopback addresses."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests import engine_fork
from tests.integration.forked_run import replica_variables, serve_replica
from tests.vllm_cases import (
    EAGLE3,
    Judge,
    Models,
    a_spec,
    collect_rollouts,
    errors_of,
    running_engine,
    some_requests,
    speculation,
)
from tests.weight_sender import WeightSender, manifest_of, update_weights

from specrl.errors import ChecksumMismatch, EngineFailed
from specrl.generation.nodes import ReplicaNodes
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.launcher.processes.ports import find_free_port
from specrl.spec import RunSpec, dump_spec

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

END_S = 60.0


@contextmanager
def second_node(spec: RunSpec, nodes: ReplicaNodes, folder: Path) -> Iterator[engine_fork.EngineProcess]:
    """Run the process of node 1, as a pod does, in a fork. It writes to `folder`/node-1.log."""
    run_file = folder / "run.yaml"
    run_file.write_text(dump_spec(spec))
    options = ["--spec", str(run_file), "--replica-id", "gen-0-1", "--coordinator", "127.0.0.1:1"]
    options += ["--nnodes", "2", "--node-rank", "1", "--master-port", str(nodes.port)]
    log = folder / "node-1.log"
    variables = replica_variables(spec, nodes)
    process = engine_fork.start_fork(serve_with_spawned_ranks, options, str(log), environment=variables)
    try:
        yield process
    finally:
        process.kill()
        process.join(END_S)


def serve_with_spawned_ranks(options: list[str], log: str) -> None:
    """Run `specrl-generation OPTIONS` in this fork. As in the program, its ranks are new processes."""
    from vllm.v1.executor import multiproc_executor

    spawn = partial(multiprocessing.get_context, "spawn")
    multiproc_executor.get_mp_context = spawn  # type: ignore[attr-defined]  # a module attribute that mypy does not know
    serve_replica(options, log)


async def serve_two_versions(engine: VllmEngine, models: Models, sender: WeightSender) -> None:
    """Update the engine to each version, and check that rollouts follow it."""
    requests = some_requests(4)
    for number, version in enumerate((models.first, models.second)):
        await update_weights(engine, sender, version.tensors(True), number)
        judge = Judge(version.policy)
        for request, rollout in zip(requests, await collect_rollouts(engine, requests), strict=True):
            assert errors_of(judge, request, rollout).max() < 1e-4
            assert {span.policy_version for span in rollout.versions} == {number}
    assert (await engine.get_status()).speculation.accepted_tokens > 0


async def test_two_ranks_of_a_node_share_one_copy_of_a_version(models: Models) -> None:
    spec = a_spec(models.first.policy, speculation(EAGLE3, models.first), generation={"tensorParallel": 2})
    sender = WeightSender(ranks=2)
    tensors = models.first.tensors(True)
    async with running_engine(spec) as engine:
        await serve_two_versions(engine, models, sender)
        corrupted, sent = await asyncio.gather(
            engine.receive_weights(sender.group(), manifest_of(tensors), 2),
            sender.send(tensors, 2, tensors[-1][0].name),
        )
        shared = [mapped_bytes(rank) for rank in psutil.Process().children(recursive=True)]
        size = sum(meta.size_bytes for meta, _ in tensors)
        assert [size <= found < 1.1 * size for found in shared if found] == [True, True], "both map all of it"
        assert corrupted != sent
        with pytest.raises(ChecksumMismatch, match=tensors[-1][0].name):
            await engine.load_weights(sent)
        assert not any(mapped_bytes(rank) for rank in psutil.Process().children(recursive=True)), (
            "dropped after the failed load"
        )
        sender.close()


def mapped_bytes(process: psutil.Process) -> int:
    """Bytes of staging memory that a process maps."""
    maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
    ends = [line.split()[0].split("-") for line in maps if "memfd:specrl-weights" in line]
    return sum(int(end, 16) - int(first, 16) for first, end in ends)


async def test_two_nodes_are_one_replica_until_a_rank_is_lost(models: Models, tmp_path: Path) -> None:
    """Rollouts match transformers, with drafts, before and after an update of both ranks.

    The loss of a rank ends both processes with an error message.
    """
    spec = a_spec(models.first.policy, speculation(EAGLE3, models.first), generation={"tensorParallel": 2})
    nodes = ReplicaNodes(count=2, port=find_free_port())
    sender = WeightSender(ranks=2)
    with second_node(spec, nodes, tmp_path) as member:
        async with running_engine(spec, nodes=nodes) as engine:
            await serve_two_versions(engine, models, sender)
            sender.close()
            (rank,) = [it for it in psutil.Process(member.pid).children() if "tracker" not in str(it.cmdline())]
            rank.kill()
            with pytest.raises(EngineFailed):
                await asyncio.wait_for(collect_rollouts(engine, some_requests(4)), END_S)
            await asyncio.to_thread(member.join, END_S)
            assert member.exitcode == EngineFailed.exit_code
            assert "a rank of node 1 died or did not start" in (tmp_path / "node-1.log").read_text()
