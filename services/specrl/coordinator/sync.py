"""One version of policy and drafter to every replica, in one transaction:

    probe -> broadcast | receive, while rollouts go on -> commit (verify checksums, pause, load, resume)

Nothing is loaded before its checksums agree with the trainer's, so a corrupted or torn transfer costs a repetition and
is never served. What fails is tried again, in a new group, without the members that do not answer: those are SUSPECT
from the first call on that they leave unanswered, and each attempt begins with a short one. One that answers and fails
`weights.attempts` times is STALE. Either serves again only after it has caught up.

Only the loop calls this, never while the trainer trains, so transfers never overlap. Every wait is a call with a
deadline or a collective with the group's time-out; a replica that is given up meanwhile, since its heartbeats have
stopped, is waited for no longer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import structlog
import xxhash

from specrl.coordinator.registry import Registry, Replica, Trainer, while_there
from specrl.coordinator.replica_states import IN_UPDATE, RECEIVING, UPDATABLE
from specrl.errors import (
    ChecksumMismatch,
    CollectiveFailed,
    DeadlineExceeded,
    PeerUnavailable,
    SpecrlError,
    StoreFailed,
)
from specrl.records import NO_DRAFTER, WeightChecksums, WeightGroup, WeightManifest
from specrl.records.weights import FILES
from specrl.rpc.clients import UpdateTiming
from specrl.spec.run import RunSpec, Transport
from specrl.telemetry import metrics
from specrl.telemetry.spans import COORDINATOR, SILENT, TRAINER, Recorder, SpanName

_Outcome = tuple[WeightChecksums, float] | BaseException
_Sent = tuple[WeightChecksums | None, list[_Outcome]]

PROBE_S = 10.0
"""A replica that does not say within so much time that it is there is not waited for in a collective."""

log = structlog.get_logger(__name__)


@dataclass
class Transfer:
    """What one update took, in seconds of wall time, and how it went. `digest` covers every tensor's checksum.

    drafter_version: policy version at which the drafter that was sent was last trained.
    """

    policy_version: int
    drafter_version: int = NO_DRAFTER
    digest: str = ""
    size_bytes: int = 0
    retries: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("pause", "broadcast", "verify", "resume"), 0.0)
    )


class TrainerLost(PeerUnavailable):
    """The trainer failed in the middle of an update; the loop brings it back and starts over."""


class WeightSync:
    """Moves the trainer's present version to replicas; keeps the process group while its members stay the same."""

    def __init__(self, spec: RunSpec, registry: Registry, recorder: Recorder = SILENT) -> None:
        self._spec = spec
        self._registry = registry
        self._recorder = recorder
        self._group: WeightGroup | None = None
        self._members: tuple[str, ...] = ()
        self._manifest: WeightManifest | None = None
        self._epochs = itertools.count(1)

    async def publish(self, trainer: Trainer, replicas: Sequence[Replica]) -> Transfer:
        """Bring `replicas` to the trainer's version. Those that cannot be are ejected or gone when this returns.

        Raises TrainerLost.
        """
        with self._recorder.begin(SpanName.SYNC, COORDINATOR) as span:
            transfer = await self._publish(trainer, replicas)
            span.note(policy_version=transfer.policy_version, size_bytes=transfer.size_bytes, retries=transfer.retries)
            return transfer

    async def _publish(self, trainer: Trainer, replicas: Sequence[Replica]) -> Transfer:
        try:
            transfer = Transfer((await trainer.client.status()).step)
        except SpecrlError as error:
            raise TrainerLost(str(error)) from error
        self._registry.newest_version = transfer.policy_version
        members = [replica for replica in replicas if replica.state in UPDATABLE]
        for replica in members:
            self._registry.begin_transfer(replica)
        try:
            pending = await self._repeat(trainer, members, transfer)
        except TrainerLost as error:
            self._forget_group()
            for replica in members:
                if replica.state in IN_UPDATE:
                    self._registry.put_back(replica, str(error))
            raise
        finally:
            for replica in members:
                self._registry.end_transfer(replica)
        for replica in pending:
            log.error("replica_ejected", replica=replica.replica_id, policy_version=transfer.policy_version)
            self._registry.make_stale(replica, f"{self._spec.weights.attempts} attempts at an update failed")
        self._registry.put_back_late()
        self._count(transfer)
        return transfer

    async def _repeat(self, trainer: Trainer, replicas: list[Replica], transfer: Transfer) -> list[Replica]:
        """Try until all that can be have committed; returns those that still have not after the last attempt."""
        pending = replicas
        for attempt in range(1, self._spec.weights.attempts + 1):
            pending = await self._attempt(trainer, pending, transfer)
            if not pending:
                break
            transfer.retries += 1
            self._forget_group()
            log.warning("transfer_repeated", attempt=attempt, replicas=[r.replica_id for r in pending])
        return pending

    async def _attempt(self, trainer: Trainer, replicas: list[Replica], transfer: Transfer) -> list[Replica]:
        """Try once; returns the replicas to try again with: neither committed, nor suspect, leaving or gone."""
        await self._probe(replicas)
        ready = [replica for replica in replicas if replica.state in RECEIVING]
        committed = await self._move(trainer, ready, transfer) if ready else []
        return [replica for replica in ready if replica.state in RECEIVING and replica not in committed]

    async def _move(self, trainer: Trainer, replicas: list[Replica], transfer: Transfer) -> list[Replica]:
        """Broadcast, and commit where everything arrived. Returns those that have committed."""
        began = time.monotonic()
        if self._manifest is None:
            self._manifest = await self._describe(trainer)
        send = self._write if self._spec.weights.transport is Transport.CHECKPOINT else self._broadcast
        sent, received = await send(trainer, replicas, transfer)
        transfer.seconds["broadcast"] += time.monotonic() - began
        if sent is None:
            return []
        transfer.digest, transfer.drafter_version = _digest(sent), sent.drafter_version
        arrived = []
        for replica, outcome in zip(replicas, received, strict=True):
            if isinstance(outcome, BaseException):
                self._note_failure(replica, outcome)
            else:
                arrived.append(replica)
        return await self._commit([r for r in arrived if r.state in RECEIVING], sent, transfer)

    async def _broadcast(self, trainer: Trainer, replicas: list[Replica], transfer: Transfer) -> _Sent:
        """One collective of the trainer and all replicas. Nothing was sent when it broke at the trainer."""
        try:
            group = await self._form(trainer, replicas)
            sending = asyncio.ensure_future(self._send(trainer, group))
            groups = [replace(group, rank=rank) for rank, _ in self._ranked(replicas)]
            received = await self._receive(replicas, groups, transfer)
            await asyncio.wait({sending})
        except SpecrlError as error:
            raise TrainerLost(str(error)) from error
        failure = sending.exception()
        if failure is not None:
            await self._blame(trainer, failure)
            return None, received
        sent, transfer.size_bytes, _ = sending.result()
        return sent, received

    async def _send(self, trainer: Trainer, group: WeightGroup) -> tuple[WeightChecksums, int, float]:
        with self._recorder.begin(SpanName.BROADCAST, TRAINER):
            return await trainer.client.broadcast_weights(group.group_id, 3 * group.timeout_s)

    async def _write(self, trainer: Trainer, replicas: list[Replica], transfer: Transfer) -> _Sent:
        """Files that the trainer writes, unless it has, and every replica reads. Raises StoreFailed, TrainerLost."""
        timeout_s = float(self._spec.weights.timeout_s)
        try:
            is_refused = transfer.retries > 0  # somebody could not read what is there
            with self._recorder.begin(SpanName.BROADCAST, TRAINER):
                sent, folder, transfer.size_bytes = await trainer.client.write_weights(is_refused, 3 * timeout_s)
        except StoreFailed:
            raise  # the trainer lives, and another one could not write there either
        except SpecrlError as error:
            raise TrainerLost(str(error)) from error
        group = WeightGroup("", "", 0, 0, 1, timeout_s, FILES, folder)
        return sent, await self._receive(replicas, [group] * len(replicas), transfer)

    async def _describe(self, trainer: Trainer) -> WeightManifest:
        try:
            return await trainer.client.describe_weights()
        except SpecrlError as error:
            raise TrainerLost(str(error)) from error

    async def _receive(self, replicas: list[Replica], groups: list[WeightGroup], transfer: Transfer) -> list[_Outcome]:
        """Have every replica take the version in; its checksums and seconds, or what it raised."""
        manifest = self._manifest
        assert manifest is not None, "a transfer begins with what it consists of"

        async def receive(replica: Replica, group: WeightGroup) -> tuple[WeightChecksums, float]:
            with self._recorder.begin(SpanName.RECEIVE, replica.replica_id):
                async with while_there(replica):
                    known, replica.has_manifest = replica.has_manifest, False
                    received = await replica.client.receive_weights(
                        transfer.policy_version, group, None if known else manifest
                    )
                    replica.has_manifest = True
                    return received

        calls = [receive(replica, group) for replica, group in zip(replicas, groups, strict=True)]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _probe(self, replicas: list[Replica]) -> None:
        """Suspect those that do not answer, before all others wait for them in a collective; note what others say."""
        deadline_s = min(PROBE_S, float(self._spec.weights.timeout_s))
        answers = await asyncio.gather(
            *(replica.client.probe(deadline_s) for replica in replicas), return_exceptions=True
        )
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, BaseException):
                self._note_failure(replica, answer, is_own_deadline=True)
            else:
                self._registry.note_status(replica, answer)

    async def _form(self, trainer: Trainer, replicas: list[Replica]) -> WeightGroup:
        """The group of exactly these members: the present one, or a new epoch."""
        members = (trainer.peer.incarnation, *(replica.peer.incarnation for replica in replicas))
        if self._group is None or self._members != members:
            workers = len(replicas) * self._spec.generation.tensor_parallel
            transport = self._spec.weights.transport
            wanted = WeightGroup(
                group_id=f"{next(self._epochs)}-{uuid.uuid4().hex[:8]}",
                address="",
                port=0,
                rank=0,
                world_size=1 + workers,
                timeout_s=float(self._spec.weights.timeout_s),
                transport="auto" if transport is Transport.AUTO else transport.value.lower(),
            )
            address, port = await trainer.client.open_weight_group(wanted)
            self._group, self._members = replace(wanted, address=address, port=port), members
            log.info("weight_group_formed", group=wanted.group_id, members=len(replicas) + 1)
        return self._group

    def _ranked(self, replicas: list[Replica]) -> list[tuple[int, Replica]]:
        width = self._spec.generation.tensor_parallel
        return [(1 + width * place, replica) for place, replica in enumerate(replicas)]

    async def _commit(self, replicas: list[Replica], checksums: WeightChecksums, transfer: Transfer) -> list[Replica]:
        """Verify, pause, load and resume everywhere. Returns those that have."""
        deadline_s = float(self._spec.weights.timeout_s)
        for replica in replicas:
            self._registry.begin_commit(replica)

        async def commit(replica: Replica) -> UpdateTiming:
            with self._recorder.begin(SpanName.COMMIT, replica.replica_id) as span:
                async with while_there(replica):
                    took = await replica.client.commit_update(checksums, deadline_s)
                span.end_in(
                    (SpanName.VERIFY, took.verify_s),
                    (SpanName.PAUSE, took.pause_s),
                    (SpanName.LOAD, took.load_s),
                    (SpanName.RESUME, took.resume_s),
                )
                return took

        outcomes = await asyncio.gather(*map(commit, replicas), return_exceptions=True)
        committed = []
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._note_failure(replica, outcome, is_own_deadline=True)
                continue
            took = transfer.seconds
            took["verify"] = max(took["verify"], outcome.verify_s)
            took["pause"] = max(took["pause"], outcome.pause_s)
            took["resume"] = max(took["resume"], outcome.load_s + outcome.resume_s)
            self._registry.committed(replica, checksums)
            committed.append(replica)
        return committed

    async def _blame(self, trainer: Trainer, error: BaseException) -> None:
        """A broadcast failed at the sender. Raises TrainerLost unless it was a member, which the next probe finds."""
        if not isinstance(error, CollectiveFailed | DeadlineExceeded):
            raise TrainerLost(str(error)) from error
        log.warning("broadcast_failed", reason=str(error))
        try:
            await trainer.client.status()
        except SpecrlError as lost:
            raise TrainerLost(str(lost)) from lost

    def _note_failure(self, replica: Replica, error: BaseException, *, is_own_deadline: bool = False) -> None:
        """Log and count a replica's failure; suspect it when it does not answer.

        is_own_deadline: a deadline was that of a call to it alone, not that of a collective, in which any member hangs.
        """
        if not isinstance(error, SpecrlError):
            raise error
        reason = "checksum" if isinstance(error, ChecksumMismatch) else "failed"
        metrics.WEIGHT_SYNC_RETRIES.labels(self._spec.name, reason).inc()
        log.warning("replica_update_failed", replica=replica.replica_id, reason=str(error))
        if isinstance(error, PeerUnavailable) or (is_own_deadline and isinstance(error, DeadlineExceeded)):
            self._registry.suspect(replica, str(error))

    def _forget_group(self) -> None:
        """The next attempt forms a new group: the old one's collectives may have been torn."""
        self._group, self._members = None, ()

    def _count(self, transfer: Transfer) -> None:
        for stage, seconds in transfer.seconds.items():
            metrics.WEIGHT_SYNC_SECONDS.labels(self._spec.name, stage).observe(seconds)
        metrics.WEIGHT_SYNC_BYTES.labels(self._spec.name).inc(transfer.size_bytes)


def _digest(checksums: WeightChecksums) -> str:
    """One short digest of all tensors' checksums, for people to compare."""
    return xxhash.xxh3_64_hexdigest(",".join(map(str, checksums.checksums)).encode())
