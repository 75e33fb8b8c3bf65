"""Transfers one version of policy and drafter from the trainer to replicas: over a collective, or through files.

A transport only stages the weights at the replicas. `weight_update.py` decides when they are loaded.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import structlog

from specrl.coordinator.members.registry import Replica, Trainer, abort_when_gone
from specrl.errors import CollectiveFailed, DeadlineExceeded, PeerUnavailable, SpecrlError, StoreFailed
from specrl.records import NO_DRAFTER, SentWeights, WeightChecksums, WeightGroup, WeightManifest
from specrl.records.weights import CHECKPOINT_TRANSPORT, compute_phase_deadline_s
from specrl.rpc.clients import STATUS_DEADLINE_S
from specrl.spec import RunSpec
from specrl.spec.run import Transport
from specrl.telemetry.spans import TRAINER, Recorder, SpanName

ReceiveResult = BaseException | None
"""Result of one replica: its error; None if it has staged the version."""

log = structlog.get_logger(__name__)


class TrainerLost(PeerUnavailable):
    """The trainer failed during an update. The loop waits for it to recover, then repeats the update."""


@dataclass
class WeightTransfer:
    """Result of one update.

    drafter_version: policy version at which the drafter that was sent was last trained.
    digest: short digest of the checksums of all tensors.
    retries: attempts that failed.
    seconds: wall time by part. Broadcast: sum over the attempts. Verify, pause and resume: slowest replica.
    """

    policy_version: int
    drafter_version: int = NO_DRAFTER
    digest: str = ""
    size_bytes: int = 0
    retries: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("pause", "broadcast", "verify", "resume"), 0.0)
    )


class WeightTransport(ABC):
    """Sends the trainer's current version to replicas.

    A version's manifest (names, shapes and types of its tensors) can take megabytes and never changes within a run. So
    it is fetched from the trainer once, and sent once to each replica.
    """

    def __init__(self, spec: RunSpec, recorder: Recorder) -> None:
        self._recorder = recorder
        self._timeout_s = float(spec.weights.timeout_s)
        self._manifest: WeightManifest | None = None

    @abstractmethod
    async def send_version(
        self, trainer: Trainer, replicas: Sequence[Replica], transfer: WeightTransfer
    ) -> tuple[WeightChecksums | None, list[ReceiveResult]]:
        """Send the version to all of these replicas at once, and fill in `transfer`.

        Returns the checksums of the tensors that were sent, or None if sending failed, and the replicas' results in
        order.
        Raises TrainerLost, and StoreFailed when the trainer cannot write files.
        """

    def drop_state(self) -> None:  # noqa: B027 - nothing to do for files, which a repeated `send_version` writes again
        """Drop state that a failed attempt may have left broken."""

    async def _load_manifest(self, trainer: Trainer) -> None:
        """Fetch the manifest from the trainer, unless it is known."""
        if self._manifest is None:
            self._manifest = await trainer.client.describe_weights()

    @property
    def _transfer_deadline_s(self) -> float:
        """Longest duration of a transfer, in seconds: joining a group, and sending. The manifest is known."""
        assert self._manifest is not None
        return self._timeout_s + compute_phase_deadline_s(self._timeout_s, self._manifest.size_bytes)

    async def _receive_everywhere(
        self, replicas: Sequence[Replica], groups: Sequence[WeightGroup], version: int
    ) -> list[ReceiveResult]:
        """Have every replica receive `version` in its group. The manifest must have been loaded before."""
        calls = [self._receive_at(replica, group, version) for replica, group in zip(replicas, groups, strict=True)]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _receive_at(self, replica: Replica, group: WeightGroup, version: int) -> None:
        with self._recorder.begin_span(SpanName.RECEIVE, replica.replica_id):
            async with abort_when_gone(replica):
                knows = replica.has_manifest
                replica.has_manifest = False  # until the call has succeeded: a failed call may not have delivered it
                manifest = None if knows else self._manifest
                # Longer than the replica's own deadline, which ends with its own error.
                deadline_s = self._transfer_deadline_s + STATUS_DEADLINE_S
                await replica.client.receive_weights(version, group, manifest, deadline_s)
                replica.has_manifest = True


def make_transport(spec: RunSpec, recorder: Recorder) -> WeightTransport:
    """Make the transport that weights.transport names."""
    is_files = spec.weights.transport is Transport.CHECKPOINT
    return FileTransport(spec, recorder) if is_files else CollectiveTransport(spec, recorder)


class CollectiveTransport(WeightTransport):
    """Broadcasts over a collective of the trainer and all replicas.

    Forming a group is slow, so it is reused as long as its members stay the same. The trainer has rank 0.
    """

    def __init__(self, spec: RunSpec, recorder: Recorder) -> None:
        super().__init__(spec, recorder)
        self._width = spec.generation.tensor_parallel
        transport = spec.weights.transport
        self._transport = "auto" if transport is Transport.AUTO else transport.value.lower()
        self._group: WeightGroup | None = None
        self._members: tuple[str, ...] = ()
        self._epochs = itertools.count(1)

    async def send_version(
        self, trainer: Trainer, replicas: Sequence[Replica], transfer: WeightTransfer
    ) -> tuple[WeightChecksums | None, list[ReceiveResult]]:
        """See WeightTransport. Broadcast and receives run concurrently, since a collective needs all of its members."""
        try:
            await self._load_manifest(trainer)
            group = await self._form_group(trainer, replicas)
            sending = asyncio.ensure_future(self._broadcast_weights(trainer, group))
            # Rank 0 is the trainer. A replica has as many ranks as it has tensor-parallel workers.
            groups = [replace(group, rank=1 + self._width * place) for place in range(len(replicas))]
            received = await self._receive_everywhere(replicas, groups, transfer.policy_version)
            await asyncio.wait({sending})  # does not raise; the error is handled below
        except SpecrlError as error:
            raise TrainerLost(str(error)) from error
        failure = sending.exception()
        if failure is not None:
            await _check_trainer_alive(trainer, failure)
            return None, received
        sent = sending.result()
        transfer.size_bytes = sent.size_bytes
        trainer.weight_transport = sent.weight_transport
        trainer.nccl_transport = sent.nccl_transport
        return sent.checksums, received

    def drop_state(self) -> None:
        """Form a new group at the next attempt: a member of the old one may hang in a broken collective."""
        self._group = None
        self._members = ()

    async def _broadcast_weights(self, trainer: Trainer, group: WeightGroup) -> SentWeights:
        with self._recorder.begin_span(SpanName.BROADCAST, TRAINER):
            # Longer than the group's time-out, so that a hanging collective ends with its own error first.
            deadline_s = group.timeout_s + self._transfer_deadline_s
            return await trainer.client.broadcast_weights(group.group_id, deadline_s)

    async def _form_group(self, trainer: Trainer, replicas: Sequence[Replica]) -> WeightGroup:
        """Return a group of exactly these members: the current one, or a new one."""
        # By incarnation: a restarted process has the same id, but is not in the group.
        members = (trainer.peer.incarnation, *(replica.peer.incarnation for replica in replicas))
        if self._group is None or self._members != members:
            group_id = f"{next(self._epochs)}-{uuid.uuid4().hex[:8]}"  # unique across restarts of this process
            world_size = 1 + len(replicas) * self._width
            # Without address and port, which the trainer chooses.
            wanted = WeightGroup(group_id, "", 0, 0, world_size, self._timeout_s, self._transport)
            address, port = await trainer.client.open_weight_group(wanted)
            self._group = replace(wanted, address=address, port=port)
            self._members = members
            log.info("weight_group_formed", group=wanted.group_id, members=len(members))
        return self._group


class FileTransport(WeightTransport):
    """Transfers weights through files that the trainer writes and every replica reads."""

    async def send_version(
        self, trainer: Trainer, replicas: Sequence[Replica], transfer: WeightTransfer
    ) -> tuple[WeightChecksums | None, list[ReceiveResult]]:
        """See WeightTransport. The trainer keeps a version's files, and writes them again only after a failure."""
        try:
            async with abort_when_gone(trainer):
                await self._load_manifest(trainer)
                with self._recorder.begin_span(SpanName.BROADCAST, TRAINER):
                    sent, folder, transfer.size_bytes = await trainer.client.write_weights(
                        transfer.retries > 0, self._timeout_s + self._transfer_deadline_s
                    )
        except StoreFailed:
            raise  # the trainer is alive, and a restarted one could not write there either
        except SpecrlError as error:
            raise TrainerLost(str(error)) from error
        trainer.weight_transport = "Checkpoint: the run file's weights.transport"
        group = WeightGroup("", "", 0, 0, 1, self._timeout_s, CHECKPOINT_TRANSPORT, folder)
        return sent, await self._receive_everywhere(replicas, [group] * len(replicas), transfer.policy_version)


async def _check_trainer_alive(trainer: Trainer, error: BaseException) -> None:
    """After a failed broadcast, check that the trainer is alive. Raises TrainerLost if it is not.

    If it is, a replica has failed; the probe of the next attempt finds out which.
    """
    if not isinstance(error, CollectiveFailed | DeadlineExceeded):
        raise TrainerLost(str(error)) from error
    log.warning("broadcast_failed", reason=str(error))
    try:
        await trainer.client.get_status()
    except SpecrlError as lost:
        raise TrainerLost(str(lost)) from lost
