"""The trainer service over the stand-in backend: idempotence, checkpoints, mirrors, and lost ranks."""

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
import structlog
from tests.integration.trainer.runs import a_batch, a_spec
from tests.stand_ins.trainer_backend import StandInBackend

from specrl.api.v1 import trainer_pb2
from specrl.errors import (
    CheckpointInvalid,
    MemoryTooSmall,
    PeerUnavailable,
    RecordInvalid,
    RunInvalid,
    StoreFailed,
    VersionConflict,
)
from specrl.launcher.processes.programs import TRAINER_GRACE_S
from specrl.records import Batch, DrafterEpoch, TrainMetrics, WeightGroup, wire
from specrl.rpc.clients import TrainerClient
from specrl.rpc.server import start_server
from specrl.spec.run import Checkpoint
from specrl.telemetry import otel
from specrl.trainer import main
from specrl.trainer import service as service_module
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.ranks import RankLost
from specrl.trainer.service import TrainerService
from specrl.weights.group import BroadcastGroup
from specrl.weights.stream import receive_version
from specrl_operator.children.pods import STOP_S

VOCAB = 16
DEADLINE_S = 30.0
DEFAULTS = Checkpoint()


class CountingBackend(StandInBackend):
    """Records the steps that it really trains, and can lose a rank."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.trained: list[int] = []
        self.token_counts: list[int] = []
        self.is_lost = False
        self.has_memory = True

    def train_step(self, batch: Batch) -> TrainMetrics:
        if self.is_lost:
            raise RankLost("lost a trainer rank: it died; restart all of them")
        if not self.has_memory:
            raise MemoryError
        metrics = super().train_step(batch)
        self.trained.append(batch.step)
        self.token_counts.append(sum(len(item.rollout.token_ids_T) for item in batch.rollouts))
        return metrics


@asynccontextmanager
async def a_trainer(
    run: Path, backend: CountingBackend, checkpoint: Checkpoint = DEFAULTS, origin: Path | None = None
) -> AsyncIterator[tuple[TrainerClient, TrainerService]]:
    spec = a_spec(run).model_copy(update={"checkpoint": checkpoint})
    service = TrainerService(backend, spec, run, "127.0.0.1")
    await service.load_model(origin)
    server, port = await start_server(service.add_to, "127.0.0.1", 0)
    async with TrainerClient(f"127.0.0.1:{port}") as client:
        try:
            yield client, service
        finally:
            await server.stop(None)
            await service.close()


async def test_repeated_step_gets_the_same_reply_without_training(tmp_path: Path) -> None:
    backend = CountingBackend()
    async with a_trainer(tmp_path, backend) as (client, _):
        first = await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        assert await client.train_step(a_batch(1, VOCAB), DEADLINE_S) == first
    assert backend.trained == [1]


@pytest.mark.parametrize(("share", "warned"), [(None, False), (0.9, False), (1.0, True)])
async def test_a_step_whose_tokens_had_no_alternative_is_a_warning(
    tmp_path: Path, share: float | None, warned: bool
) -> None:
    """As with a topP that keeps one token everywhere: nothing is learned, and no figure of the loss says so."""

    class Certain(CountingBackend):
        def train_step(self, batch: Batch) -> TrainMetrics:
            return super().train_step(batch).model_copy(update={"certain_fraction": share})

    with structlog.testing.capture_logs() as events:
        async with a_trainer(tmp_path, Certain()) as (client, _):
            assert (await client.train_step(a_batch(1, VOCAB), DEADLINE_S)).certain_fraction == share
    assert ("gradient_vanished" in {event["event"] for event in events}) is warned


async def test_a_batch_from_an_incomplete_stream_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of a sender that dies may look complete. The partial batch must not count as the step."""
    monkeypatch.setattr(wire, "PART_BYTES", 1)
    backend = CountingBackend()
    batch = a_batch(1, VOCAB, rollouts=4)
    parts = list(wire.encode_train_parts(batch))
    assert len(parts) == 4
    async with a_trainer(tmp_path, backend) as (client, _):
        for wrong in (parts[:-1], parts[:1], [*parts, parts[1]]):
            call = client._stub.TrainParts(iter(wrong), timeout=DEADLINE_S)
            with pytest.raises(grpc.aio.AioRpcError, match="different rollouts together, got") as refusal:
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


async def test_steps_are_trained_while_a_checkpoint_is_written_in_the_background(
    tmp_path: Path,
) -> None:
    """The next save waits for it. The checkpoint holds the requested step, not those that were trained since."""
    backend = CountingBackend()
    write = backend.write_checkpoint
    may_write = threading.Event()

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
        assert (await client.get_status()).checkpoint_step == 0
        assert checkpoints.list_complete(tmp_path) == []
        may_write.set()
        assert Path(await first) == checkpoints.step_directory(tmp_path, 1)
        with pytest.raises(VersionConflict, match="3, got step=2"):
            await second  # step 3 was trained before this save could start
    assert np.array_equal(np.load(checkpoints.step_directory(tmp_path, 1) / "policy.npy"), of_step_1)


