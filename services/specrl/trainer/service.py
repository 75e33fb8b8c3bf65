"""The gRPC service TrainerService at rank 0, over any TrainerBackend.

Calls run one after another on one worker thread, which owns the backend. Two things run beside it: GetTrainerStatus,
which must answer during a step, and writing a checkpoint whose snapshot has been taken. While there are no calls, the
worker checks that all ranks are alive.

Invariant: a step is idempotent by its number. The reply to the last step is kept in memory and beside its checkpoint,
so a repeated request gets the same reply without training again.

`calls.py` has what all ranks do for a call. This module has what rank 0 alone does before and after. `main.py` starts
it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import structlog
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message

from specrl.api.v1 import trainer_pb2, trainer_pb2_grpc
from specrl.errors import MemoryTooSmall, PeerUnavailable, RecordInvalid, SpecrlError, StoreFailed, VersionConflict
from specrl.files import SMALL_BYTES, read_bytes, resolve_path, write_bytes
from specrl.records import wire
from specrl.rpc.lifetime import run_until_first_ends
from specrl.rpc.server import export_zero_counts
from specrl.spec.run import RunSpec
from specrl.telemetry import metrics as telemetry
from specrl.trainer import step_metrics
from specrl.trainer.backend import TrainerBackend
from specrl.trainer.calls import RankCalls
from specrl.trainer.checkpointing import checkpoints, mirror
from specrl.trainer.checkpointing.origin import copy_from_origin
from specrl.trainer.ranks import IDLE_CHECK_S, AllRanks, ControlGroup, RankLost

# Longest waits when the trainer shuts down: for a checkpoint that is being written, then for the running call. With
# those of `main.py` and of traces, a pod of one rank ends within its grace period of 30 s. A checkpoint that is cut off
# leaves only a temporary folder, which a later save deletes.
SAVE_GRACE_S = 8.0
CLOSE_GRACE_S = 5.0

log = structlog.get_logger(__name__)

_NO_EXPORTS = ("checkpoints", "weights", "logs")
"""Folders of a run that an export must not replace."""


@dataclass(frozen=True)
class _CheckpointSave:
    """A checkpoint being saved: SNAPSHOT (training waits) -> WRITING (training goes on) -> complete or failed.

    state: the step, and whether the drafter was initialised. snapshot_s: seconds that the snapshot took.
    """

    state: tuple[int, bool]
    path: Path
    snapshot_s: float
    completion: asyncio.Task[trainer_pb2.SaveCheckpointReply]

    def may_be_repeated(self, present: tuple[int, bool]) -> bool:
        """Return whether saving this step again makes sense: this save failed, or lacks the initialised drafter."""
        done = self.completion
        has_failed = done.done() and (done.cancelled() or done.exception() is not None)
        return present[0] == self.state[0] and (has_failed or self.state != present)


def _forward_to_ranks(call: Callable[[RankCalls, Any], Any]) -> Any:
    """Build the handler of an RPC for which rank 0 has no extra work."""

    async def handle_call(service: TrainerService, request: Message, context: Any) -> Any:  # noqa: ARG001 - gRPC's
        return await service.call_all_ranks(call, request)

    return handle_call


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """The servicer. The future `lost` completes when a rank is lost or out of memory; the process must then end."""

    def __init__(
        self,
        backend: TrainerBackend,
        spec: RunSpec,
        run_directory: Path,
        host: str,
        control: ControlGroup | None = None,
    ) -> None:
        """control: the control group with the other ranks; None if there are none."""
        self._backend = backend
        self._spec = spec
        self._run = run_directory
        self._ranks = AllRanks(RankCalls(backend, spec, run_directory, host), control)
        # One thread: the backend's methods are collectives, which all ranks must run in the same order.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        # For the mirror and copies of checkpoints. `asyncio.run` would wait for the loop's own threads at its end.
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mirror")
        # The reply to the last step, for a repeated request.
        self._last: trainer_pb2.TrainPartsReply | None = None
        # The last WriteWeights: the state that was written, and the reply.
        self._written: tuple[tuple[int, bool], trainer_pb2.WriteWeightsReply] | None = None
        self._mirror = mirror.open_mirror(spec)
        self._saving: _CheckpointSave | None = None
        # The state of the newest checkpoint that this process has completed or loaded.
        self._kept: tuple[int, bool] | None = None
        # Held while a save starts, so that concurrent requests for one step share one save.
        self._save_begins = asyncio.Lock()
        self._last_used = time.monotonic()
        self._busy = 0  # calls that run or wait for the worker thread
        self.lost: asyncio.Future[RankLost | MemoryTooSmall] = asyncio.get_running_loop().create_future()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register this service's calls at a server."""
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, server)
        export_zero_counts(trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"])

    async def load_model(self, origin: Path | None = None) -> None:
        """Load the run's newest readable checkpoint, or the initial model, and the reply to the step it is of.

        If the run's folder has no checkpoint, the newest one of the mirror is fetched first, or that of another run is
        copied. origin: as of `find_checkpoint`; None if the run starts from the initial model.

        Raises CheckpointInvalid when there are checkpoints but none can be read: starting over from the initial model
        would silently discard the training. Raises StoreFailed when the mirror cannot be reached, RunInvalid when
        `origin` has no step left to train, RankLost when another rank ends meanwhile.
        """
        # The other ranks wait for their first call. A large checkpoint may take longer than CONTROL_TIMEOUT.
        await run_until_first_ends(self._fetch_checkpoint(origin), self.watch_ranks())
        loaded = await self._run_on_worker(lambda: checkpoints.load_newest(self._run, self._ranks.load_checkpoint))
        step = self._backend.get_status().step
        self._kept = self._current_state() if loaded is not None else None
        file = checkpoints.metrics_file(self._run, step)
        if file.is_file():
            try:
                self._last = trainer_pb2.TrainPartsReply.FromString(read_bytes(file, SMALL_BYTES))
            except (DecodeError, OSError) as error:  # a repeated request for this step is then rejected
                telemetry.FILES_SKIPPED.labels("step_answer").inc()
                log.warning("metrics_not_read", path=str(file), reason=str(error))
        telemetry.TRAINER_STEP.set(step)
        log.info("trainer_loaded", step=step, checkpoint=str(loaded) if loaded else "initial model")

    async def _fetch_checkpoint(self, origin: Path | None) -> None:
        """Fetch a checkpoint from the mirror, or copy it from `origin`, if the run's folder has none."""
        if self._mirror is not None and not checkpoints.list_complete(self._run):
            restored = await self._run_in_background(self._mirror.restore_newest, self._run)
            log.info("mirror_consulted", url=self._mirror.url, restored=restored.name if restored else "nothing")
        if origin is not None and not checkpoints.list_complete(self._run):
            copied = await self._run_in_background(copy_from_origin, self._run, origin, self._spec.schedule.steps)
            log.info("checkpoint_copied", source=str(copied))

    async def watch_ranks(self) -> None:
        """Check that all ranks are alive while there are no calls.

        Ends by raising what `lost` has, from a check or a call: RankLost or MemoryTooSmall.
        """
        while not self.lost.done():
            # Woken when a call loses a rank, at the latest after IDLE_CHECK_S.
            await asyncio.wait([self.lost], timeout=IDLE_CHECK_S)
            if not self.lost.done() and not self._busy and time.monotonic() - self._last_used >= IDLE_CHECK_S:
                with suppress(PeerUnavailable):  # `lost` has the RankLost behind it, raised below
                    await self.call_all_ranks(RankCalls.CheckAlive, Empty())
        raise self.lost.result()

    async def close(self) -> None:
        """Leave all groups, unless a checkpoint being written, or the running call, lasts longer than its grace.

        These end with the process, which must not wait for their threads.
        """
        if self._saving is not None:
            await asyncio.wait([self._saving.completion], timeout=SAVE_GRACE_S)
        if not self.lost.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.call_all_ranks(RankCalls.Close, Empty()), CLOSE_GRACE_S)
        # Their threads may hang, as in a collective with a lost rank.
        self._worker.shutdown(wait=False)
        self._background.shutdown(wait=False)

    async def _run_on_worker[T](self, work: Callable[[], T]) -> T:
        """Run `work` on the worker thread, after the calls before it.

        When it loses a rank, `lost` completes, and the caller gets PeerUnavailable: this process ends and is restarted.
        When its memory does not suffice, `lost` completes, and the caller gets MemoryTooSmall: the run ends.
        """
        if self.lost.done():
            raise _to_peer_unavailable(self.lost.result())  # another collective would wait for the rank that is gone
        self._busy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except RankLost as error:
            if not self.lost.done():
                self.lost.set_result(error)
            raise _to_peer_unavailable(error) from error
        except MemoryTooSmall as error:
            if not self.lost.done():
                self.lost.set_result(error)
            raise
        finally:
            self._busy -= 1
            self._last_used = time.monotonic()

    async def _run_in_background[*Arguments, T](self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Run `work` beside the calls."""
        return await asyncio.get_running_loop().run_in_executor(self._background, work, *arguments)

    async def call_all_ranks[Request: Message, Reply](
        self, call: Callable[[RankCalls, Request], Reply], request: Request
    ) -> Reply:
        """Run a method of RankCalls on every rank. Returns rank 0's result.

        Raises the method's SpecrlError, and PeerUnavailable when a rank is lost.
        """
        return await self._run_on_worker(lambda: self._ranks.run_call(call, request))

    # -- calls --------------------------------------------------------------------------------------------------------

    Score = _forward_to_ranks(RankCalls.Score)
    DescribeWeights = _forward_to_ranks(RankCalls.DescribeWeights)
    OpenWeightGroup = _forward_to_ranks(RankCalls.OpenWeightGroup)
    BroadcastWeights = _forward_to_ranks(RankCalls.BroadcastWeights)

    async def TrainParts(
        self, request_iterator: AsyncIterator[trainer_pb2.TrainPartsRequest], context: Any
    ) -> trainer_pb2.TrainPartsReply:
        schedule = self._spec.schedule
        most = schedule.prompts_per_step * schedule.group_size
        whole: trainer_pb2.TrainPartsRequest | None = None
        async for part in request_iterator:
            whole = wire.join_train_part(whole, part)
            # gRPC limits each message, not a stream of them. The run's largest legal batch bounds the stream.
            if (count := len(whole.batch.rollouts)) > most:
                raise RecordInvalid(
                    f"a batch must have at most promptsPerStep * groupSize rollouts, {most}, got {count}; use the same "
                    "run file for coordinator and trainer"
                )
        request = wire.check_joined_parts(whole)
        return await self._run_on_worker(lambda: self._train_once(request))

    def _train_once(self, request: trainer_pb2.TrainPartsRequest) -> trainer_pb2.TrainPartsReply:
        step = request.batch.step
        # A retry of the step that was just trained, after the reply was lost.
        if self._last is not None and self._last.policy_version == step == self._backend.get_status().step:
            return self._last
        reply = self._ranks.run_call(RankCalls.TrainParts, request)
        metrics = wire.train_metrics_from_wire(reply.metrics)
        step_metrics.export_step(step, metrics)
        if metrics.is_skipped:
            log.warning("step_skipped", step=step, updates=metrics.updates, reason="gradients not finite")
        if metrics.certain_fraction == 1:
            log.warning(
                "gradient_vanished",
                step=step,
                reason="topP and topK left one token everywhere, and its renormalised probability is always 1; raise "
                "topP, topK or temperature",
            )
        log.info("step_trained", step=step, tokens=metrics.tokens, seconds=round(metrics.train_seconds, 3))
        self._last = reply
        return reply

    async def TrainDrafter(
        self, request: trainer_pb2.TrainDrafterRequest, context: Any
    ) -> trainer_pb2.TrainDrafterReply:
        reply = await self.call_all_ranks(RankCalls.TrainDrafter, request)
        if reply.epochs:
            acceptance = tuple(reply.epochs[-1].trained.acceptance_per_position)
            log.info("drafter_trained", epochs=len(reply.epochs), acceptance=acceptance)
        return reply

    async def WriteWeights(
        self, request: trainer_pb2.WriteWeightsRequest, context: Any
    ) -> trainer_pb2.WriteWeightsReply:
        return await self._run_on_worker(lambda: self._write_weights(request))

    def _write_weights(self, request: trainer_pb2.WriteWeightsRequest) -> trainer_pb2.WriteWeightsReply:
        present = self._current_state()
        # Files are written once per state. A replica that joins later reads the same files.
        if self._written is not None and self._written[0] == present and not request.must_rewrite:
            return self._written[1]
        reply = self._ranks.run_call(RankCalls.WriteWeights, request)
        checkpoints.prune_versions(self._run, Path(reply.folder))
        self._written = (present, reply)
        return reply

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Any
    ) -> trainer_pb2.SaveCheckpointReply:
        async with self._save_begins:
            saving = self._saving
            present = self._current_state()
            if saving is None or saving.state[0] != request.step or saving.may_be_repeated(present):
                saving = self._saving = await self._begin_saving(request)
        if request.in_background:
            return trainer_pb2.SaveCheckpointReply(path=str(saving.path), seconds=saving.snapshot_s)
        return await asyncio.shield(saving.completion)

    async def _begin_saving(self, request: trainer_pb2.SaveCheckpointRequest) -> _CheckpointSave:
        """Wait for the previous save, then take a snapshot. The result's `completion` tells how the save ended."""
        if self._saving is not None:
            await asyncio.wait([self._saving.completion])
        started = time.perf_counter()
        step = request.step
        state = self._current_state()
        path = checkpoints.step_directory(self._run, step)
        writing = await self._run_on_worker(lambda: self._take_snapshot(request, path))
        snapshot_s = time.perf_counter() - started
        if writing is not None:
            telemetry.TRAINER_CHECKPOINT_SNAPSHOT_SECONDS.observe(snapshot_s)
            log.info("checkpoint_begun", step=step, seconds=round(snapshot_s, 3))
        saving = self._complete_save(state, path, writing, started, request.best_step)
        completion = asyncio.create_task(saving, name=f"checkpoint-{step}")
        return _CheckpointSave(state, path, snapshot_s, completion)

    def _take_snapshot(self, request: trainer_pb2.SaveCheckpointRequest, path: Path) -> Future[None] | None:
        """Take a snapshot of the present step. Returns None if its checkpoint is already complete."""
        step = request.step
        present = self._current_state()
        if step != present[0]:
            raise VersionConflict(
                f"the step of a checkpoint must be the trainer's current step, {present[0]}, got step={step}; call "
                "GetTrainerStatus first"
            )
        if (step, path) in checkpoints.list_complete(self._run) and self._kept == present:
            return None
        # Before the checkpoint, so that every complete checkpoint has the reply to its step beside it.
        if self._last is not None:
            _write_message(checkpoints.metrics_file(self._run, step), self._last)
        return self._ranks.run_call(RankCalls.SaveCheckpoint, request)

    def _current_state(self) -> tuple[int, bool]:
        """Return what a checkpoint made now would hold: the step, and whether the drafter is initialised."""
        status = self._backend.get_status()
        return status.step, status.is_drafter_initialised

    async def _complete_save(
        self, state: tuple[int, bool], path: Path, writing: Future[None] | None, started: float, best_step: int
    ) -> trainer_pb2.SaveCheckpointReply:
        step = state[0]
        try:
            if writing is not None:
                await asyncio.wrap_future(writing)
                self._kept = state
            await self._run_in_background(self._prune_and_mirror, step, best_step, writing is not None)
        except SpecrlError as error:
            log.error("checkpoint_not_saved", step=step, reason=str(error))  # the caller may not be waiting any more
            raise
        seconds = time.perf_counter() - started
        telemetry.TRAINER_CHECKPOINT_SECONDS.observe(seconds)
        log.info("checkpoint_saved", step=step, seconds=round(seconds, 3))
        return trainer_pb2.SaveCheckpointReply(path=str(path), seconds=seconds)

    def _prune_and_mirror(self, step: int, best_step: int, is_new: bool) -> None:
        """Delete superseded checkpoints and copy the new one to the mirror. The save is complete only after that.

        best_step: step of a checkpoint that stays; 0: none. Raises StoreFailed, RunInvalid.
        """
        settings = self._spec.checkpoint
        keeping = checkpoints.Keeping(settings.keep, settings.milestone_every_steps, best_step)
        checkpoints.prune_superseded(self._run, keeping)
        if self._mirror is not None and (is_new or step not in self._mirror.list_steps()):
            self._mirror.upload_step(self._run, step)
            self._mirror.delete_superseded(keeping)
        # At step 0, a restarted coordinator may repeat TrainDrafter, whose reply is read from this file.
        if step > 0:
            checkpoints.drafter_progress_file(self._run).unlink(missing_ok=True)

    async def ExportModel(self, request: trainer_pb2.ExportModelRequest, context: Any) -> trainer_pb2.ExportModelReply:
        directory = str(self._resolve_within_run(request.directory))
        request = trainer_pb2.ExportModelRequest(directory=directory, drafter_only=request.drafter_only)
        return await self.call_all_ranks(RankCalls.ExportModel, request)

    def _resolve_within_run(self, directory: str) -> Path:
        """Resolve an export's folder. An export replaces it, so it must be a folder of its own in the run's."""
        try:
            found = resolve_path(Path(directory))
            parts = found.relative_to(resolve_path(self._run)).parts
            if parts and parts[0] not in _NO_EXPORTS:
                return found
        except (OSError, ValueError):  # not a legal file name, or another place
            pass
        raise RecordInvalid(
            f"directory must be below the run's folder {self._run} and not in {' or '.join(_NO_EXPORTS)}, got "
            f"{directory[:256]!r}; name one"
        )

    async def GetTrainerStatus(
        self, request: trainer_pb2.GetTrainerStatusRequest, context: Any
    ) -> trainer_pb2.TrainerStatus:
        return wire.trainer_status_to_wire(self._backend.get_status())


def _to_peer_unavailable(error: SpecrlError) -> PeerUnavailable:
    return PeerUnavailable(f"the trainer is stopping and will be restarted: {error}")


def _write_message(file: Path, message: Message) -> None:
    """Replace a file atomically and sync it. Raises StoreFailed."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, message.SerializeToString(), is_synced=True)
    except OSError as error:
        raise StoreFailed(f"could not write {file}: {error.strerror}; free space on its disk") from error
