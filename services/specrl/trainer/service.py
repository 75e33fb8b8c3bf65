"""TrainerService over any TrainerBackend. Protobuf stops here.

Calls run one after another on one worker thread, which owns the backend; only the status is answered beside it, since
it must answer while a step is being trained, and checkpoints are written beside it, once their snapshot is taken.
A step is idempotent by its number: the last one's answer is kept, in memory and beside its checkpoint, and given again
without training. While nobody calls, the worker checks its ranks.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message

from specrl.api.v1 import trainer_pb2, trainer_pb2_grpc, weights_pb2
from specrl.errors import PeerUnavailable, RecordInvalid, SpecrlError, StoreFailed, VersionConflict
from specrl.files import SMALL_BYTES, read_bytes, write_bytes
from specrl.records import Batch, StreamPlace, WeightGroup, wire
from specrl.rpc.server import count_from_zero
from specrl.spec.run import RunSpec
from specrl.telemetry import metrics as telemetry
from specrl.trainer import checkpoints, exported, mirror
from specrl.trainer.backend import TrainerBackend
from specrl.trainer.ranks import IDLE_CHECK_S, RankLost

T = TypeVar("T")

MOST_EPOCHS = 100
"""Of a drafter's initialisation, unless the run file has more. Others would keep the trainer from everything else."""

SAVE_GRACE_S = 60.0
"""Longest that a trainer which is told to end waits for a checkpoint under way. One that is cut off was never there."""

log = structlog.get_logger(__name__)


class _Backend(TrainerBackend, Protocol):
    def check_alive(self) -> None: ...