@pytest.mark.parametrize("slow", ["write_checkpoint", "score_rollouts"])
async def test_close_does_not_wait_for_a_long_write_or_a_running_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """It waited for both without a limit, although the process has to end within a pod's grace period."""
    monkeypatch.setattr(service_module, "SAVE_GRACE_S", 0.1)
    monkeypatch.setattr(service_module, "CLOSE_GRACE_S", 0.1)
    backend = CountingBackend()
    has_begun, may_end = threading.Event(), threading.Event()

    def wait(*_arguments: Any) -> None:
        has_begun.set()
        may_end.wait(DEADLINE_S)
        raise StoreFailed("no space; free some")

    service = TrainerService(backend, a_spec(tmp_path), tmp_path, "127.0.0.1")
    await service.load_model()
    monkeypatch.setattr(backend, slow, wait)
    if slow == "write_checkpoint":
        await service.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(step=0, in_background=True), None)
        running = service._saving.completion  # type: ignore[union-attr]
    else:
        running = asyncio.create_task(service.Score(trainer_pb2.ScoreRequest(), None))
    assert await asyncio.to_thread(has_begun.wait, DEADLINE_S)
    await service.close()
    assert not running.done()
    may_end.set()
    with pytest.raises(StoreFailed):
        await running


def test_a_trainer_ends_within_the_grace_period_of_its_pod_and_of_a_local_run() -> None:
    waits = (main.GOODBYE_S, main.STOP_GRACE_S, service_module.SAVE_GRACE_S, service_module.CLOSE_GRACE_S, otel.CLOSE_S)
    assert sum(waits) < min(STOP_S, TRAINER_GRACE_S)


async def test_a_failed_checkpoint_is_written_at_the_next_request(tmp_path: Path) -> None:
    backend = CountingBackend()
    write = backend.write_checkpoint

    def refuse(directory: Path, taken: Any, state: Any) -> None:
        backend.write_checkpoint = write  # type: ignore[method-assign]
        raise StoreFailed(f"could not write a checkpoint to {directory}: the disk is full; free space on it")

    backend.write_checkpoint = refuse  # type: ignore[method-assign]
    async with a_trainer(tmp_path, backend) as (client, _):
        await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        await client.save_checkpoint(1, DEADLINE_S)  # the client retries
        assert (await client.get_status()).checkpoint_step == 1
        backend.write_checkpoint = refuse  # type: ignore[method-assign]
        await client.train_step(a_batch(2, VOCAB), DEADLINE_S)
        await client.save_checkpoint(2, DEADLINE_S, in_background=True)
        await client.train_step(a_batch(3, VOCAB), DEADLINE_S)
        with pytest.raises(StoreFailed, match="free space"):
            await client.save_checkpoint(2, DEADLINE_S)  # step 2 is past, so the save cannot be repeated
        assert (await client.get_status()).checkpoint_step == 1


async def test_saving_a_step_again_adds_the_drafter_that_was_initialised_since(tmp_path: Path) -> None:
    """A coordinator that stops before the initialisation saves step 0, and its successor saves step 0 again."""
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        await client.save_checkpoint(0, DEADLINE_S)
        await client.train_drafter(a_batch(1, VOCAB).rollouts, (), [DrafterEpoch(1, 1, 1)], DEADLINE_S)
        await client.save_checkpoint(0, DEADLINE_S)
        await client.save_checkpoint(0, DEADLINE_S)
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        assert (await client.get_status()).is_drafter_initialised


async def test_trainer_with_an_empty_disk_resumes_from_the_mirror(tmp_path: Path) -> None:
    """A save is complete only with its copy in the mirror. A repeated save uploads the copy that failed."""
    copies = tmp_path / "elsewhere"
    settings = Checkpoint(mirror=f"file://{copies}", keep=1)
    async with a_trainer(tmp_path / "run", CountingBackend(), settings) as (client, _):
        await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        copies.write_text("no folder")
        with pytest.raises(StoreFailed, match=r"could not store a checkpoint at checkpoint\.mirror file://"):
            await client.save_checkpoint(1, DEADLINE_S)
        copies.unlink()
        await client.save_checkpoint(1, DEADLINE_S)
        answer = await client.train_step(a_batch(2, VOCAB), DEADLINE_S)
        await client.save_checkpoint(2, DEADLINE_S)
    assert sorted(path.name for path in copies.iterdir()) == ["run.json", "step-000002", "step-000002.metrics.pb"]
    shutil.rmtree(tmp_path / "run")
    backend = CountingBackend()
    async with a_trainer(tmp_path / "run", backend, settings) as (client, _):
        assert (await client.get_status()).step == 2
        assert await client.train_step(a_batch(2, VOCAB), DEADLINE_S) == answer, "it was trained before"
    assert backend.trained == []


