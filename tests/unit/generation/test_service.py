"""The service over the stand-in engine, through a real gRPC server and the typed client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio
import structlog
import torch
from tests.stand_ins.engine import TableEngine, TableShape
from tests.weight_sender import WeightSender, manifest_of

from specrl.api.v1 import generation_pb2_grpc
from specrl.errors import ChecksumMismatch, EngineFailed, RecordInvalid, VersionConflict
from specrl.generation.service import GenerationService
from specrl.records import RolloutRequest, Sampling, TensorMeta, WeightChecksums, WeightOwner
from specrl.rpc.clients import GenerationClient
from specrl.rpc.server import serve
from specrl.spec.run import Weights

TABLE = torch.eye(32) * 3
TENSORS = [(TensorMeta("table", WeightOwner.POLICY, "float32", (32, 32)), TABLE)]
DEADLINE_S = 20.0


@dataclass
class Replica:
    engine: TableEngine
    client: GenerationClient
    service: GenerationService


@pytest_asyncio.fixture
async def replica() -> AsyncIterator[Replica]:
    engine = TableEngine(shape=TableShape(token_seconds=0.001))
    await engine.start()
    service = GenerationService(engine, Weights(timeout_s=1, attempts=1))
    server, port = await serve(
        lambda it: generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, it), "127.0.0.1", 0
    )
    async with GenerationClient(f"127.0.0.1:{port}", "gen-0") as client:
        yield Replica(engine, client, service)
    service.close()
    await server.stop(None)


def some(count: int, max_tokens: int = 8) -> list[RolloutRequest]:
    return [RolloutRequest(f"r{n}", "g", n, (3 + n,), Sampling(max_tokens, seed=n)) for n in range(count)]


async def test_rollouts_are_streamed(replica: Replica) -> None:
    found = [rollout async for rollout in replica.client.generate(some(5), True, -1)]
    assert {rollout.rollout_id for rollout in found} == {f"r{n}" for n in range(5)}
    for rollout in found:
        rollout.check(8)


async def test_update_goes_through_and_is_timed(replica: Replica) -> None:
    sender = WeightSender()
    assert await replica.client.prepare_update(0, DEADLINE_S) >= 0
    (received, seconds), sent = await asyncio.gather(
        replica.client.receive_weights(0, sender.group(), manifest_of(TENSORS)), sender.send(TENSORS, 0)
    )
    assert (received, seconds > 0) == (sent, True)
    timing = await replica.client.commit_update(sent, DEADLINE_S)
    assert min(timing.verify_s, timing.load_s, timing.resume_s) >= 0
    status = await replica.client.status()
    assert (status.policy_version, status.is_paused) == (0, False)
    sender.close()


async def test_replica_that_serves_another_drafter_than_was_sent_is_an_error(replica: Replica) -> None:
    sender = WeightSender()
    await replica.client.prepare_update(0, DEADLINE_S)
    _, sent = await asyncio.gather(
        replica.client.receive_weights(0, sender.group(), manifest_of(TENSORS)), sender.send(TENSORS, 0)
    )
    with pytest.raises(VersionConflict, match="the drafter of version 0, got 0 with -1"):
        await replica.client.commit_update(replace(sent, drafter_version=0), DEADLINE_S)
    sender.close()


async def test_version_that_is_too_old_is_refused(replica: Replica) -> None:
    with pytest.raises(VersionConflict, match="must be >= 3, got -1"):
        await anext(replica.client.generate(some(1), False, 3))


async def test_mismatch_keeps_the_replica_paused_until_the_update_is_aborted(replica: Replica) -> None:
    sender = WeightSender()
    await replica.client.prepare_update(0, DEADLINE_S)
    _, sent = await asyncio.gather(
        replica.client.receive_weights(0, sender.group(), manifest_of(TENSORS)), sender.send(TENSORS, 0, "table")
    )
    with pytest.raises(ChecksumMismatch, match="table"):
        await replica.client.commit_update(sent, DEADLINE_S)
    assert (await replica.client.status()).is_paused
    await replica.client.abort_update(0, DEADLINE_S)
    status = await replica.client.status()
    assert (status.policy_version, status.is_paused) == (-1, False)
    with pytest.raises(VersionConflict):
        await replica.client.commit_update(WeightChecksums(0, (1,)), DEADLINE_S)
    sender.close()


async def test_forgotten_update_stays_paused_and_says_so(replica: Replica) -> None:
    with structlog.testing.capture_logs() as lines:
        await replica.client.prepare_update(4, DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            while not any(line["event"] == "update_forgotten" for line in lines):  # noqa: ASYNC110 - a log
                await asyncio.sleep(0.05)
        assert (await replica.client.status()).is_paused
        await replica.client.abort_update(4, DEADLINE_S)
    assert replica.service._watcher is None


@pytest.mark.parametrize("requests", [[], [*some(2), *some(1)], some(1, 100_000)], ids=["none", "twice", "too-long"])
async def test_bad_calls_are_refused_before_anything_runs(replica: Replica, requests: list[RolloutRequest]) -> None:
    with pytest.raises(RecordInvalid):
        await anext(replica.client.generate(requests, False, -1))
    assert (await replica.client.status()).live_requests == 0


async def test_cancelled_call_aborts_what_is_unfinished(replica: Replica) -> None:
    await replica.engine.pause()
    stream = replica.client.generate(some(3, 200), False, -1)
    first = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(DEADLINE_S):
        while (await replica.client.status()).live_requests < 3:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.01)
        first.cancel()
        while (await replica.client.status()).live_requests > 0:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.01)


async def test_dead_engine_keeps_its_class_across_the_wire(replica: Replica) -> None:
    replica.engine.die()
    with pytest.raises(EngineFailed):
        await anext(replica.client.generate(some(1), False, -1))
    with pytest.raises(EngineFailed):
        await replica.client.status()
