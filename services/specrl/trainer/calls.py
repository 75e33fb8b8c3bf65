"""The calls that all ranks of a trainer run: parse a protobuf request, run the backend's method, build the reply.

Rank 0 broadcasts a call's name and its serialized request, and every rank runs the method of `RankCalls` with that name
(`ranks.py`). The method's type annotation says how to parse the request. So a call is defined once, here. State that
only rank 0 has is in `service.py`: earlier replies, checkpoints being written, the mirror.

Rollouts to train on, or to score, do not go to all ranks. The broadcast request has their outlines, and each data
parallel replica gets its own rollouts after it: `share_rollouts`, `add_share`. Rank 0 checks all of them before it
sends any. TrainDrafter, which a run calls before its first step, is broadcast whole.

Invariant: all ranks have the same run file and run directory, and reject the same requests.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from specrl.api.v1 import rollout_pb2, trainer_pb2, weights_pb2
from specrl.errors import RecordInvalid
from specrl.records import TrainRollout, WeightGroup, wire
from specrl.spec.run import RunSpec
from specrl.telemetry.hosts import bracket_host
from specrl.trainer.backend import SupervisedMetrics, TrainerBackend
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.layout import list_replicas
from specrl.trainer.micro_batches import plan_batch

# Limit on epochs of a TrainDrafter request, unless the run file asks for more. A request names all epochs from the
# first, of all numbers of answers.
MAX_EPOCHS = 100

# In these calls only rank 0 uses disks or the weight group, so only rank 0 may fail there. In all other calls, ranks
# that end differently no longer agree.
RANK_0_MAY_REFUSE = frozenset({"OpenWeightGroup", "BroadcastWeights", "WriteWeights", "ExportModel"})


@dataclass(frozen=True)
class SharedRequest:
    """A request whose rollouts are divided over the data parallel replicas.

    outline: the request, with outlines instead of rollouts. indices: of each replica's rollouts, ascending.
    """

    request: Message
    outline: Message
    indices: Sequence[Sequence[int]]

    def encode_share(self, replica: int) -> bytes:
        """Encode the rollouts of a replica, as `add_share` reads them."""
        rollouts = list_rollouts(self.request)
        chosen = self.indices[replica]
        share = rollout_pb2.RolloutShare(indices=chosen, rollouts=(rollouts[index] for index in chosen))
        return share.SerializeToString()


class RankCalls:
    """One rank's handlers for the calls of TrainerService and for those that rank 0 makes itself.

    The latter are Load, TrainSupervised, CheckAlive and Close. Method names are those of the RPCs.
    """

    def __init__(self, backend: TrainerBackend, spec: RunSpec, run_directory: Path, host: str) -> None:
        self._backend = backend
        self._spec = spec
        self._run = run_directory
        self._host = host
        self.replicas = list_replicas(spec.trainer.parallelism)

    def share_rollouts(self, request: Message) -> SharedRequest | None:
        """Divide a request's rollouts over the data parallel replicas. None if every rank gets all of them.

        For rank 0. Raises RecordInvalid for rollouts that the backend rejects.
        """
        rollouts = list_rollouts(request)
        if len(self.replicas) == 1 or not rollouts:
            return None
        records = _read_rollouts(rollouts)
        self._backend.check_rollouts(records, is_step=isinstance(request, trainer_pb2.TrainPartsRequest))
        lengths = [len(item.prompt_token_ids) + item.rollout.total_length for item in records]
        plan = plan_batch(self._spec.trainer, lengths)
        indices = [sorted(index for cut in cuts for index in cut) for cuts in plan]
        outlines = [wire.outline_train_rollout(item) for item in rollouts]
        return SharedRequest(request, _replace_rollouts(request, outlines), indices)

    def Load(self, request: StringValue) -> None:
        """Load the checkpoint at this path; an empty path loads the initial model."""
        self._backend.load_model(Path(request.value) if request.value else None)

    def TrainParts(self, request: trainer_pb2.TrainPartsRequest) -> trainer_pb2.TrainPartsReply:
        """Train a step. `service.py` has joined the parts of the stream into this one request."""
        batch = wire.batch_from_wire(request.batch)
        metrics = wire.train_metrics_to_wire(self._backend.train_step(batch))
        return trainer_pb2.TrainPartsReply(policy_version=batch.step, metrics=metrics)

    def TrainSupervised(self, request: rollout_pb2.Batch) -> SupervisedMetrics:
        return self._backend.train_supervised(wire.batch_from_wire(request))

    def TrainDrafter(self, request: trainer_pb2.TrainDrafterRequest) -> trainer_pb2.TrainDrafterReply:
        epochs = [wire.drafter_epoch_from_wire(item) for item in request.epochs]
        most = max(MAX_EPOCHS, self._spec.trainer.drafter.initialisation.most_epochs)
        if not 0 < len(epochs) <= most:
            raise RecordInvalid(
                f"epochs must be 1 to {most}, got {len(epochs)}; set trainer.drafter.initialisation.epochs"
            )
        for epoch in epochs:
            if not 0 < epoch.rollouts <= len(request.rollouts):
                raise RecordInvalid(
                    f"rollouts of an epoch must be 1 to the request's {len(request.rollouts)}, got {epoch.rollouts}; "
                    "use the same version of specrl everywhere"
                )
            if not (0 <= epoch.first_rate <= 1 and 0 <= epoch.last_rate <= 1):
                raise RecordInvalid(
                    f"the rates of an epoch must be 0 to 1, got {epoch.first_rate} and {epoch.last_rate}; use the same "
                    "version of specrl everywhere"
                )
        rollouts, held_out = _read_rollouts(request.rollouts), _read_rollouts(request.held_out)
        progress = checkpoints.drafter_progress_file(self._run)
        finished = self._backend.train_drafter(rollouts, held_out, epochs, progress)
        return trainer_pb2.TrainDrafterReply(epochs=[wire.drafter_epoch_metrics_to_wire(item) for item in finished])

    def Score(self, request: trainer_pb2.ScoreRequest) -> trainer_pb2.ScoreReply:
        scores = self._backend.score_rollouts(_read_rollouts(request.rollouts))
        return trainer_pb2.ScoreReply(
            rollouts=[trainer_pb2.TokenLogprobs(logprobs=logprobs_T.tolist()) for logprobs_T in scores]
        )

    def DescribeWeights(self, request: trainer_pb2.DescribeWeightsRequest) -> weights_pb2.WeightManifest:
        return wire.manifest_to_wire(self._backend.describe_weights())

    def OpenWeightGroup(self, request: trainer_pb2.OpenWeightGroupRequest) -> trainer_pb2.OpenWeightGroupReply:
        group = WeightGroup(
            group_id=request.group_id,
            address=bracket_host(self._host),
            port=0,  # rank 0's store takes a free port, which the reply names
            rank=0,
            world_size=request.world_size,
            timeout_s=request.timeout_s,
            transport=request.transport,
        )
        group.check(float(self._spec.weights.timeout_s))
        return trainer_pb2.OpenWeightGroupReply(address=group.address, port=self._backend.open_weight_group(group))

    def BroadcastWeights(self, request: trainer_pb2.BroadcastWeightsRequest) -> trainer_pb2.BroadcastWeightsReply:
        started = time.perf_counter()
        sent = wire.checksums_to_wire(self._backend.broadcast_weights(request.group_id))
        seconds = time.perf_counter() - started
        size_bytes = self._backend.describe_weights().size_bytes
        return trainer_pb2.BroadcastWeightsReply(
            sent=sent,
            size_bytes=size_bytes,
            seconds=seconds,
            nccl_transport=self._backend.nccl_transport,
            weight_transport=self._backend.weight_transport,
        )

    def WriteWeights(self, request: trainer_pb2.WriteWeightsRequest) -> trainer_pb2.WriteWeightsReply:
        """Write the current version into a new folder below the run's weights directory."""
        # The random suffix differs between ranks. Only rank 0 writes, so only its folder matters.
        version = f"version-{self._backend.get_status().step:06d}-{uuid.uuid4().hex[:8]}"
        folder = checkpoints.weights_directory(self._run) / version
        written = wire.checksums_to_wire(self._backend.write_weights(folder))
        size_bytes = self._backend.describe_weights().size_bytes
        return trainer_pb2.WriteWeightsReply(written=written, folder=str(folder.absolute()), size_bytes=size_bytes)

    def SaveCheckpoint(self, request: trainer_pb2.SaveCheckpointRequest) -> Future[None]:
        """Take the snapshot. The future completes when this rank has written its share."""
        place = wire.stream_place_from_wire(request.stream) if request.HasField("stream") else None
        return self._backend.save_checkpoint(checkpoints.step_directory(self._run, request.step), place)

    def ExportModel(self, request: trainer_pb2.ExportModelRequest) -> trainer_pb2.ExportModelReply:
        policy, drafter = self._backend.export_model(Path(request.directory), drafter_only=request.drafter_only)
        return trainer_pb2.ExportModelReply(policy_path=str(policy or ""), drafter_path=str(drafter or ""))

    def CheckAlive(self, request: Empty) -> None:
        """Do nothing. Making the call at all fails when a rank is gone."""

    def Close(self, request: Empty) -> None:
        """Close the backend. No call may follow."""
        self._backend.close()