async def train_steps(run: Path, *steps: int) -> None:
    """Train the steps of a run, with a checkpoint of each."""
    async with a_trainer(run, CountingBackend()) as (client, _):
        for step in steps:
            await client.train_step(a_batch(step, VOCAB), DEADLINE_S)
            await client.save_checkpoint(step, DEADLINE_S)


@pytest.mark.parametrize("folder", ["old", "old/checkpoints/step-000002"])
async def test_a_run_starts_from_the_checkpoint_of_another_and_goes_on_from_its_own(
    tmp_path: Path, folder: str
) -> None:
    """C7: an RLJob that had failed could not be continued by another."""
    await train_steps(tmp_path / "old", 1, 2)
    new = tmp_path / "new"
    async with a_trainer(new, CountingBackend(), origin=tmp_path / folder) as (client, _):
        status = await client.get_status()
        assert (status.step, status.checkpoint_step) == (2, 2)
        await client.train_step(a_batch(3, VOCAB), DEADLINE_S)
        await client.save_checkpoint(3, DEADLINE_S)
    shutil.rmtree(tmp_path / "old")  # the new run does not need it any more
    async with a_trainer(new, CountingBackend(), origin=tmp_path / folder) as (client, _):
        assert (await client.get_status()).step == 3


async def test_a_damaged_checkpoint_of_another_run_is_passed_over_and_refused_if_it_is_the_one_named(
    tmp_path: Path,
) -> None:
    await train_steps(tmp_path / "old", 1, 2)
    damaged = checkpoints.step_directory(tmp_path / "old", 2)
    (damaged / "policy.npy").write_bytes(b"none")
    async with a_trainer(tmp_path / "new", CountingBackend(), origin=tmp_path / "old") as (client, _):
        assert (await client.get_status()).step == 1
    with pytest.raises(CheckpointInvalid, match=r"step-000002 must match its checksums, got policy\.npy has 4 bytes"):
        async with a_trainer(tmp_path / "other", CountingBackend(), origin=damaged):
            pass
    assert not checkpoints.list_complete(tmp_path / "other")


async def test_a_checkpoint_that_is_not_there_or_is_the_last_one_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    await train_steps(tmp_path / "old-1a2b3c4d", 1, 2, 3)
    beside = r"must have a complete checkpoint, got \S+old-11111111, which has none; beside it there are old-1a2b3c4d$"
    with pytest.raises(CheckpointInvalid, match=beside):
        async with a_trainer(tmp_path / "claim" / "new", CountingBackend(), origin=tmp_path / "old-11111111"):
            pass
    with pytest.raises(RunInvalid, match=r"schedule\.steps must be greater than the checkpoint's step 3, got 3; raise"):
        async with a_trainer(tmp_path / "claim" / "new", CountingBackend(), origin=tmp_path / "old-1a2b3c4d"):
            pass


async def test_concurrent_calls_for_one_step_train_it_once(tmp_path: Path) -> None:
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


