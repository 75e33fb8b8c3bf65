"""The service over the stand-in engine, through a real gRPC server and the typed client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tests.stand_ins.engine import TableEngine, TableShape
from tests.weight_sender import WeightSender, manifest_of

from specrl.api.v1 import generation_pb2_grpc
from specrl.errors import ChecksumMismatch, EngineFailed, PeerUnavailable, RecordInvalid, VersionConflict
from specrl.generation.detached_rollouts import DetachedRollouts
from specrl.generation.service import GenerationService
from specrl.records import (
    Peer,
    Role,
    Rollout,
    RolloutRequest,
    Sampling,
    TensorMeta,
    WeightChecksums,
    WeightGroup,
    WeightOwner,
    wire,
)
from specrl.rpc.clients import GenerateOptions, GenerationClient
from specrl.rpc.limits import CONTROL_BYTES
from specrl.rpc.server import start_server
from specrl.spec.run import Weights
from specrl.weights import files

TABLE = torch.eye(32) * 3
TENSORS = [(TensorMeta("table", WeightOwner.POLICY, "float32", (32, 32)), TABLE)]
DEADLINE_S = 20.0
REATTACH_S = 1.0


@dataclass
class Replica:
    engine: TableEngine
    client: GenerationClient
    service: GenerationService


@pytest_asyncio.fixture
async def replica() -> AsyncIterator[Replica]:
    engine = TableEngine(shape=TableShape(token_seconds=0.001))
    await engine.start()
    service = GenerationService(engine, Weights(), reattach_s=REATTACH_S)
    server, port = await start_server(
        lambda it: generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, it), "127.0.0.1", 0
    )
    async with GenerationClient(f"127.0.0.1:{port}", "gen-0") as client:
        yield Replica(engine, client, service)
    service.close()
    await server.stop(None)


def build_requests(count: int, max_tokens: int = 8) -> list[RolloutRequest]:
    return [RolloutRequest(f"r{n}", "g", n, (3 + n,), Sampling(max_tokens, seed=n)) for n in range(count)]


async def test_rollouts_are_streamed(replica: Replica) -> None:
    found = [rollout async for rollout in replica.client.generate_rollouts(build_requests(5), True, -1)]
    assert {rollout.rollout_id for rollout in found} == {f"r{n}" for n in range(5)}
    for rollout in found:
        rollout.check(8)


async def test_an_update_succeeds_and_is_timed(replica: Replica) -> None:
    sender = WeightSender()
    (received, seconds), sent = await asyncio.gather(
        replica.client.receive_weights(0, sender.group(), manifest_of(TENSORS), DEADLINE_S), sender.send(TENSORS, 0)
    )
    assert (received, seconds > 0) == (sent, True)
    timing = await replica.client.commit_update(sent, DEADLINE_S)
    assert min(timing.verify_s, timing.pause_s, timing.load_s, timing.resume_s) >= 0
    status = await replica.client.get_status()
    assert (status.policy_version, status.is_paused) == (0, False)
    sender.close()


async def test_weights_can_arrive_as_files(replica: Replica, tmp_path: Path) -> None:
    sums = files.write_version(
        tmp_path / "version", manifest_of(TENSORS), [(meta.name, tensor) for meta, tensor in TENSORS]
    )
    group = WeightGroup("", "", 0, 0, 1, DEADLINE_S, "checkpoint", str(tmp_path / "version"))
    received, _ = await replica.client.receive_weights(4, group, manifest_of(TENSORS), DEADLINE_S)
    assert received == WeightChecksums(4, sums)
    await replica.client.commit_update(received, DEADLINE_S)
    assert (await replica.client.get_status()).policy_version == 4
    lost = replace(group, folder=str(tmp_path / "another"))
    with pytest.raises(ChecksumMismatch, match="could not read all weights"):
        await replica.client.receive_weights(5, lost, manifest_of(TENSORS), DEADLINE_S)


async def test_only_the_first_transfer_needs_a_manifest(replica: Replica, tmp_path: Path) -> None:
    sums = files.write_version(
        tmp_path / "version", manifest_of(TENSORS), [(meta.name, tensor) for meta, tensor in TENSORS]
    )
    group = WeightGroup("", "", 0, 0, 1, DEADLINE_S, "checkpoint", str(tmp_path / "version"))
    with pytest.raises(RecordInvalid, match="the first transfer to a replica must have a manifest"):
        await replica.client.receive_weights(1, group, None, DEADLINE_S)
    for version, manifest in ((1, manifest_of(TENSORS)), (2, None), (3, None)):
        received, _ = await replica.client.receive_weights(version, group, manifest, DEADLINE_S)
        assert received == WeightChecksums(version, sums)


async def test_a_replica_that_serves_another_drafter_version_is_an_error(replica: Replica) -> None:
    sender = WeightSender()
    _, sent = await asyncio.gather(
        replica.client.receive_weights(0, sender.group(), manifest_of(TENSORS), DEADLINE_S), sender.send(TENSORS, 0)
    )
    with pytest.raises(VersionConflict, match="serves policy version 0 with drafter version -1, but was sent 0 with 0"):
        await replica.client.commit_update(replace(sent, drafter_version=0), DEADLINE_S)
    sender.close()


async def test_a_replica_with_too_old_a_version_refuses_requests(replica: Replica) -> None:
    with pytest.raises(VersionConflict, match="must be >= 3, got -1"):
        await anext(replica.client.generate_rollouts(build_requests(1), False, 3))


async def test_after_a_mismatch_the_old_version_is_served_and_nothing_is_staged(replica: Replica) -> None:
    sender = WeightSender()
    _, sent = await asyncio.gather(
        replica.client.receive_weights(0, sender.group(), manifest_of(TENSORS), DEADLINE_S),
        sender.send(TENSORS, 0, "table"),
    )
    with pytest.raises(ChecksumMismatch, match="table"):
        await replica.client.commit_update(sent, DEADLINE_S)
    status = await replica.client.get_status()
    assert (status.policy_version, status.is_paused) == (-1, False)
    with pytest.raises(VersionConflict):
        await replica.client.commit_update(WeightChecksums(0, (1,)), DEADLINE_S)
    sender.close()


@pytest.mark.parametrize(
    "requests",
    [[], [*build_requests(2), *build_requests(1)], build_requests(1, 100_000)],
    ids=["none", "twice", "too-long"],
)
async def test_invalid_requests_are_refused_before_anything_runs(
    replica: Replica, requests: list[RolloutRequest]
) -> None:
    with pytest.raises(RecordInvalid):
        await anext(replica.client.generate_rollouts(requests, False, -1))
    assert (await replica.client.get_status()).live_requests == 0


def build_request(name: str, max_tokens: int = 8) -> RolloutRequest:
    return RolloutRequest(name, "g", 0, (3,), Sampling(max_tokens, seed=1))


@pytest.mark.parametrize("outlives_call", [False, True])
async def test_a_call_takes_more_requests_until_it_is_ended(replica: Replica, outlives_call: bool) -> None:
    terms = GenerateOptions(admit_together=False, min_policy_version=-1, outlives_call=outlives_call)
    call = replica.client.open_call()
    call.request_rollouts([build_request("long", 100)], terms)
    async with aclosing(call.receive_rollouts()) as rollouts:
        for number in range(3):
            call.request_rollouts([build_request(f"short-{number}", 1)], terms)
            assert (await anext(rollouts)).rollout_id == f"short-{number}"
        call.close_requests()
        assert [rollout.rollout_id async for rollout in rollouts] == ["long"]
    assert (await replica.client.get_status()).live_requests == 0


async def test_a_refused_request_ends_the_call_and_aborts_rollouts_that_do_not_outlive_it(replica: Replica) -> None:
    await replica.engine.pause()
    call = replica.client.open_call()
    call.request_rollouts([build_request("long", 100)], GenerateOptions(admit_together=False, min_policy_version=-1))
    call.request_rollouts(
        [build_request("kept", 100)], GenerateOptions(admit_together=False, min_policy_version=-1, outlives_call=True)
    )
    call.request_rollouts([build_request("too-new")], GenerateOptions(admit_together=False, min_policy_version=3))
    with pytest.raises(VersionConflict, match="must be >= 3, got -1"):
        await anext(call.receive_rollouts())
    assert [held.rollout_id for held in replica.service.list_held()] == ["kept"]
    async with asyncio.timeout(DEADLINE_S):
        while (await replica.client.get_status()).live_requests > 1:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.01)


class FaultyEngine(TableEngine):
    """Omits the last rollout of every request, or renames its rollouts."""

    def __init__(self, rename: str = "") -> None:
        super().__init__()
        self.rename = rename

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        async for rollout in super().generate(requests[:-1], admit_together):
            yield replace(rollout, rollout_id=self.rename or rollout.rollout_id)


@pytest.mark.parametrize(("rename", "words"), [("", "ended without rollout"), ("r9", "was not requested")])
async def test_missing_and_unrequested_rollouts_fail_the_call(rename: str, words: str) -> None:
    """On a long-lived call the missing rollout would otherwise be waited for forever."""
    engine = FaultyEngine(rename)
    await engine.start()
    server, port = await start_server(
        GenerationService(engine, Weights(), reattach_s=REATTACH_S).add_to, "127.0.0.1", 0
    )
    try:
        async with GenerationClient(f"127.0.0.1:{port}", "gen-0") as client:
            call = client.open_call()
            call.request_rollouts(build_requests(3), GenerateOptions(admit_together=False, min_policy_version=-1))
            with pytest.raises(EngineFailed, match=words):
                _ = [rollout async for rollout in call.receive_rollouts()]
    finally:
        await server.stop(None)


async def test_an_id_that_is_live_in_the_call_is_refused(replica: Replica) -> None:
    await replica.engine.pause()
    call = replica.client.open_call()
    for _ in range(2):
        call.request_rollouts([build_request("r")], GenerateOptions(admit_together=False, min_policy_version=-1))
    with pytest.raises(RecordInvalid, match="unique within a call, got 'r' twice"):
        await anext(call.receive_rollouts())


def kinds_of_tasks() -> set[str]:
    return {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]


async def test_no_task_is_left_after_a_call(replica: Replica) -> None:
    """Compares the kinds of tasks, since gRPC's server waits for each next call in a new task."""
    before = kinds_of_tasks()
    replica.engine.die()
    call = replica.client.open_call()
    call.request_rollouts([build_request("r")], GenerateOptions(admit_together=False, min_policy_version=-1))
    with pytest.raises(EngineFailed):
        await anext(call.receive_rollouts())
    async with asyncio.timeout(DEADLINE_S):
        while kinds_of_tasks() - before:  # noqa: ASYNC110 - tasks of gRPC
            await asyncio.sleep(0.01)