@dataclass(frozen=True)
class _Saving:
    """A checkpoint on its way: SNAPSHOT (training waits) -> WRITING (it does not) -> complete, or failed.

    state: the step, and whether its drafter was initialised.
    """

    state: tuple[int, bool]
    path: Path
    snapshot_s: float
    completion: asyncio.Task[trainer_pb2.SaveCheckpointReply]

    def may_be_repeated(self, present: tuple[int, bool]) -> bool:
        """Whether another one of this step would be written where this one was not, or hold what this one does not."""
        done = self.completion
        has_failed = done.done() and (done.cancelled() or done.exception() is not None)
        return present[0] == self.state[0] and (has_failed or self.state != present)


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """The servicer. `lost` completes when the ranks no longer agree: the process must then end."""

    def __init__(self, backend: _Backend, spec: RunSpec, run_directory: Path, host: str) -> None:
        self._backend, self._spec, self._run, self._host = backend, spec, run_directory, host
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._last: trainer_pb2.TrainStepReply | None = None
        self._written: tuple[tuple[int, bool], trainer_pb2.WriteWeightsReply] | None = None
        self._mirror = mirror.of_run(spec)
        self._saving: _Saving | None = None
        self._kept: tuple[int, bool] | None = None
        self._save_begins = asyncio.Lock()
        self._last_used = time.monotonic()
        self._busy = 0
        self.lost: asyncio.Future[RankLost] = asyncio.get_running_loop().create_future()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve the calls of this service."""
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, server)
        count_from_zero(trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"])

    async def load(self) -> None:
        """Load the newest checkpoint of the run that can be read, or the initial model; recall the answer to its step.

        One that has none in its folder fetches that of its mirror. Raises CheckpointInvalid when there are checkpoints
        and none can be read: the initial model is not their like; StoreFailed when the mirror cannot be reached.
        """
        if self._mirror is not None and not checkpoints.complete(self._run):
            restored = await asyncio.to_thread(self._mirror.restore, self._run)
            log.info("mirror_consulted", url=self._mirror.url, restored=restored.name if restored else "nothing")
        loaded = await self._do(lambda: checkpoints.load_newest(self._run, self._backend.load))
        step = self._backend.status().step
        self._kept = self._present() if loaded is not None else None
        file = checkpoints.metrics_file(self._run, step)
        if file.is_file():
            try:
                self._last = trainer_pb2.TrainStepReply.FromString(read_bytes(file, SMALL_BYTES))
            except (DecodeError, OSError) as error:  # the step is then not answered again, only refused
                telemetry.FILES_PASSED_OVER.labels("step_answer").inc()
                log.warning("metrics_not_read", path=str(file), reason=str(error))
        telemetry.TRAINER_STEP.set(step)
        log.info("trainer_loaded", step=step, checkpoint=str(loaded) if loaded else "initial model")

    async def watch(self) -> None:
        """Check the ranks while nobody calls. Raises RankLost, its own or that of a call."""
        while not self.lost.done():
            await asyncio.wait([self.lost], timeout=IDLE_CHECK_S)
            if not self.lost.done() and not self._busy and time.monotonic() - self._last_used >= IDLE_CHECK_S:
                with suppress(PeerUnavailable):  # `lost` says it better
                    await self._do(self._backend.check_alive)
        raise self.lost.result()

    async def close(self) -> None:
        """Let the call and the checkpoint under way end, then leave all groups."""
        if self._saving is not None:
            await asyncio.wait([self._saving.completion], timeout=SAVE_GRACE_S)
        if not self.lost.done():
            await self._do(self._backend.close)
        self._worker.shutdown(wait=False)

    async def _do(self, work: Callable[[], T]) -> T:
        """Run on the worker thread; a lost rank is told to whoever waits on `lost`, too.

        To callers a trainer that has lost a rank is one that is gone, PeerUnavailable: it ends, and is started again.
        """
        if self.lost.done():
            raise _gone(self.lost.result())  # the next collective would wait for the rank that is gone
        self._busy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except RankLost as error:
            if not self.lost.done():
                self.lost.set_result(error)
            raise _gone(error) from error
        finally:
            self._busy -= 1
            self._last_used = time.monotonic()

    # -- calls --------------------------------------------------------------------------------------------------------

    async def TrainStep(self, request: trainer_pb2.TrainStepRequest, context: Any) -> trainer_pb2.TrainStepReply:
        return await self._train(wire.batch_from_wire(request.batch))

    async def TrainParts(
        self, request_iterator: AsyncIterator[trainer_pb2.TrainStepRequest], context: Any
    ) -> trainer_pb2.TrainStepReply:
        parts: list[Batch] = []
        total = 0
        async for request in request_iterator:
            part = wire.batch_from_wire(request.batch)
            if parts and not part.rollouts:
                raise RecordInvalid("every part of a batch but the first must have rollouts, got none; do not send it")
            if parts and request.rollouts_total != total:
                raise RecordInvalid(
                    f"all parts of a batch must say how many rollouts it has, got {total} and "
                    f"{request.rollouts_total}; send one batch in a call"
                )
            parts.append(part)
            total = request.rollouts_total
            self._check_count(parts)
        return await self._train(wire.batch_from_parts(parts, total))

    def _check_count(self, parts: Sequence[Batch]) -> None:
        """A call in parts has no size of its own that could be limited: its run's largest batch limits it."""
        schedule = self._spec.schedule
        most, count = schedule.prompts_per_step * schedule.group_size, sum(len(part.rollouts) for part in parts)
        if count > most:
            raise RecordInvalid(
                f"a batch must have at most promptsPerStep * groupSize rollouts, {most}, got {count}; use one run "
                "file everywhere"
            )

    async def _train(self, batch: Batch) -> trainer_pb2.TrainStepReply:
        def train() -> trainer_pb2.TrainStepReply:
            if self._last is not None and self._last.policy_version == batch.step == self._backend.status().step:
                return self._last
            metrics = self._backend.train_step(batch)
            exported.show_step(batch.step, metrics)
            if metrics.is_skipped:
                log.warning("step_skipped", step=batch.step, updates=metrics.updates, reason="gradients not finite")
            self._last = trainer_pb2.TrainStepReply(
                policy_version=batch.step, metrics=wire.train_metrics_to_wire(metrics)
            )
            log.info("step_trained", step=batch.step, tokens=metrics.tokens, seconds=round(metrics.train_seconds, 3))
            return self._last

        return await self._do(train)

    async def TrainDrafter(
        self, request: trainer_pb2.TrainDrafterRequest, context: Any
    ) -> trainer_pb2.TrainDrafterReply:
        rollouts = [wire.train_rollout_from_wire(item) for item in request.rollouts]
        most = max(MOST_EPOCHS, self._spec.trainer.drafter.initialisation.epochs)
        if not 0 < request.epochs <= most:
            raise RecordInvalid(f"epochs must be 1 to {most}, got {request.epochs}; use the run file's")
        progress = checkpoints.drafter_progress(self._run)
        metrics = await self._do(lambda: self._backend.train_drafter(rollouts, request.epochs, progress))
        if metrics:
            log.info("drafter_trained", epochs=len(metrics), acceptance=metrics[-1].acceptance_per_position)
        return trainer_pb2.TrainDrafterReply(epochs=[wire.drafter_metrics_to_wire(item) for item in metrics])

    async def EvaluateDrafter(
        self, request: trainer_pb2.EvaluateDrafterRequest, context: Any
    ) -> trainer_pb2.EvaluateDrafterReply:
        rollouts = [wire.train_rollout_from_wire(item) for item in request.rollouts]
        metrics = await self._do(lambda: self._backend.evaluate_drafter(rollouts))
        return trainer_pb2.EvaluateDrafterReply(metrics=wire.drafter_metrics_to_wire(metrics))

    async def Score(self, request: trainer_pb2.ScoreRequest, context: Any) -> trainer_pb2.ScoreReply:
        rollouts = [wire.train_rollout_from_wire(item) for item in request.rollouts]
        scores = await self._do(lambda: self._backend.score(rollouts))
        return trainer_pb2.ScoreReply(
            rollouts=[trainer_pb2.TokenLogprobs(logprobs=logprobs_T.tolist()) for logprobs_T in scores]
        )

    async def DescribeWeights(
        self, request: trainer_pb2.DescribeWeightsRequest, context: Any
    ) -> weights_pb2.WeightManifest:
        return wire.manifest_to_wire(await self._do(self._backend.describe_weights))

    async def OpenWeightGroup(
        self, request: trainer_pb2.OpenWeightGroupRequest, context: Any
    ) -> trainer_pb2.OpenWeightGroupReply:
        group = WeightGroup(
            group_id=request.group_id,
            address=self._host,
            port=0,
            rank=0,
            world_size=request.world_size,
            timeout_s=request.timeout_s,
            transport=request.transport,
        )
        group.check(float(self._spec.weights.timeout_s))
        port = await self._do(lambda: self._backend.open_weight_group(group))
        return trainer_pb2.OpenWeightGroupReply(address=self._host, port=port)

    async def BroadcastWeights(
        self, request: trainer_pb2.BroadcastWeightsRequest, context: Any
    ) -> trainer_pb2.BroadcastWeightsReply:
        def broadcast() -> trainer_pb2.BroadcastWeightsReply:
            started = time.perf_counter()
            sent = self._backend.broadcast_weights(request.group_id)
            seconds = time.perf_counter() - started
            size = self._backend.describe_weights().size_bytes
            return trainer_pb2.BroadcastWeightsReply(
                sent=wire.checksums_to_wire(sent), size_bytes=size, seconds=seconds
            )

        return await self._do(broadcast)

    async def WriteWeights(
        self, request: trainer_pb2.WriteWeightsRequest, context: Any
    ) -> trainer_pb2.WriteWeightsReply:
        return await self._do(lambda: self._write_weights(request.anew))

    def _write_weights(self, anew: bool) -> trainer_pb2.WriteWeightsReply:
        """Once for each version, and for a drafter that is initialised; a replica that joins reads the same files."""
        status = self._backend.status()
        present = (status.step, status.is_drafter_initialised)
        if self._written is not None and self._written[0] == present and not anew:
            return self._written[1]
        base = checkpoints.weights_directory(self._run)
        folder = base / f"version-{status.step:06d}-{uuid.uuid4().hex[:8]}"
        sent = self._backend.write_weights(folder)
        checkpoints.prune_weights(self._run, folder)
        size = self._backend.describe_weights().size_bytes
        reply = trainer_pb2.WriteWeightsReply(
            written=wire.checksums_to_wire(sent), folder=str(folder.absolute()), size_bytes=size
        )
        self._written = (present, reply)
        return reply

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Any
    ) -> trainer_pb2.SaveCheckpointReply:
        async with self._save_begins:
            saving = self._saving
            present = self._present()
            if saving is None or saving.state[0] != request.step or saving.may_be_repeated(present):
                place = wire.stream_place_from_wire(request.stream) if request.HasField("stream") else None
                saving = self._saving = await self._begin_saving(request.step, place)
        if request.in_background:
            return trainer_pb2.SaveCheckpointReply(path=str(saving.path), seconds=saving.snapshot_s)
        return await asyncio.shield(saving.completion)

    async def _begin_saving(self, step: int, place: StreamPlace | None) -> _Saving:
        """Wait for the save before, then have a snapshot taken. What becomes of it `completion` knows."""
        if self._saving is not None:
            await asyncio.wait([self._saving.completion])
        started = time.perf_counter()
        path, state = checkpoints.directory(self._run, step), self._present()
        writing = await self._do(lambda: self._snapshot(step, path, place))
        snapshot_s = time.perf_counter() - started
        if writing is not None:
            telemetry.TRAINER_CHECKPOINT_SNAPSHOT_SECONDS.observe(snapshot_s)
            log.info("checkpoint_begun", step=step, seconds=round(snapshot_s, 3))
        completion = asyncio.create_task(self._complete(state, path, writing, started), name=f"checkpoint-{step}")
        return _Saving(state, path, snapshot_s, completion)

    def _snapshot(self, step: int, path: Path, place: StreamPlace | None) -> Future[None] | None:
        """None when the checkpoint is complete already."""
        present = self._present()
        if step != present[0]:
            raise VersionConflict(
                f"the saved step must be the present one, {present[0]}, got step={step}; ask the status"
            )
        if (step, path) in checkpoints.complete(self._run) and self._kept == present:
            return None
        if self._last is not None:
            _write(checkpoints.metrics_file(self._run, step), self._last)
        return self._backend.save(path, place)

    def _present(self) -> tuple[int, bool]:
        """What a checkpoint made now would be of: the step, and whether its drafter is initialised."""
        status = self._backend.status()
        return status.step, status.is_drafter_initialised

    async def _complete(
        self, state: tuple[int, bool], path: Path, writing: Future[None] | None, started: float
    ) -> trainer_pb2.SaveCheckpointReply:
        step = state[0]
        try:
            if writing is not None:
                await asyncio.wrap_future(writing)
                self._kept = state
            await asyncio.to_thread(self._settle, step, is_new=writing is not None)
        except SpecrlError as error:
            log.error("checkpoint_not_saved", step=step, reason=str(error))  # whoever asked may be gone
            raise
        seconds = time.perf_counter() - started
        telemetry.TRAINER_CHECKPOINT_SECONDS.observe(seconds)
        log.info("checkpoint_saved", step=step, seconds=round(seconds, 3))
        return trainer_pb2.SaveCheckpointReply(path=str(path), seconds=seconds)

    def _settle(self, step: int, *, is_new: bool) -> None:
        """Delete what a complete checkpoint makes needless, and mirror it: it counts when its copy does, too.

        Raises StoreFailed, RunInvalid.
        """
        settings = self._spec.checkpoint
        checkpoints.prune(self._run, settings.keep, settings.milestone_every_steps)
        if self._mirror is not None and (is_new or step not in self._mirror.steps()):
            self._mirror.upload(self._run, step)
            self._mirror.prune(settings.keep, settings.milestone_every_steps)
        if step > 0:  # before that, a coordinator that died may ask for the initialisation's answer again
            checkpoints.drafter_progress(self._run).unlink(missing_ok=True)

    async def ExportModel(self, request: trainer_pb2.ExportModelRequest, context: Any) -> trainer_pb2.ExportModelReply:
        directory = self._within_run(request.directory)
        policy, drafter = await self._do(lambda: self._backend.export(directory))
        return trainer_pb2.ExportModelReply(policy_path=str(policy), drafter_path=str(drafter or ""))

    def _within_run(self, directory: str) -> Path:
        """An export replaces folders, so that nobody may have it made just anywhere."""
        try:
            found = Path(directory).resolve()
            if found.is_relative_to(self._run.resolve()) and found != self._run.resolve():
                return found
        except (OSError, ValueError):  # of a name that no file can have
            pass
        raise RecordInvalid(f"an export must go below the run's folder {self._run}, got {directory[:256]!r}; name one")

    async def GetTrainerStatus(
        self, request: trainer_pb2.GetTrainerStatusRequest, context: Any
    ) -> trainer_pb2.TrainerStatus:
        return wire.trainer_status_to_wire(self._backend.status())


def _gone(error: RankLost) -> PeerUnavailable:
    return PeerUnavailable(f"the trainer must stay, got a lost rank: {error}")


def _write(file: Path, message: Message) -> None:
    """Replace a file, as durably as the checkpoint that it goes with. Raises StoreFailed."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, message.SerializeToString(), is_synced=True)
    except OSError as error:
        raise StoreFailed(f"{file} must be writable, got {error.strerror}; make room on the disk") from error
