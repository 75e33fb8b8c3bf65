"""The registry of a run's members: all registered replicas, the trainer, and whether they are alive.

`replica_states.py` draws the states of a replica. Callers report what happened (`suspect_replica`, `drain_replica`,
`mark_committed`), and the registry decides on the new state. Every change of state goes through
`Registry._change_state`, which checks it against the table, logs it, counts it, and keeps its reason for the status.

`Registry.changed` is set at every change. The loop and the rollout dispatcher wait on it. A peer that dies silently is
removed after MISSED_HEARTBEATS heartbeat intervals, which bounds every wait for a peer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from specrl.coordinator.members.agreement import LogprobComparison
from specrl.coordinator.members.replica_states import COMMITTED, IN_UPDATE, UPDATABLE, ReplicaState, check_transition
from specrl.errors import PeerUnavailable, RunInvalid, SpecrlError, VersionConflict
from specrl.records import (
    NO_DRAFTER,
    GenerationStatus,
    HeldRollout,
    Peer,
    Role,
    SpeculationCounters,
    StepCost,
    WeightChecksums,
)
from specrl.rpc.clients import GenerationClient, TrainerClient
from specrl.rpc.limits import WIDEST_LIMITS, MessageLimits
from specrl.rpc.run_token import RunToken
from specrl.rpc.tls import Identity
from specrl.telemetry import metrics

MISSED_HEARTBEATS = 5
"""Missed heartbeats after which a peer is removed as dead."""
SUSPECT_HEARTBEATS = 3
"""Missed heartbeats after which a replica is suspect. After two, a heartbeat may only be late."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Replica:
    """The record of one replica process, from its registration until it is DEAD.

    policy_version: version that it serves, -1 before its first commit.
    drafter_version: policy version at which the drafter that it serves was last trained.
    weights: checksums of what it has committed. The initialisation of a drafter changes them within one version.
    trusted_version: newest policy version whose rollouts may be stored: its canary agreed, or none was due.
    canary, canary_skips: its last comparison, and how many canaries in a row it did not answer.
    reason: why it left its planned course; empty otherwise.
    before_suspicion: state before SUSPECT.
    is_receiving: it takes part in a transfer. In a collective, the other members then wait for it.
    has_manifest: it has the manifest, the list of the tensors of a version.
    is_leaving: it becomes DRAINING, at the latest when its update ends. must_leave: its heartbeats tell it to leave.
    held_rollouts: rollouts that it already had when it registered, running or finished.
    inflight: training rollouts that it was given and has not returned.
    moved: set when its state, trust or load changes. `wait_until_trusted` and a drain wait on it.
    gone: set when the record ends (DEAD or STALE), which aborts all calls to the replica.
    """

    peer: Peer
    client: GenerationClient
    state: ReplicaState = ReplicaState.JOINING
    policy_version: int = -1
    drafter_version: int = NO_DRAFTER
    weights: WeightChecksums | None = None
    trusted_version: int = -1
    canary: LogprobComparison | None = None
    canary_skips: int = 0
    reason: str = ""
    before_suspicion: ReplicaState | None = None
    is_receiving: bool = False
    has_manifest: bool = False
    is_leaving: bool = False
    must_leave: bool = False
    last_seen_s: float = 0.0
    inflight: int = 0
    status: GenerationStatus | None = None
    held_rollouts: Sequence[HeldRollout] = ()
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def replica_id(self) -> str:
        return self.peer.peer_id

    @property
    def is_trusted(self) -> bool:
        """Whether its rollouts may be stored.

        False from the commit of an update until its canary has ended without disagreeing.
        """
        return self._underlying_state in COMMITTED and 0 <= self.policy_version <= self.trusted_version

    @property
    def _underlying_state(self) -> ReplicaState:
        """Its state; while it is SUSPECT, the state before."""
        return self.before_suspicion if self.before_suspicion is not None else self.state

    def add_load(self, rollouts: int) -> None:
        """Count rollouts that it was given; a negative number counts rollouts that it returned or lost."""
        self.inflight += rollouts
        self.moved.set()