async def test_cancelling_a_call_aborts_its_rollouts(replica: Replica) -> None:
    await replica.engine.pause()
    stream = replica.client.generate_rollouts(build_requests(3, 200), False, -1)
    first = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(DEADLINE_S):
        while (await replica.client.get_status()).live_requests < 3:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.01)
        first.cancel()
        while (await replica.client.get_status()).live_requests > 0:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.01)


async def cancel_when_live(replica: Replica, requests: list[RolloutRequest], tokens: int = 1) -> None:
    """Start a call and cancel it when all of its rollouts are live and `tokens` tokens are sampled."""
    goal = (await replica.client.get_status()).speculation.generated_tokens + tokens
    stream = replica.client.generate_rollouts(requests, False, -1, outlives_call=True)
    first = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(DEADLINE_S):
        while (await replica.client.get_status()).live_requests < len(requests):  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.001)
        while (await replica.client.get_status()).speculation.generated_tokens < goal:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await stream.aclose()


async def test_rollouts_outlive_their_call_and_resume_without_sampling_a_token_twice(replica: Replica) -> None:
    asked = build_requests(3, 60)
    expected = {found.rollout_id: found async for found in replica.client.generate_rollouts(asked, False, -1)}
    before = (await replica.client.get_status()).speculation.generated_tokens
    await cancel_when_live(replica, asked)
    assert {held.rollout_id for held in replica.service.list_held()} == {"r0", "r1", "r2"}
    resumed = replica.client.generate_rollouts(asked, False, -1, outlives_call=True, resumes=True)
    found = {rollout.rollout_id: rollout async for rollout in resumed}
    for name, rollout in found.items():
        assert rollout.token_ids_T.tolist() == expected[name].token_ids_T.tolist()
    after = (await replica.client.get_status()).speculation.generated_tokens
    assert after - before == sum(rollout.total_length for rollout in found.values())


