"""The trainer service over the stand-in: idempotence, what is durable, and what ends the process."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from tests.integration.trainer.runs import a_batch, a_spec
from tests.stand_ins.trainer_backend import StandInBackend

from specrl.errors import PeerUnavailable, RecordInvalid, StoreFailed, VersionConflict
from specrl.records import Batch, TrainMetrics, WeightGroup, wire
from specrl.rpc.clients import TrainerClient
from specrl.rpc.server import serve
from specrl.spec.run import Checkpoint
from specrl.trainer import checkpoints
from specrl.trainer.ranks import RankLost
from specrl.trainer.service import TrainerService
from specrl.weights.group import BroadcastGroup
from specrl.weights.stream import receive

VOCAB = 16
DEADLINE_S = 30.0
DEFAULTS = Checkpoint()


class CountingBackend(StandInBackend):
    """Counts what is really trained, can lose a rank, and can take its time."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.trained: list[int] = []
        self.token_counts: list[int] = []
        self.is_lost = False

    def train_step(self, batch: Batch) -> TrainMetrics:
        if self.is_lost:
            raise RankLost("all trainer ranks must live, got one that died; start all of them again")
        metrics = super().train_step(batch)
        self.trained.append(batch.step)
        self.token_counts.append(sum(len(item.rollout.token_ids_T) for item in batch.rollouts))
        return metrics


@asynccontextmanager
async def a_trainer(
    run: Path, backend: CountingBackend, checkpoint: Checkpoint = DEFAULTS
) -> AsyncIterator[tuple[TrainerClient, TrainerService]]:
    spec = a_spec(run).model_copy(update={"checkpoint": checkpoint})
    service = TrainerService(backend, spec, run, "127.0.0.1")
    await service.load()
    server, port = await serve(service.add_to, "127.0.0.1", 0)
    async with TrainerClient(f"127.0.0.1:{port}") as client:
        try:
            yield client, service
        finally:
            await server.stop(None)
            await service.close()


async def test_repeated_step_is_answered_and_not_trained_again(tmp_path: Path) -> None:
    backend = CountingBackend()
    async with a_trainer(tmp_path, backend) as (client, _):
        first = await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        assert await client.train_step(a_batch(1, VOCAB), DEADLINE_S) == first
    assert backend.trained == [1]