@dataclass
class Trainer:
    """The record of the trainer process.

    gone: set when it is lost, which aborts all calls to it.
    weight_transport: transport of the weights to the replicas, and why; empty before the first weights.
    nccl_transport: NCCL's transports to the replicas, such as `NET/IB`; empty if they are not known.
    """

    peer: Peer
    client: TrainerClient
    last_seen_s: float = 0.0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    weight_transport: str = ""
    nccl_transport: str = ""


@asynccontextmanager
async def abort_when_gone(peer: Replica | Trainer) -> AsyncIterator[None]:
    """Run the body, which calls the peer, and abort it with PeerUnavailable as soon as the peer's record ends.

    Without it a call to a peer that hangs would only end at its deadline, and a stream never. It costs one task per
    block, however many messages arrive inside.
    """
    gone = asyncio.ensure_future(peer.gone.wait())
    limit = asyncio.timeout(None)  # does not expire by itself; the callback below makes it expire

    def expire_limit(_: object) -> None:
        if not gone.cancelled():
            limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with limit:
            gone.add_done_callback(expire_limit)
            try:
                yield
            finally:
                # If the callback is already scheduled, let it run inside the block: rescheduling a limit that is over
                # raises RuntimeError.
                if gone.remove_done_callback(expire_limit):
                    gone.cancel()
                elif not limit.expired():
                    await asyncio.sleep(0)
    except TimeoutError as error:
        if not limit.expired():
            raise  # a time-out of the body itself
        raise PeerUnavailable(f"lost {peer.peer.peer_id} during a call; retrying") from error


@dataclass(frozen=True)
class PeerClients:
    """Makes the clients for calls to peers. limits: largest message sizes. identity: None without TLS.

    token: of a run on one machine, which its peers ask for.
    """

    limits: MessageLimits = WIDEST_LIMITS
    identity: Identity | None = None
    token: RunToken | None = None

    def make_trainer_client(self, peer: Peer) -> TrainerClient:
        """Make a client for this trainer."""
        return TrainerClient(peer.address, self.limits.trainer, self.identity, self.token)

    def make_replica_client(self, peer: Peer) -> GenerationClient:
        """Make a client for this replica."""
        return GenerationClient(peer.address, peer.peer_id, self.limits.generation, self.identity, self.token)