async def test_a_delivered_rollout_can_be_resumed(replica: Replica) -> None:
    first = [
        rollout async for rollout in replica.client.generate_rollouts(build_requests(1), False, -1, outlives_call=True)
    ]
    again = [
        rollout
        async for rollout in replica.client.generate_rollouts(
            build_requests(1), False, -1, outlives_call=True, resumes=True
        )
    ]
    assert first[0].token_ids_T.tolist() == again[0].token_ids_T.tolist()
    assert (await replica.client.get_status()).speculation.generated_tokens == first[0].total_length


async def test_without_resumes_a_rollout_starts_again(replica: Replica) -> None:
    await cancel_when_live(replica, build_requests(1, 60))
    await replica.engine.pause()
    before = (await replica.client.get_status()).speculation.generated_tokens
    stream = replica.client.generate_rollouts(build_requests(1, 60), False, -1, outlives_call=True)
    arrival = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(DEADLINE_S):
        while (await replica.client.get_status()).live_requests < 1:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)  # enough for both to be live, if the old one were not aborted
    await replica.engine.resume()
    anew = await arrival
    generated = (await replica.client.get_status()).speculation.generated_tokens - before
    assert before > 0
    assert generated == anew.total_length, "the old rollout must be aborted and the new one sampled from its start"