def list_rollouts(request: Message) -> Sequence[rollout_pb2.TrainRollout]:
    """List the rollouts of a request that a policy runs on; those of TrainDrafter do not count."""
    match request:
        case trainer_pb2.TrainPartsRequest():
            return request.batch.rollouts
        case rollout_pb2.Batch() | trainer_pb2.ScoreRequest():
            return request.rollouts
        case _:
            return ()


def _replace_rollouts(request: Message, rollouts: Sequence[rollout_pb2.TrainRollout]) -> Message:
    """Return the request with other rollouts. Its own are not copied, since they may be gigabytes."""
    match request:
        case trainer_pb2.TrainPartsRequest():
            batch = rollout_pb2.Batch(step=request.batch.step, rollouts=rollouts, positions=request.batch.positions)
            return trainer_pb2.TrainPartsRequest(batch=batch, rollouts_total=request.rollouts_total)
        case rollout_pb2.Batch():
            return rollout_pb2.Batch(step=request.step, rollouts=rollouts, positions=request.positions)
        case _:
            return trainer_pb2.ScoreRequest(rollouts=rollouts)


def has_outlines(request: Message) -> bool:
    """Whether a share of the request's rollouts comes after it."""
    return any(item.HasField("outline") for item in list_rollouts(request))


def add_share(request: Message, share: bytes) -> None:
    """Replace the outlines of this rank's rollouts with the rollouts."""
    rollouts = list_rollouts(request)
    message = rollout_pb2.RolloutShare.FromString(share)
    for index, item in zip(message.indices, message.rollouts, strict=True):
        rollouts[index].CopyFrom(item)


def _read_rollouts(messages: Sequence[rollout_pb2.TrainRollout]) -> list[TrainRollout]:
    return [wire.train_rollout_from_wire(message) for message in messages]
