"""Updates replicas to the trainer's version of policy and drafter, in one transaction per attempt:

    probe -> transfer, while rollouts go on -> commit (verify checksums, pause, load, resume)

Invariant: a replica loads a version only if its checksums equal the trainer's. A corrupted or partial transfer costs
another attempt and is never served.

A replica that refuses several times in a row for the same reason is given up, and is sent nothing more (`refusals.py`).

Failures: a replica that does not answer becomes SUSPECT and takes no part in the next attempt. Each attempt starts with
a short probe, so that a dead replica does not block the collective. A replica that answers, but fails
`weights.attempts` times, becomes STALE. Both serve again only after a complete update.

Only the loop calls this, and never while the trainer trains, so transfers never overlap. Every wait is bounded by the
deadline of a call or the time-out of a collective. It ends early when a replica is removed for missed heartbeats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog
import xxhash

from specrl.coordinator.members.refusals import RefusalCounter, is_refusal
from specrl.coordinator.members.registry import Registry, Replica, Trainer, abort_when_gone
from specrl.coordinator.members.replica_states import IN_UPDATE, RECEIVING, UPDATABLE
from specrl.coordinator.members.weight_transports import ReceiveResult, TrainerLost, WeightTransfer, make_transport
from specrl.errors import ChecksumMismatch, DeadlineExceeded, PeerUnavailable, ReplicasRefused, SpecrlError
from specrl.records import WeightChecksums
from specrl.records.weights import compute_phase_deadline_s
from specrl.rpc.clients import UpdateTiming
from specrl.spec import RunSpec
from specrl.telemetry import metrics
from specrl.telemetry.spans import COORDINATOR, SILENT_RECORDER, Recorder, SpanName

PROBE_S = 10.0
"""Deadline of a probe. A replica that does not answer in time does not take part in the collective."""

log = structlog.get_logger(__name__)


class WeightUpdater:
    """Updates replicas to the trainer's current version."""

    def __init__(self, spec: RunSpec, registry: Registry, recorder: Recorder = SILENT_RECORDER) -> None:
        self._run = spec.name
        self._attempts = spec.weights.attempts
        self._timeout_s = float(spec.weights.timeout_s)
        self._registry = registry
        self._recorder = recorder
        self._transport = make_transport(spec, recorder)
        self._refusals = RefusalCounter()
        self._reasons: dict[str, str] = {}  # why the last attempt at a replica failed, by incarnation

    def list_given_up(self) -> dict[str, str]:
        """Return why replicas are given up, by id: they refuse the weights, or the launcher starts them no more."""
        registered = self._registry.replicas
        refused = {name: it.peer.incarnation for name, it in registered.items() if self._is_given_up(it)}
        missing = {name: reason for name, reason in self._registry.not_started.items() if name not in registered}
        return missing | {name: self._refusals.given_up[incarnation] for name, incarnation in refused.items()}

    def joining_replicas(self) -> list[Replica]:
        """Return the replicas that need an update and may get one, sorted by id."""
        return [replica for replica in self._registry.joining_replicas() if not self._is_given_up(replica)]

    def check_any_left(self, wanted: int) -> None:
        """Raise ReplicasRefused if `wanted` replicas are given up and no other is registered."""
        given_up = self.list_given_up()
        if len(given_up) >= max(1, wanted) and self._registry.replicas.keys() <= given_up.keys():
            named = "; ".join(f"{name}: {reason}" for name, reason in sorted(given_up.items()))
            raise ReplicasRefused(f"no replica is left that takes the policy's weights: {named}")

    def _is_given_up(self, replica: Replica) -> bool:
        return replica.peer.incarnation in self._refusals.given_up

    async def publish_to_replicas(self, trainer: Trainer, replicas: Sequence[Replica]) -> WeightTransfer:
        """Update `replicas` to the trainer's version.

        When this returns, each of them serves it, or is suspect, stale or gone. Raises TrainerLost, and StoreFailed
        when the trainer cannot write files.
        """
        with self._recorder.begin_span(SpanName.SYNC, COORDINATOR) as span:
            try:
                transfer = WeightTransfer((await trainer.client.get_status()).step)
            except SpecrlError as error:
                raise TrainerLost(str(error)) from error
            # Set before the transfer, so that a replica that is suspect now is known to be behind when it returns.
            self._registry.newest_version = transfer.policy_version
            # The states may have changed since the caller chose the replicas.
            members = [it for it in replicas if it.state in UPDATABLE and not self._is_given_up(it)]
            for replica in members:
                self._registry.begin_transfer(replica)
            try:
                await self._retry_until_committed(trainer, members, transfer)
            except TrainerLost as error:
                self._transport.drop_state()
                for replica in members:
                    if replica.state in IN_UPDATE:
                        self._registry.return_to_joining(replica, str(error))
                raise
            finally:
                for replica in members:
                    self._registry.end_transfer(replica)
            # A replica may have returned from SUSPECT to SERVING during the transfer, without taking part in it.
            self._registry.return_late_replicas()
            self._count_transfer(transfer)
            span.add_attributes(
                policy_version=transfer.policy_version, size_bytes=transfer.size_bytes, retries=transfer.retries
            )
            return transfer

    async def _retry_until_committed(self, trainer: Trainer, members: list[Replica], transfer: WeightTransfer) -> None:
        """Attempt the update until every reachable replica has committed. Then make those STALE that have not."""
        pending = members
        for attempt in range(1, self._attempts + 1):
            pending = await self._attempt_update(trainer, pending, transfer)
            if not pending:
                return
            transfer.retries += 1
            self._transport.drop_state()
            log.warning("transfer_repeated", attempt=attempt, replicas=[r.replica_id for r in pending])
        for replica in pending:
            log.error("replica_ejected", replica=replica.replica_id, policy_version=transfer.policy_version)
            reason = self._reasons.get(replica.peer.incarnation)
            last = "" if reason is None else f", the last because: {reason}"
            self._registry.mark_stale(replica, f"{self._attempts} attempts at an update failed{last}")

    async def _attempt_update(
        self, trainer: Trainer, replicas: list[Replica], transfer: WeightTransfer
    ) -> list[Replica]:
        """Make one attempt. Returns the replicas to try again: not committed, but still reachable and not leaving."""
        # Probe. A dead replica must be found here, because in a collective all members would wait for it.
        probes = [replica.client.probe_status(min(PROBE_S, self._timeout_s)) for replica in replicas]
        for replica, status in zip(replicas, await asyncio.gather(*probes, return_exceptions=True), strict=True):
            if isinstance(status, BaseException):
                self._note_failure(replica, status, is_own_deadline=True)
            else:
                self._registry.note_status(replica, status)
        ready = [replica for replica in replicas if replica.state in RECEIVING]
        if not ready:
            return []

        # Transfer. Every replica stages the weights while its rollouts go on.
        began = time.monotonic()
        sent, received = await self._transport.send_version(trainer, ready, transfer)
        transfer.seconds["broadcast"] += time.monotonic() - began
        if sent is None:  # the broadcast failed; the probe of the next attempt finds a member that has died
            self._note_refusals(ready, received)
            return [replica for replica in ready if replica.state in RECEIVING]
        transfer.digest = _digest_checksums(sent)
        transfer.drafter_version = sent.drafter_version
        arrived = []
        for replica, outcome in zip(ready, received, strict=True):
            if isinstance(outcome, BaseException):
                self._note_failure(replica, outcome)
            elif replica.state in RECEIVING:
                arrived.append(replica)

        # Commit. Each replica verifies the trainer's checksums, pauses, loads the weights and resumes.
        for replica in arrived:
            self._registry.begin_commit(replica)
        deadline_s = compute_phase_deadline_s(self._timeout_s, transfer.size_bytes)
        commits = [self._commit_replica(replica, sent, deadline_s) for replica in arrived]
        committed = []
        for replica, took in zip(arrived, await asyncio.gather(*commits, return_exceptions=True), strict=True):
            if isinstance(took, BaseException):
                self._note_failure(replica, took, is_own_deadline=True)
                continue
            slowest = transfer.seconds  # replicas commit concurrently, so the slowest one decides
            slowest["verify"] = max(slowest["verify"], took.verify_s)
            slowest["pause"] = max(slowest["pause"], took.pause_s)
            slowest["resume"] = max(slowest["resume"], took.load_s + took.resume_s)
            self._registry.mark_committed(replica, sent)
            self._refusals.forget_refusals(replica.peer.incarnation)
            committed.append(replica)
        return [replica for replica in ready if replica.state in RECEIVING and replica not in committed]

    def _note_refusals(self, replicas: Sequence[Replica], received: Sequence[ReceiveResult]) -> None:
        """Note who refused a broadcast that failed. That is its cause: the others waited for this member in vain."""
        for replica, outcome in zip(replicas, received, strict=True):
            if outcome is not None and is_refusal(outcome):
                self._note_failure(replica, outcome)

    async def _commit_replica(self, replica: Replica, checksums: WeightChecksums, deadline_s: float) -> UpdateTiming:
        with self._recorder.begin_span(SpanName.COMMIT, replica.replica_id) as span:
            async with abort_when_gone(replica):
                took = await replica.client.commit_update(checksums, deadline_s)
            span.end_with_parts(
                (SpanName.VERIFY, took.verify_s),
                (SpanName.PAUSE, took.pause_s),
                (SpanName.LOAD, took.load_s),
                (SpanName.RESUME, took.resume_s),
            )
            return took

    def _note_failure(self, replica: Replica, error: BaseException, *, is_own_deadline: bool = False) -> None:
        """Log and count a replica's failure, and suspect the replica if it did not answer.

        is_own_deadline: the deadline belonged to a call to this replica alone. In a collective any member may be the
        one that hangs, so an exceeded deadline is no reason to suspect this one.
        """
        if not isinstance(error, SpecrlError):
            raise error  # a bug, or the task was cancelled
        reason = "checksum" if isinstance(error, ChecksumMismatch) else "failed"
        metrics.WEIGHT_SYNC_RETRIES.labels(self._run, reason).inc()
        log.warning("replica_update_failed", replica=replica.replica_id, reason=str(error))
        self._reasons[replica.peer.incarnation] = str(error)
        if self._refusals.count_refusal(replica.peer.incarnation, error):
            log.error("replica_abandoned", replica=replica.replica_id, reason=str(error))
        if isinstance(error, PeerUnavailable) or (is_own_deadline and isinstance(error, DeadlineExceeded)):
            self._registry.suspect_replica(replica, str(error))

    def _count_transfer(self, transfer: WeightTransfer) -> None:
        for part, seconds in transfer.seconds.items():
            metrics.WEIGHT_SYNC_SECONDS.labels(self._run, part).observe(seconds)
        metrics.WEIGHT_SYNC_BYTES.labels(self._run).inc(transfer.size_bytes)


def _digest_checksums(checksums: WeightChecksums) -> str:
    """Return a short digest of the checksums of all tensors, which users can compare."""
    return xxhash.xxh3_64_hexdigest(",".join(map(str, checksums.checksums)).encode())