async def test_a_batch_whose_stream_was_broken_off_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that dies may leave a stream that looks ended; the step must not be taken for trained by its rest."""
    monkeypatch.setattr(wire, "PART_BYTES", 1)
    backend, batch = CountingBackend(), a_batch(1, VOCAB, rollouts=4)
    parts = list(wire.train_step_parts(batch))
    assert len(parts) == 4
    async with a_trainer(tmp_path, backend) as (client, _):
        for wrong in (parts[:-1], parts[:1], [*parts, parts[1]]):
            call = client._stub.TrainParts(iter(wrong), timeout=DEADLINE_S)
            with pytest.raises(grpc.aio.AioRpcError, match="each once, got") as refusal:
                await call
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for count in range(1, 4):
            call = client._stub.TrainParts(timeout=DEADLINE_S)
            for part in parts[:count]:
                await call.write(part)
            call.cancel()
        assert (await client.train_step(batch, DEADLINE_S)).tokens > 0
    assert backend.trained == [1]
    assert backend.token_counts == [sum(len(item.rollout.token_ids_T) for item in batch.rollouts)]


async def test_a_checkpoint_in_the_background_lets_steps_be_trained_and_is_complete_when_it_is_answered(
    tmp_path: Path,
) -> None:
    """The next save waits for it; what was written is of the step that was asked for, not of those trained since."""
    backend = CountingBackend()
    write, may_write = backend.write_checkpoint, threading.Event()

    def slowly(directory: Path, taken: Any, state: Any) -> None:
        assert may_write.wait(DEADLINE_S)
        write(directory, taken, state)

    backend.write_checkpoint = slowly  # type: ignore[method-assign]
    async with a_trainer(tmp_path, backend) as (client, _):
        await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        of_step_1 = backend.policy_VV.copy()
        await client.save_checkpoint(1, DEADLINE_S, in_background=True)
        await client.train_step(a_batch(2, VOCAB), DEADLINE_S)
        first = asyncio.ensure_future(client.save_checkpoint(1, DEADLINE_S))
        second = asyncio.ensure_future(client.save_checkpoint(2, DEADLINE_S, in_background=True))
        await client.train_step(a_batch(3, VOCAB), DEADLINE_S)
        assert (await client.status()).checkpoint_step == 0
        assert checkpoints.complete(tmp_path) == []
        may_write.set()
        assert Path((await first)[0]) == checkpoints.directory(tmp_path, 1)
        with pytest.raises(VersionConflict, match="3, got step=2"):
            await second  # by the time that it could begin, step 3 was trained
    assert np.array_equal(np.load(checkpoints.directory(tmp_path, 1) / "policy.npy"), of_step_1)


async def test_a_checkpoint_that_failed_is_written_when_it_is_asked_for_again(tmp_path: Path) -> None:
    backend = CountingBackend()
    write = backend.write_checkpoint

    def refuse(directory: Path, taken: Any, state: Any) -> None:
        backend.write_checkpoint = write  # type: ignore[method-assign]
        raise StoreFailed(f"a checkpoint must be written to {directory}, got a full disk; make room on the disk")

    backend.write_checkpoint = refuse  # type: ignore[method-assign]
    async with a_trainer(tmp_path, backend) as (client, _):
        await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        await client.save_checkpoint(1, DEADLINE_S)  # the client asks again by itself
        assert (await client.status()).checkpoint_step == 1
        backend.write_checkpoint = refuse  # type: ignore[method-assign]
        await client.train_step(a_batch(2, VOCAB), DEADLINE_S)
        await client.save_checkpoint(2, DEADLINE_S, in_background=True)
        await client.train_step(a_batch(3, VOCAB), DEADLINE_S)
        with pytest.raises(StoreFailed, match="make room"):
            await client.save_checkpoint(2, DEADLINE_S)  # step 2 is past: the failure stands, however often one asks
        assert (await client.status()).checkpoint_step == 1


async def test_a_drafter_initialised_after_a_checkpoint_of_the_same_step_is_in_the_next_one(tmp_path: Path) -> None:
    """A coordinator that is stopped before the initialisation has step 0 written; the one after it, once more."""
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        await client.save_checkpoint(0, DEADLINE_S)
        await client.train_drafter(a_batch(1, VOCAB).rollouts, 1, DEADLINE_S)
        await client.save_checkpoint(0, DEADLINE_S)
        await client.save_checkpoint(0, DEADLINE_S)
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        assert (await client.status()).is_drafter_initialised


async def test_trainer_whose_disk_is_empty_goes_on_from_the_mirror(tmp_path: Path) -> None:
    """A checkpoint counts when its copy is complete; one that could not be copied is, when it is asked for again."""
    copies = tmp_path / "elsewhere"
    settings = Checkpoint(mirror=f"file://{copies}", keep=1)
    async with a_trainer(tmp_path / "run", CountingBackend(), settings) as (client, _):
        await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        copies.write_text("no folder")
        with pytest.raises(StoreFailed, match=r"checkpoint\.mirror must take a checkpoint, got file://"):
            await client.save_checkpoint(1, DEADLINE_S)
        copies.unlink()
        await client.save_checkpoint(1, DEADLINE_S)
        answer = await client.train_step(a_batch(2, VOCAB), DEADLINE_S)
        await client.save_checkpoint(2, DEADLINE_S)
    assert sorted(path.name for path in copies.iterdir()) == ["run.json", "step-000002", "step-000002.metrics.pb"]
    shutil.rmtree(tmp_path / "run")
    backend = CountingBackend()
    async with a_trainer(tmp_path / "run", backend, settings) as (client, _):
        assert (await client.status()).step == 2
        assert await client.train_step(a_batch(2, VOCAB), DEADLINE_S) == answer, "it was trained before"
    assert backend.trained == []


async def test_two_calls_for_one_step_at_once_train_it_once(tmp_path: Path) -> None:
    backend = CountingBackend()
    async with a_trainer(tmp_path, backend) as (client, _):
        calls = [client.train_step(a_batch(1, VOCAB), DEADLINE_S) for _ in range(3)]
        one, *others = await asyncio.gather(*calls)
    assert all(other == one for other in others)
    assert backend.trained == [1]


@pytest.mark.parametrize("step", [1, 4])
async def test_step_that_is_neither_next_nor_last_is_a_conflict(tmp_path: Path, step: int) -> None:
    backend = CountingBackend()
    async with a_trainer(tmp_path, backend) as (client, _):
        for known in (1, 2):
            await client.train_step(a_batch(known, VOCAB), DEADLINE_S)
        with pytest.raises(VersionConflict):
            await client.train_step(a_batch(step, VOCAB), DEADLINE_S)
    assert backend.trained == [1, 2]


async def test_restart_goes_on_from_the_newest_checkpoint_and_recalls_its_answer(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        for step in (1, 2):
            answer = await client.train_step(a_batch(step, VOCAB), DEADLINE_S)
        path, _ = await client.save_checkpoint(2, DEADLINE_S)
        await client.train_step(a_batch(3, VOCAB), DEADLINE_S)
    assert Path(path) == checkpoints.directory(tmp_path, 2)
    backend = CountingBackend()
    async with a_trainer(tmp_path, backend) as (client, _):
        status = await client.status()
        assert (status.step, status.checkpoint_step) == (2, 2)
        assert await client.train_step(a_batch(2, VOCAB), DEADLINE_S) == answer
        await client.train_step(a_batch(3, VOCAB), DEADLINE_S)
    assert backend.trained == [3]


async def test_checkpoint_of_another_step_is_a_conflict(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        with pytest.raises(VersionConflict):
            await client.save_checkpoint(1, DEADLINE_S)
    assert checkpoints.newest(tmp_path) is None


async def test_checkpoint_may_be_asked_for_twice(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        assert (await client.save_checkpoint(1, DEADLINE_S))[0] == (await client.save_checkpoint(1, DEADLINE_S))[0]


async def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        for step in range(1, 5):
            await client.train_step(a_batch(step, VOCAB), DEADLINE_S)
            await client.save_checkpoint(step, DEADLINE_S)
    assert [step for step, _ in checkpoints.complete(tmp_path)] == [3, 4]


async def test_poisoned_batch_arrives_as_what_it_was(tmp_path: Path) -> None:
    backend = CountingBackend()
    item = a_batch(1, VOCAB).rollouts[0]
    rollout = replace(item.rollout, sampler_logprobs_T=np.full(item.rollout.length, np.nan, dtype=np.float32))
    async with a_trainer(tmp_path, backend) as (client, _):
        with pytest.raises(RecordInvalid, match="finite"):
            await client.train_step(Batch(1, (replace(item, rollout=rollout),)), DEADLINE_S)
    assert backend.trained == []


async def test_batch_in_many_parts_is_trained_as_one_and_one_beyond_the_runs_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 1)
    schedule = a_spec(tmp_path).schedule
    most = schedule.prompts_per_step * schedule.group_size
    whole, backend = CountingBackend(), CountingBackend()
    whole.load(None)
    expected = whole.train_step(a_batch(1, VOCAB, rollouts=most))
    async with a_trainer(tmp_path, backend) as (client, _):
        with pytest.raises(
            RecordInvalid, match=f"at most promptsPerStep \\* groupSize rollouts, {most}, got {most + 1}"
        ):
            await client.train_step(a_batch(1, VOCAB, rollouts=most + 1), DEADLINE_S)
        found = await client.train_step(a_batch(1, VOCAB, rollouts=most), DEADLINE_S)
    assert (found.tokens, found.loss) == (expected.tokens, expected.loss)
    assert backend.trained == [1]


async def test_weights_go_through_a_group_that_the_client_opens(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        group = WeightGroup("epoch-1", "", 0, 0, 2, 20.0, "gloo")
        manifest = await client.describe_weights()
        address, port = await client.open_weight_group(group)

        def replica() -> tuple[int, ...]:
            joined = BroadcastGroup(replace(group, address=address, port=port, rank=1))
            try:
                return receive(joined, manifest).checksums
            finally:
                joined.close()

        received = asyncio.create_task(asyncio.to_thread(replica))
        sent, size_bytes, _ = await client.broadcast_weights("epoch-1", DEADLINE_S)
        assert await received == sent.checksums
        assert size_bytes == manifest.size_bytes


async def test_lost_rank_fails_the_call_and_ends_the_watch(tmp_path: Path) -> None:
    backend = CountingBackend()
    async with a_trainer(tmp_path, backend) as (client, service):
        watch = asyncio.create_task(service.watch())
        backend.is_lost = True
        with pytest.raises(PeerUnavailable, match="died"):
            await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        backend.is_lost = False
        with pytest.raises(PeerUnavailable, match="died"):
            await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        with pytest.raises(RankLost):
            await watch


async def test_scores_drafter_and_export_travel(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        items = a_batch(1, VOCAB).rollouts
        assert [len(item) for item in await client.score(items, DEADLINE_S)] == [i.rollout.length for i in items]
        assert len(await client.train_drafter(items, 2, DEADLINE_S)) == 2
        assert (await client.status()).is_drafter_initialised
        folders = await client.export_model(str(tmp_path / "out"), DEADLINE_S)
    assert folders == (str(tmp_path / "out" / "policy"), str(tmp_path / "out" / "drafter"))