async def test_a_held_rollout_of_another_request_with_the_same_id_is_not_resumed(replica: Replica) -> None:
    await cancel_when_live(replica, build_requests(1, 60))
    other = replace(build_requests(1, 60)[0], sampling=Sampling(60, seed=99))
    (found,) = [
        item async for item in replica.client.generate_rollouts([other], False, -1, outlives_call=True, resumes=True)
    ]
    (expected,) = [item async for item in replica.client.generate_rollouts([other], False, -1)]
    assert found.token_ids_T.tolist() == expected.token_ids_T.tolist()


async def test_restarting_a_rollout_fails_the_call_that_waits_for_it(replica: Replica) -> None:
    await replica.engine.pause()
    first = asyncio.ensure_future(
        anext(replica.client.generate_rollouts(build_requests(1, 60), False, -1, outlives_call=True))
    )
    async with asyncio.timeout(DEADLINE_S):
        while not replica.service.list_held():  # noqa: ASYNC110 - a list
            await asyncio.sleep(0.001)
    second = asyncio.ensure_future(
        anext(replica.client.generate_rollouts(build_requests(1, 60), False, -1, outlives_call=True))
    )
    with pytest.raises(PeerUnavailable, match="dropped rollout r0"):
        await first
    await replica.engine.resume()
    assert (await second).rollout_id == "r0"


async def test_a_detached_rollout_is_aborted_and_forgotten_after_its_time(replica: Replica) -> None:
    await replica.engine.pause()
    await cancel_when_live(replica, build_requests(3, 200), tokens=0)
    assert len(replica.service.list_held()) == 3
    async with asyncio.timeout(DEADLINE_S):
        while replica.service.list_held() or (await replica.client.get_status()).live_requests:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.01)


class HangingEngine(TableEngine):
    """Never finishes the rollout with sample index 0."""

    async def _sample_rollout(self, request: RolloutRequest) -> Rollout:
        if request.sample_index == 0:
            await asyncio.Event().wait()
        return await super()._sample_rollout(request)


async def test_a_replica_that_holds_more_rollouts_than_a_registration_may_list_can_register() -> None:
    """Once the registration exceeded its limit, and no such replica could return to a restarted coordinator."""
    engine = HangingEngine()
    await engine.start()
    detached = DetachedRollouts(engine, keep_s=60.0)
    asked = [RolloutRequest(f"{n:0256}", "g", n, (3,), Sampling(1, seed=n)) for n in range(4200)]
    async with aclosing(detached.stream_finished(asked, 3, admit_together=True, resumes=False)) as finished:
        for _ in asked[1:]:
            await anext(finished)
        held = detached.list_held()
    detached.close()
    peer = Peer("gen-0", Role.GENERATION, "127.0.0.1:1", "digest")
    assert CONTROL_BYTES // 3 < wire.registration_to_wire(peer, None, held).ByteSize() < CONTROL_BYTES
    newest = [request.rollout_id for request in reversed(asked)]
    assert [item.rollout_id for item in held] == [asked[0].rollout_id, *newest][: len(held)]


async def test_a_failed_rollout_is_not_held(replica: Replica) -> None:
    with pytest.raises(RecordInvalid):
        await anext(replica.client.generate_rollouts(build_requests(1, 100_000), False, -1, outlives_call=True))
    assert replica.service.list_held() == []


async def test_the_error_of_a_dead_engine_keeps_its_class_across_the_wire(replica: Replica) -> None:
    replica.engine.die()
    with pytest.raises(EngineFailed):
        await anext(replica.client.generate_rollouts(build_requests(1), False, -1))
    with pytest.raises(EngineFailed):
        await replica.client.get_status()