async def test_restart_resumes_from_the_newest_checkpoint_with_its_reply(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        for step in (1, 2):
            answer = await client.train_step(a_batch(step, VOCAB), DEADLINE_S)
        path = await client.save_checkpoint(2, DEADLINE_S)
        await client.train_step(a_batch(3, VOCAB), DEADLINE_S)
    assert Path(path) == checkpoints.step_directory(tmp_path, 2)
    backend = CountingBackend()
    async with a_trainer(tmp_path, backend) as (client, _):
        status = await client.get_status()
        assert (status.step, status.checkpoint_step) == (2, 2)
        assert await client.train_step(a_batch(2, VOCAB), DEADLINE_S) == answer
        await client.train_step(a_batch(3, VOCAB), DEADLINE_S)
    assert backend.trained == [3]


async def test_checkpoint_of_another_step_is_a_conflict(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        with pytest.raises(VersionConflict):
            await client.save_checkpoint(1, DEADLINE_S)
    assert checkpoints.find_newest(tmp_path) is None


async def test_saving_a_step_twice_is_idempotent(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        assert await client.save_checkpoint(1, DEADLINE_S) == await client.save_checkpoint(1, DEADLINE_S)


async def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        for step in range(1, 5):
            await client.train_step(a_batch(step, VOCAB), DEADLINE_S)
            await client.save_checkpoint(step, DEADLINE_S)
    assert [step for step, _ in checkpoints.list_complete(tmp_path)] == [3, 4]


async def test_poisoned_batch_raises_record_invalid_at_the_client(tmp_path: Path) -> None:
    backend = CountingBackend()
    item = a_batch(1, VOCAB).rollouts[0]
    rollout = replace(item.rollout, sampler_logprobs_T=np.full(item.rollout.total_length, np.nan, dtype=np.float32))
    async with a_trainer(tmp_path, backend) as (client, _):
        with pytest.raises(RecordInvalid, match="finite"):
            await client.train_step(Batch(1, (replace(item, rollout=rollout),)), DEADLINE_S)
    assert backend.trained == []


async def test_batch_in_parts_is_trained_whole_and_an_oversized_batch_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 1)
    schedule = a_spec(tmp_path).schedule
    most = schedule.prompts_per_step * schedule.group_size
    whole = CountingBackend()
    backend = CountingBackend()
    whole.load_model(None)
    expected = whole.train_step(a_batch(1, VOCAB, rollouts=most))
    async with a_trainer(tmp_path, backend) as (client, _):
        with pytest.raises(
            RecordInvalid, match=f"at most promptsPerStep \\* groupSize rollouts, {most}, got {most + 1}"
        ):
            await client.train_step(a_batch(1, VOCAB, rollouts=most + 1), DEADLINE_S)
        found = await client.train_step(a_batch(1, VOCAB, rollouts=most), DEADLINE_S)
    assert (found.tokens, found.loss) == (expected.tokens, expected.loss)
    assert backend.trained == [1]


async def test_weights_are_broadcast_to_a_group_that_the_client_opens(tmp_path: Path) -> None:
    backend = CountingBackend()
    backend.nccl_transport = "P2P/MNNVL"
    async with a_trainer(tmp_path, backend) as (client, _):
        group = WeightGroup("epoch-1", "", 0, 0, 2, 20.0, "gloo")
        manifest = await client.describe_weights()
        address, port = await client.open_weight_group(group)

        def replica() -> tuple[int, ...]:
            joined = BroadcastGroup(replace(group, address=address, port=port, rank=1))
            try:
                return receive_version(joined, manifest).checksums
            finally:
                joined.close()

        received = asyncio.create_task(asyncio.to_thread(replica))
        sent = await client.broadcast_weights("epoch-1", DEADLINE_S)
        assert await received == sent.checksums.checksums
        assert (sent.size_bytes, sent.nccl_transport) == (manifest.size_bytes, "P2P/MNNVL")
        assert sent.weight_transport == backend.weight_transport


async def test_lost_rank_fails_the_call_and_ends_the_service(tmp_path: Path) -> None:
    backend = CountingBackend()
    async with a_trainer(tmp_path, backend) as (client, service):
        watch = asyncio.create_task(service.watch_ranks())
        backend.is_lost = True
        with pytest.raises(PeerUnavailable, match="died"):
            await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        backend.is_lost = False
        with pytest.raises(PeerUnavailable, match="died"):
            await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        with pytest.raises(RankLost):
            await watch


async def test_a_rank_without_memory_fails_the_call_and_ends_the_service_for_good(tmp_path: Path) -> None:
    backend = CountingBackend()
    async with a_trainer(tmp_path, backend) as (client, service):
        watch = asyncio.create_task(service.watch_ranks())
        backend.has_memory = False
        with pytest.raises(MemoryTooSmall, match="in a training step"):
            await client.train_step(a_batch(1, VOCAB), DEADLINE_S)
        with pytest.raises(MemoryTooSmall, match="in a training step"):
            await watch


async def test_scores_drafter_metrics_and_export_paths_reach_the_client(tmp_path: Path) -> None:
    async with a_trainer(tmp_path, CountingBackend()) as (client, _):
        items = a_batch(1, VOCAB).rollouts
        assert [len(item) for item in await client.score_rollouts(items, DEADLINE_S)] == [
            i.rollout.total_length for i in items
        ]
        epochs = [DrafterEpoch(len(items), 1, 0.5, True), DrafterEpoch(len(items), 0.5, 0.1)]
        finished = await client.train_drafter(items, items[:1], epochs, DEADLINE_S)
        assert [item.epoch for item in finished] == epochs
        assert all(item.held_out is not None for item in finished)
        assert (await client.get_status()).is_drafter_initialised
        folders = await client.export_model(str(tmp_path / "out"), DEADLINE_S)
    assert folders == (str(tmp_path / "out" / "policy"), str(tmp_path / "out" / "drafter"))


@pytest.mark.parametrize("place", ["checkpoints/step-000001/policy", "weights/a", "logs", "", "..", "a/../../b", "\0"])
async def test_export_does_not_replace_what_the_run_needs(tmp_path: Path, place: str) -> None:
    """Whoever may call the trainer could replace the policy of a checkpoint."""
    async with a_trainer(tmp_path / "run", CountingBackend()) as (client, _):
        with pytest.raises(RecordInvalid, match=r"must be below the run's folder .* and not in checkpoints or weights"):
            await client.export_model(str(tmp_path / "run" / place), 10)