class Registry:
    """Holds all members of one run.

    spec_digest: digest of the run file; peers with another one are refused. clock: monotonic seconds.
    newest_version: policy version of the transfer that began last.
    transitions: how often each change of state occurred, by state before and after.
    not_started: why the launcher starts replicas no more, by id; see `set_not_started`.
    changed: set at every change of a member.
    """

    def __init__(
        self,
        spec_digest: str,
        heartbeat_s: float,
        clock: Callable[[], float],
        run: str = "",
        clients: PeerClients | None = None,
    ) -> None:
        self._digest = spec_digest
        self._run = run
        self._clients = clients or PeerClients()
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._replaced: set[str] = set()  # incarnations that a newer process of the same id has replaced
        self._holders: list[Replica] = []  # replicas whose held rollouts the pipeline has not taken yet
        self._counted: dict[str, SpeculationCounters] = {}  # by incarnation, as `_step_costs`
        self._step_costs: dict[str, Sequence[StepCost]] = {}
        self.replicas: dict[str, Replica] = {}
        self.not_started: Mapping[str, str] = {}
        self.trainer: Trainer | None = None
        self._is_trainer_dismissed = False
        self.newest_version = -1
        self._newest: WeightChecksums | None = None  # what the last commit installed
        self.transitions: Counter[tuple[ReplicaState, ReplicaState]] = Counter()
        self.changed = asyncio.Event()

    def serving_replicas(self) -> list[Replica]:
        """Return the replicas that may be given rollouts, sorted by id."""
        return self._replicas_in(ReplicaState.SERVING)

    def joining_replicas(self) -> list[Replica]:
        """Return the replicas that need an update before they may serve, sorted by id."""
        return self._replicas_in(ReplicaState.JOINING)

    def set_not_started(self, reasons: Mapping[str, str]) -> None:
        """Set why the launcher starts replicas no more, by id. The run does not wait for these. Idempotent.

        One that is registered all the same is a replica like any other until its heartbeats stop.
        """
        if reasons == self.not_started:
            return
        for replica_id, reason in reasons.items():
            if self.not_started.get(replica_id) != reason:
                log.error("replica_not_restarted", replica=replica_id, reason=reason)
        self.not_started = dict(reasons)
        self.changed.set()

    def take_holders(self) -> list[Replica]:
        """Return live replicas that registered since the last call and have `held_rollouts`."""
        holders = self._holders
        self._holders = []
        return [replica for replica in holders if self.replicas.get(replica.replica_id) is replica]

    def updatable_replicas(self) -> list[Replica]:
        """Return the replicas that a new version is sent to, sorted by id."""
        return self._replicas_in(*UPDATABLE)

    def _replicas_in(self, *states: ReplicaState) -> list[Replica]:
        return [self.replicas[key] for key in sorted(self.replicas) if self.replicas[key].state in states]

    def register_peer(
        self, peer: Peer, status: GenerationStatus | None = None, held_rollouts: Sequence[HeldRollout] = ()
    ) -> None:
        """Register a peer, replacing an earlier process of the same id. Idempotent.

        Raises RunInvalid when it has another run file, or when a newer process of the same id has registered.
        """
        if peer.spec_digest != self._digest:
            raise RunInvalid(
                f"a peer's run file must be that of the coordinator, got {peer.peer_id} with digest "
                f"{peer.spec_digest[:12]} instead of {self._digest[:12]}; start it with run.yaml of the run directory"
            )
        known = self.trainer if peer.role is Role.TRAINER else self.replicas.get(peer.peer_id)
        if known is not None and known.peer == peer and not known.gone.is_set():
            known.last_seen_s = self._clock()  # a retry of the same call: its rollouts go on
            return
        # A registration may arrive late, after the process has been replaced. Accepting it would remove the newer one.
        if peer.incarnation in self._replaced:
            raise RunInvalid(
                f"a peer id must be unique, got {peer.peer_id} again from a process that a newer one has replaced; "
                "stop that process, or give it another id"
            )
        if known is not None and known.peer.incarnation != peer.incarnation:
            self._replaced.add(known.peer.incarnation)
        if peer.role is Role.TRAINER:
            if self.trainer is not None:
                self.trainer.gone.set()
            self.trainer = Trainer(peer, self._clients.make_trainer_client(peer), self._clock())
        else:
            before = self.replicas.get(peer.peer_id)
            if before is not None:
                self.remove_replica(before, "a newer incarnation registered")
            client = self._clients.make_replica_client(peer)
            replica = Replica(
                peer, client, last_seen_s=self._clock(), status=status, held_rollouts=tuple(held_rollouts)
            )
            self.replicas[peer.peer_id] = replica
            if held_rollouts:
                self._holders.append(replica)
        log.info("peer_registered", peer=peer.peer_id, role=peer.role.value, address=peer.address)
        self.changed.set()

    def note_heartbeat(self, peer_id: str, incarnation: str, status: GenerationStatus | None) -> bool:
        """Note a heartbeat. Returns False if the peer is not registered, or no longer: it must register again."""
        trainer = self.trainer
        replica = self.replicas.get(peer_id)
        if trainer is not None and trainer.peer.incarnation == incarnation and not trainer.gone.is_set():
            trainer.last_seen_s = self._clock()
            return True
        if replica is None or replica.peer.incarnation != incarnation or replica.state is ReplicaState.STALE:
            return False
        replica.last_seen_s = self._clock()
        if replica.state is ReplicaState.SUSPECT:
            self._clear_suspicion(replica)
        if status is not None:
            self.note_status(replica, status)
        return True

    def must_peer_leave(self, peer_id: str) -> bool:
        """Whether the peer must be told, in the reply to its heartbeat, that it has to leave."""
        replica = self.replicas.get(peer_id)
        if replica is not None:
            return replica.must_leave
        trainer = self.trainer
        return self._is_trainer_dismissed and trainer is not None and trainer.peer.peer_id == peer_id

    def dismiss_trainer(self) -> None:
        """Have the trainer leave at its next heartbeat, also if it registers only later: the run is over."""
        self._is_trainer_dismissed = True

    def note_status(self, replica: Replica, status: GenerationStatus) -> None:
        """Keep a replica's newest status, and log if its drafter was switched on or off."""
        before = replica.status.drafting if replica.status else None
        now = status.drafting
        if now is not None and now.state != (before.state if before is not None else "drafting"):  # drafters start on
            predicted = round(now.predicted_gain, 3)
            measured = now.measured_gain
            log.info(
                "drafter_state_changed",
                replica=replica.replica_id,
                state=now.state,
                predicted_gain=predicted,
                measured_gain=None if measured is None else round(measured, 3),
            )
        replica.status = status
        # By incarnation: a restarted engine counts from 0 again, and the counts of the old one must stay in the sum.
        self._counted[replica.peer.incarnation] = status.speculation
        if status.step_costs:  # heartbeats do not carry them
            self._step_costs[replica.peer.incarnation] = status.step_costs

    # -- updates ---------------------------------------------------------------------------------------------------

    def begin_transfer(self, replica: Replica) -> None:
        """Note that a transfer to the replica begins. It does not leave before `end_transfer`: the group needs it."""
        replica.is_receiving = True
        if replica.state is ReplicaState.JOINING:
            self._change_state(replica, ReplicaState.CATCHING_UP)

    def end_transfer(self, replica: Replica) -> None:
        """Note that the transfer has ended, with or without success."""
        replica.is_receiving = False
        replica.moved.set()

    def begin_commit(self, replica: Replica) -> None:
        """Note that the replica starts to load a version. Its rollouts are not stored until the commit has ended."""
        if replica.state is ReplicaState.SERVING:
            self._change_state(replica, ReplicaState.UPDATING)

    def mark_committed(self, replica: Replica, sent: WeightChecksums) -> None:
        """Note that the replica serves the weights that it was sent: SERVING, or DRAINING if it is leaving."""
        if replica.state not in IN_UPDATE:  # suspected meanwhile: `_clear_suspicion` has it repeat the update
            return
        replica.policy_version = sent.policy_version
        replica.drafter_version = sent.drafter_version
        replica.weights = self._newest = sent
        self._change_state(replica, ReplicaState.DRAINING if replica.is_leaving else ReplicaState.SERVING)

    def return_to_joining(self, replica: Replica, reason: str) -> None:
        """Return a replica to JOINING, so that its update is repeated. Its own calls have not failed."""
        if replica.state in IN_UPDATE or replica.state is ReplicaState.SERVING:
            self._change_state(replica, ReplicaState.JOINING, reason)
            if replica.is_leaving:  # it is not updated again, and may leave
                self._change_state(replica, ReplicaState.DRAINING)

    def return_late_replicas(self) -> None:
        """After a transfer, return replicas to JOINING that serve other weights than the newest: they missed it."""
        for replica in self.serving_replicas():
            if not self._serves_newest_weights(replica):
                self.return_to_joining(replica, "it missed a transfer")

    def _serves_newest_weights(self, replica: Replica) -> bool:
        return replica.policy_version >= self.newest_version and replica.weights == self._newest

    def trust_version(self, replica: Replica, policy_version: int) -> None:
        """Let rollouts that the replica samples under this version be stored. Wakes `wait_until_trusted`."""
        replica.trusted_version = policy_version
        replica.moved.set()

    def replace_record(self, replica: Replica) -> Replica:
        """Replace the record of a live replica by a new one that is JOINING.

        The calls of the old record are aborted, so its rollouts are requeued and none of them is stored.
        """
        fresh = Replica(
            replica.peer,
            replica.client,
            canary=replica.canary,
            canary_skips=replica.canary_skips,
            is_leaving=replica.is_leaving,
            must_leave=replica.must_leave,
            last_seen_s=replica.last_seen_s,
            status=replica.status,
        )
        self.remove_replica(replica, "its canary disagreed; it starts over")  # aborts all calls through `gone`
        self.replicas[replica.replica_id] = fresh
        self.changed.set()
        return fresh

    # -- failures --------------------------------------------------------------------------------------------------

    def suspect_replica(self, replica: Replica, reason: str) -> None:
        """Suspect that the replica is lost: it gets no new rollouts, and those it has go on until it is removed."""
        if replica.state in (ReplicaState.SUSPECT, ReplicaState.STALE, ReplicaState.DEAD):
            return
        before = replica.state
        self._change_state(replica, ReplicaState.SUSPECT, reason)
        replica.before_suspicion = before  # after the change of state, which clears it

    def _clear_suspicion(self, replica: Replica) -> None:
        """End the suspicion after a heartbeat. The replica is JOINING if it missed an update or is not trusted."""
        is_proved = self._serves_newest_weights(replica) and replica.policy_version <= replica.trusted_version
        if replica.is_leaving:
            self._change_state(replica, ReplicaState.DRAINING)
        elif replica.before_suspicion is ReplicaState.SERVING and is_proved:
            self._change_state(replica, ReplicaState.SERVING)
        else:
            self._change_state(replica, ReplicaState.JOINING)

    def note_call_failure(self, replica: Replica, error: SpecrlError) -> None:
        """Note that a call to the replica failed: SUSPECT if it is unreachable, STALE if it answered with an error."""
        if isinstance(error, PeerUnavailable):
            self.suspect_replica(replica, str(error))
        else:
            log.error("generation_failed", replica=replica.replica_id, reason=str(error))
            self.mark_stale(replica, str(error))

    def mark_stale(self, replica: Replica, reason: str) -> None:
        """Exclude the replica until it registers again. Its calls are aborted."""
        if replica.state not in (ReplicaState.STALE, ReplicaState.DEAD):
            self._change_state(replica, ReplicaState.STALE, reason)
            replica.gone.set()

    def remove_replica(self, replica: Replica, reason: str) -> None:
        """Remove a replica. Its calls are aborted, and the pipeline requeues its rollouts. Idempotent."""
        # Compares records, not ids: the aborted call of an old record must not remove the new one of the same id.
        if self.replicas.get(replica.replica_id) is replica:
            del self.replicas[replica.replica_id]
            self._change_state(replica, ReplicaState.DEAD, reason)
            replica.gone.set()

    def _change_state(self, replica: Replica, after: ReplicaState, reason: str = "") -> None:
        """Change the state of a replica. The only place that does. Raises TransitionForbidden."""
        before = replica.state
        check_transition(replica.replica_id, before, after)
        is_trouble = after in (ReplicaState.SUSPECT, ReplicaState.STALE, ReplicaState.DEAD)
        (log.warning if is_trouble else log.info)(
            "replica_state_changed",
            replica=replica.replica_id,
            before=before.value,
            after=after.value,
            reason=reason,
        )
        self.transitions[before, after] += 1
        metrics.REPLICA_TRANSITIONS.labels(self._run, before.value, after.value).inc()
        replica.state = after
        replica.reason = reason
        replica.before_suspicion = None
        replica.moved.set()
        self.changed.set()

    # -- leaving ---------------------------------------------------------------------------------------------------

    def drain_replica(self, replica: Replica) -> None:
        """Give the replica no new rollouts. During an update it drains once the update has ended. Idempotent."""
        replica.is_leaving = True
        if replica.state in (ReplicaState.JOINING, ReplicaState.SERVING):
            self._change_state(replica, ReplicaState.DRAINING)

    def dismiss_replica(self, replica_id: str) -> None:
        """Drain a replica and tell it to leave at its next heartbeat. Raises VersionConflict for an unknown id."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            known = ", ".join(sorted(self.replicas)) or "none"
            raise VersionConflict(f"replica_id must be a registered replica, got {replica_id}; registered: {known}")
        replica.must_leave = True
        self.drain_replica(replica)

    async def remove_leaving_peer(self, peer_id: str, incarnation: str, drain_s: float = 0.0) -> None:
        """Remove a peer that wants to leave. A replica is drained first, for at most `drain_s` seconds."""
        replica = self.replicas.get(peer_id)
        if replica is not None and replica.peer.incarnation == incarnation:
            if replica.state is ReplicaState.SUSPECT:  # the call shows that it is alive
                self._clear_suspicion(replica)
            self.drain_replica(replica)
            try:
                await self._wait_until_idle(replica, drain_s)
            finally:  # also if the call is cancelled: then the leaving process has ended
                self.remove_replica(replica, f"it left with {replica.inflight} unfinished rollouts")
        elif self.trainer is not None and self.trainer.peer.incarnation == incarnation:
            self.lose_trainer("it left")

    @staticmethod
    async def _wait_until_idle(replica: Replica, within_s: float) -> None:
        """Wait until the replica has no rollouts and takes part in no transfer, or `within_s` is over.

        `Replica.moved` wakes it. `Registry.remove_replica` sets that as well, so the loop ends when it is gone.
        """
        try:
            async with asyncio.timeout(within_s):
                while (replica.inflight > 0 or replica.is_receiving) and not replica.gone.is_set():
                    replica.moved.clear()
                    await replica.moved.wait()
        except TimeoutError:
            log.warning("drain_cut_short", replica=replica.replica_id, rollouts=replica.inflight, after_s=within_s)

    # -- trainer and silence -----------------------------------------------------------------------------------------

    def lose_trainer(self, reason: str) -> None:
        """Remove the trainer. Its calls are aborted, and the run waits for one to register. Idempotent."""
        if self.trainer is not None:
            log.warning("trainer_lost", reason=reason)
            self.trainer.gone.set()
            self.trainer = None
            self.changed.set()

    def expire_silent_peers(self) -> None:
        """Suspect replicas that miss heartbeats, and remove peers that miss more. Called once per heartbeat interval.

        No replica is suspected during an update: loading weights may delay heartbeats, and updates have deadlines.
        """
        now = self._clock()
        patience_s = MISSED_HEARTBEATS * self._heartbeat_s
        for replica in list(self.replicas.values()):
            silent_s = now - replica.last_seen_s
            if silent_s > patience_s:
                self.remove_replica(replica, f"no heartbeat for {patience_s:g} s")
            elif silent_s > SUSPECT_HEARTBEATS * self._heartbeat_s and replica.state not in IN_UPDATE:
                self.suspect_replica(replica, f"no heartbeat for {silent_s:.1f} s")
        if self.trainer is not None and now - self.trainer.last_seen_s > patience_s:
            self.lose_trainer(f"no heartbeat for {patience_s:g} s")

    async def fetch_statuses(self) -> None:
        """Fetch the status of every serving replica. One that does not answer keeps its last status, and is suspect."""
        replicas = self.serving_replicas()
        outcomes = await asyncio.gather(*(replica.client.get_status() for replica in replicas), return_exceptions=True)
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, GenerationStatus):
                self.note_status(replica, outcome)
            elif isinstance(outcome, SpecrlError):
                self.suspect_replica(replica, str(outcome))

    def sum_speculation_counters(self) -> SpeculationCounters:
        """Return the summed counters of all replicas since the coordinator started, removed ones included."""
        total = SpeculationCounters()
        for counters in self._counted.values():
            total = total.plus(counters)
        return total

    def step_costs(self) -> dict[str, Sequence[StepCost]]:
        """Return the measured step costs of each engine since its start, by incarnation, removed ones included."""
        return dict(self._step_costs)
