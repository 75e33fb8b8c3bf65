"""One version of policy and drafter to every replica, in one transaction:

    prepare (pause) -> broadcast | receive -> verify checksums -> commit (load, resume)

Nothing is loaded before its checksums agree with the trainer's, so a corrupted or torn transfer costs a repetition and
is never served. What fails is tried again without the members that do not answer; a replica that fails
`weights.attempts` times is ejected (STALE): it serves again only after it has registered and caught up.

Only the loop calls this, never while the trainer trains, so transfers never overlap. Every wait is a call with a
deadline or a collective with the group's time-out.
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

from specrl.coordinator.registry import Registry, Replica, ReplicaState, Trainer
from specrl.errors import ChecksumMismatch, CollectiveFailed, DeadlineExceeded, PeerUnavailable, SpecrlError
from specrl.records import NO_DRAFTER, WeightChecksums, WeightGroup, WeightManifest
from specrl.rpc.clients import UpdateTiming
from specrl.spec.run import RunSpec, Transport
from specrl.telemetry import metrics

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

    def __init__(self, spec: RunSpec, registry: Registry) -> None:
        self._spec = spec
        self._registry = registry
        self._group: WeightGroup | None = None
        self._members: tuple[str, ...] = ()
        self._manifest: WeightManifest | None = None
        self._epochs = itertools.count(1)

    async def publish(self, trainer: Trainer, replicas: Sequence[Replica]) -> Transfer:
        """Bring `replicas` to the trainer's version. Those that cannot be are ejected or gone when this returns.

        Raises TrainerLost.
        """
        try:
            transfer = Transfer((await trainer.client.status()).step)
        except SpecrlError as error:
            raise TrainerLost(str(error)) from error
        pending = list(replicas)
        for replica in pending:
            self._registry.move(replica, ReplicaState.UPDATING)
        try:
            for attempt in range(1, self._spec.weights.attempts + 1):
                pending = await self._attempt(trainer, _alive(pending), transfer)
                if not pending:
                    break
                transfer.retries += 1
                self._forget_group()
                log.warning("transfer_repeated", attempt=attempt, replicas=[r.replica_id for r in pending])
        except TrainerLost:
            self._forget_group()
            for replica in replicas:
                if replica.state is ReplicaState.UPDATING and not replica.gone.is_set():
                    self._registry.move(replica, ReplicaState.JOINING)
            raise
        for replica in pending:
            log.error("replica_ejected", replica=replica.replica_id, policy_version=transfer.policy_version)
            self._registry.move(replica, ReplicaState.STALE)
            replica.gone.set()
        self._count(transfer)
        return transfer

    async def _attempt(self, trainer: Trainer, replicas: list[Replica], transfer: Transfer) -> list[Replica]:
        """Try once; returns the live replicas that have not committed."""
        ready = await self._prepare(replicas, transfer)
        behind = [replica for replica in replicas if replica not in ready]
        return _alive(behind + (await self._move(trainer, ready, transfer) if ready else []))

    async def _move(self, trainer: Trainer, replicas: list[Replica], transfer: Transfer) -> list[Replica]:
        """Broadcast to paused replicas, verify, commit; returns those that have not committed."""
        began = time.monotonic()
        try:
            manifest, group = await self._form(trainer, replicas)
            sending = asyncio.ensure_future(trainer.client.broadcast_weights(group.group_id, 3 * group.timeout_s))
            receiving = [
                asyncio.ensure_future(
                    replica.client.receive_weights(transfer.policy_version, replace(group, rank=rank), manifest)
                )
                for rank, replica in self._ranked(replicas)
            ]
            received = await asyncio.gather(*receiving, return_exceptions=True)
            await asyncio.wait({sending})
        except SpecrlError as error:
            raise TrainerLost(str(error)) from error
        transfer.seconds["broadcast"] += time.monotonic() - began
        failure = sending.exception()
        if failure is not None:
            await self._blame(trainer, replicas, failure)
            return replicas
        checksums, transfer.size_bytes, _ = sending.result()
        transfer.digest, transfer.drafter_version = _digest(checksums), checksums.drafter_version
        arrived = [r for r, outcome in zip(replicas, received, strict=True) if not isinstance(outcome, BaseException)]
        failed = [replica for replica in replicas if replica not in arrived]
        for replica, outcome in zip(replicas, received, strict=True):
            if isinstance(outcome, BaseException):
                self._note_failure(replica, outcome)
        refused = await self._commit(arrived, checksums, transfer)
        return failed + refused

    async def _prepare(self, replicas: list[Replica], transfer: Transfer) -> list[Replica]:
        """Pause all; returns those that are paused."""
        began = time.monotonic()
        deadline_s = float(self._spec.weights.timeout_s)
        outcomes = await asyncio.gather(
            *(replica.client.prepare_update(transfer.policy_version, deadline_s) for replica in replicas),
            return_exceptions=True,
        )
        transfer.seconds["pause"] += time.monotonic() - began
        ready = []
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._note_failure(replica, outcome)
            else:
                ready.append(replica)
        return ready

    async def _form(self, trainer: Trainer, replicas: list[Replica]) -> tuple[WeightManifest, WeightGroup]:
        """The group of exactly these members: the present one, or a new epoch."""
        if self._manifest is None:
            self._manifest = await trainer.client.describe_weights()
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
        return self._manifest, self._group

    def _ranked(self, replicas: list[Replica]) -> list[tuple[int, Replica]]:
        width = self._spec.generation.tensor_parallel
        return [(1 + width * place, replica) for place, replica in enumerate(replicas)]

    async def _commit(self, replicas: list[Replica], checksums: WeightChecksums, transfer: Transfer) -> list[Replica]:
        """Verify, load and resume everywhere; returns the replicas that refused or failed."""
        deadline_s = float(self._spec.weights.timeout_s)
        outcomes = await asyncio.gather(
            *(replica.client.commit_update(checksums, deadline_s) for replica in replicas), return_exceptions=True
        )
        refused = []
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, UpdateTiming):
                replica.policy_version, replica.drafter_version = checksums.policy_version, checksums.drafter_version
                transfer.seconds["verify"] = max(transfer.seconds["verify"], outcome.verify_s)
                transfer.seconds["resume"] = max(transfer.seconds["resume"], outcome.load_s + outcome.resume_s)
                if not replica.gone.is_set():
                    self._registry.move(replica, ReplicaState.SERVING)
                continue
            self._note_failure(replica, outcome)
            refused.append(replica)
        return refused

    async def _blame(self, trainer: Trainer, replicas: list[Replica], error: BaseException) -> None:
        """A broadcast failed at the sender. Either the trainer is gone, or a member is: ask each of them."""
        if not isinstance(error, CollectiveFailed | DeadlineExceeded):
            raise TrainerLost(str(error)) from error
        log.warning("broadcast_failed", reason=str(error))
        try:
            await trainer.client.status()
        except SpecrlError as lost:
            raise TrainerLost(str(lost)) from lost
        for replica in replicas:
            try:
                await replica.client.status()
            except SpecrlError as lost:
                self._registry.remove(replica, str(lost))

    def _note_failure(self, replica: Replica, error: BaseException) -> None:
        """Log and count a replica's failure; remove the replica when it is unreachable."""
        if not isinstance(error, SpecrlError):
            raise error
        reason = "checksum" if isinstance(error, ChecksumMismatch) else "failed"
        metrics.WEIGHT_SYNC_RETRIES.labels(self._spec.name, reason).inc()
        log.warning("replica_update_failed", replica=replica.replica_id, reason=str(error))
        if isinstance(error, PeerUnavailable):
            self._registry.remove(replica, str(error))

    def _forget_group(self) -> None:
        """The next attempt forms a new group: the old one's collectives may have been torn."""
        self._group, self._members = None, ()

    def _count(self, transfer: Transfer) -> None:
        for stage, seconds in transfer.seconds.items():
            metrics.WEIGHT_SYNC_SECONDS.labels(self._spec.name, stage).observe(seconds)
        metrics.WEIGHT_SYNC_BYTES.labels(self._spec.name).inc(transfer.size_bytes)


def _alive(replicas: list[Replica]) -> list[Replica]:
    return [replica for replica in replicas if not replica.gone.is_set()]


def _digest(checksums: WeightChecksums) -> str:
    """One short digest of all tensors' checksums, for people to compare."""
    return xxhash.xxh3_64_hexdigest(",".join(map(str, checksums.checksums)).encode())
