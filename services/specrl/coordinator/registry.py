"""Who is there: replicas and the trainer, as they registered, and whether they still live.

What a replica is to the coordinator, and how that changes, is drawn in `replica_states.py`. Each change goes through
`Registry._move`: it is checked against the table, logged, counted by before and after, and kept as the record's
`reason` for the status. Whoever calls says what happened (`suspect`, `drain`, `committed`); the registry decides where
that leads.

`changed` is set at every change; whoever waits for members waits on it (the loop and the generation stage), and a
heartbeat's deadline bounds how long a dead peer can be believed in.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from specrl.coordinator.agreement import Comparison
from specrl.coordinator.replica_states import COMMITTED, IN_UPDATE, UPDATABLE, ReplicaState, check_transition
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
from specrl.rpc.limits import WIDEST, MessageLimits
from specrl.rpc.tls import Identity
from specrl.telemetry import metrics

MISSED_HEARTBEATS = 5
"""After so many a peer is dead ..."""
SUSPECT_HEARTBEATS = 3
"""... and after so many a replica is suspect: with two it may only have been late."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Replica:
    """One process, from its registration to its end. `policy_version` is what it serves, -1 before its first commit.

    drafter_version: policy version at which the drafter that it serves was last trained.
    weights: what it has committed; policy and drafter may change under one version, when a drafter is initialised.
    trusted_version: newest version that a canary has proved here, or that none was due for.
    canary, canary_skips: its last comparison, and canaries in a row that it did not answer.
    reason: why it is in its state, where that was not as planned. before_suspicion: where SUSPECT leads back to.
    is_receiving: it is in a weight group with others that wait for it.
    has_manifest: it knows what a version consists of.
    is_leaving: it is to be DRAINING as soon as no update is under way. must_leave: it has yet to be told so.
    held: rollouts that it had under way, or finished, when it registered; until they are looked at.
    inflight: rollouts of the stream of steps that it was given and that have not come back.
    moved: set when its state, its trust or its load changes, for whoever waits for one of them.
    gone: set when the record is over, DEAD or STALE: calls of it end.
    """

    peer: Peer
    client: GenerationClient
    state: ReplicaState = ReplicaState.JOINING
    policy_version: int = -1
    drafter_version: int = NO_DRAFTER
    weights: WeightChecksums | None = None
    trusted_version: int = -1
    canary: Comparison | None = None
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
    held: Sequence[HeldRollout] = ()
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def replica_id(self) -> str:
        return self.peer.peer_id

    @property
    def is_trusted(self) -> bool:
        """Whether what it finishes now may be stored. False from the start of an update to its canary's verdict."""
        return self._stands in COMMITTED and 0 <= self.policy_version <= self.trusted_version

    @property
    def _stands(self) -> ReplicaState:
        """Where it is, suspicion left aside."""
        return self.before_suspicion if self.before_suspicion is not None else self.state

    def add_load(self, rollouts: int) -> None:
        """It was given so many rollouts; negative: they came back, or were lost."""
        self.inflight += rollouts
        self.moved.set()


@dataclass
class Trainer:
    """The live trainer. `gone` is set when it is known to be lost."""

    peer: Peer
    client: TrainerClient
    last_seen_s: float = 0.0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def while_there(peer: Replica | Trainer) -> AsyncIterator[None]:
    """Interrupt the body, which asks something of the peer, with PeerUnavailable as soon as the peer is lost.

    A call to one that hangs has no end but its own deadline, and a stream of one none at all. One task for a stream,
    and none for what arrives on it.
    """
    gone = asyncio.ensure_future(peer.gone.wait())
    limit = asyncio.timeout(None)

    def lost(_: object) -> None:
        if not gone.cancelled():
            limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with limit:
            gone.add_done_callback(lost)
            try:
                yield
            finally:  # a callback that is due by now would find the limit over
                if gone.remove_done_callback(lost):
                    gone.cancel()
                elif not limit.expired():
                    await asyncio.sleep(0)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise PeerUnavailable(f"{peer.peer.peer_id} must stay, got lost; what it had to do is asked again") from error


@dataclass(frozen=True)
class Calls:
    """How the coordinator calls its peers: messages of what size, and as whom; identity None: without TLS."""

    limits: MessageLimits = WIDEST
    identity: Identity | None = None

    def to_trainer(self, peer: Peer) -> TrainerClient:
        """A client of the trainer."""
        return TrainerClient(peer.address, self.limits.trainer, self.identity)

    def to_replica(self, peer: Peer) -> GenerationClient:
        """A client of a replica."""
        return GenerationClient(peer.address, peer.peer_id, self.limits.generation, self.identity)


class Registry:
    """All peers of one run. `clock` gives monotonic seconds.

    newest_version: policy version of the last transfer that began, whoever took part in it.
    """

    def __init__(
        self,
        spec_digest: str,
        heartbeat_s: float,
        clock: Callable[[], float],
        run: str = "",
        calls: Calls | None = None,
    ) -> None:
        self._digest, self._run, self._calls = spec_digest, run, calls or Calls()
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._replaced: set[str] = set()
        self._holders: list[Replica] = []
        self._counted: dict[str, SpeculationCounters] = {}
        self._step_costs: dict[str, Sequence[StepCost]] = {}
        self.replicas: dict[str, Replica] = {}
        self.trainer: Trainer | None = None
        self._sends_trainer_home = False
        self.newest_version = -1
        self._newest: WeightChecksums | None = None
        self.transitions: Counter[tuple[ReplicaState, ReplicaState]] = Counter()
        self.changed = asyncio.Event()

    def serving(self) -> list[Replica]:
        """Replicas that may be given work, by id."""
        return self._in(ReplicaState.SERVING)

    def joining(self) -> list[Replica]:
        """Replicas that wait for their first weights, or for some that they missed, by id."""
        return self._in(ReplicaState.JOINING)

    def take_holders(self) -> list[Replica]:
        """Live replicas that have registered, since the last call, with rollouts from before (`held`)."""
        holders, self._holders = self._holders, []
        return [replica for replica in holders if self.replicas.get(replica.replica_id) is replica]

    def to_update(self) -> list[Replica]:
        """Replicas that a new version goes to, by id."""
        return self._in(*UPDATABLE)

    def _in(self, *states: ReplicaState) -> list[Replica]:
        return [self.replicas[key] for key in sorted(self.replicas) if self.replicas[key].state in states]

    def register(self, peer: Peer, status: GenerationStatus | None = None, held: Sequence[HeldRollout] = ()) -> None:
        """Take in a peer, replacing an earlier incarnation. Idempotent.

        Raises RunInvalid when it runs another run file, or is a process whose place another one has taken.
        """
        if peer.spec_digest != self._digest:
            raise RunInvalid(
                f"a peer must run the coordinator's run file, got {peer.peer_id} with digest {peer.spec_digest[:12]} "
                f"instead of {self._digest[:12]}; start it with the run directory's run.yaml"
            )
        known = self.trainer if peer.role is Role.TRAINER else self.replicas.get(peer.peer_id)
        if known is not None and known.peer == peer and not known.gone.is_set():
            known.last_seen_s = self._clock()  # the same call again: what it has under way goes on
            return
        if peer.incarnation in self._replaced:
            raise RunInvalid(
                f"a peer's name must be its own, got {peer.peer_id} of a process that a newer one of that name has "
                "replaced; stop it, or give it another name"
            )
        if known is not None and known.peer.incarnation != peer.incarnation:
            self._replaced.add(known.peer.incarnation)
        if peer.role is Role.TRAINER:
            if self.trainer is not None:
                self.trainer.gone.set()
            self.trainer = Trainer(peer, self._calls.to_trainer(peer), self._clock())
        else:
            before = self.replicas.get(peer.peer_id)
            if before is not None:
                self.remove(before, "a newer incarnation registered")
            client = self._calls.to_replica(peer)
            replica = Replica(peer, client, last_seen_s=self._clock(), status=status, held=tuple(held))
            self.replicas[peer.peer_id] = replica
            if held:
                self._holders.append(replica)
        log.info("peer_registered", peer=peer.peer_id, role=peer.role.value, address=peer.address)
        self.changed.set()

    def heartbeat(self, peer_id: str, incarnation: str, status: GenerationStatus | None) -> bool:
        """Note a sign of life. False for a peer that is not known (any more): it must register again."""
        trainer, replica = self.trainer, self.replicas.get(peer_id)
        if trainer is not None and trainer.peer.incarnation == incarnation and not trainer.gone.is_set():
            trainer.last_seen_s = self._clock()
            return True
        if replica is None or replica.peer.incarnation != incarnation or replica.state is ReplicaState.STALE:
            return False
        replica.last_seen_s = self._clock()
        if replica.state is ReplicaState.SUSPECT:
            self._clear(replica)
        if status is not None:
            self.note_status(replica, status)
        return True

    def is_dismissed(self, peer_id: str) -> bool:
        """Whether a peer is to leave and has yet to be told."""
        replica = self.replicas.get(peer_id)
        if replica is not None:
            return replica.must_leave
        trainer = self.trainer
        return self._sends_trainer_home and trainer is not None and trainer.peer.peer_id == peer_id

    def dismiss_trainer(self) -> None:
        """Have the trainer leave, now or whenever it registers: the run is over."""
        self._sends_trainer_home = True

    def note_status(self, replica: Replica, status: GenerationStatus) -> None:
        """Keep a replica's newest status; say so when its drafter was switched."""
        before, now = replica.status.drafting if replica.status else None, status.drafting
        if now is not None and now.state != (before.state if before is not None else "drafting"):
            predicted, measured = round(now.predicted_gain, 3), now.measured_gain
            log.info(
                "drafter_moved",
                replica=replica.replica_id,
                state=now.state,
                predicted_gain=predicted,
                measured_gain=None if measured is None else round(measured, 3),
            )
        replica.status = status
        self._counted[replica.peer.incarnation] = status.speculation
        if status.step_costs:  # a heartbeat leaves them out
            self._step_costs[replica.peer.incarnation] = status.step_costs

    # -- updates ---------------------------------------------------------------------------------------------------

    def begin_transfer(self, replica: Replica) -> None:
        """Weights are on their way to it. It does not leave before `end_transfer`: the others share a collective."""
        replica.is_receiving = True
        if replica.state is ReplicaState.JOINING:
            self._move(replica, ReplicaState.CATCHING_UP)

    def end_transfer(self, replica: Replica) -> None:
        """However it ended."""
        replica.is_receiving = False
        replica.moved.set()

    def begin_commit(self, replica: Replica) -> None:
        """Everything has arrived, and it is about to load it: from now on nothing of it is taken in."""
        if replica.state is ReplicaState.SERVING:
            self._move(replica, ReplicaState.UPDATING)

    def committed(self, replica: Replica, sent: WeightChecksums) -> None:
        """It serves what it was sent. Nothing moves when it is not in an update any more: it has to repeat it."""
        if replica.state not in IN_UPDATE:
            return
        replica.policy_version, replica.drafter_version = sent.policy_version, sent.drafter_version
        replica.weights = self._newest = sent
        self._move(replica, ReplicaState.DRAINING if replica.is_leaving else ReplicaState.SERVING)

    def put_back(self, replica: Replica, reason: str) -> None:
        """Its update, or the proof of it, was broken off, through no fault of its own: it has to be repeated."""
        if replica.state in IN_UPDATE or replica.state is ReplicaState.SERVING:
            self._move(replica, ReplicaState.JOINING, reason)
            if replica.is_leaving:
                self._move(replica, ReplicaState.DRAINING)

    def put_back_late(self) -> None:
        """A transfer is over: whoever serves other weights than the newest has missed it."""
        for replica in self.serving():
            if not self._is_current(replica):
                self.put_back(replica, "it missed a transfer")

    def _is_current(self, replica: Replica) -> bool:
        return replica.policy_version >= self.newest_version and replica.weights == self._newest

    def trust(self, replica: Replica, policy_version: int) -> None:
        """What a replica samples under `policy_version` may be stored."""
        replica.trusted_version = policy_version
        replica.moved.set()

    def start_over(self, replica: Replica) -> Replica:
        """Take a live replica for one that just joined: calls of the old record end, what it had is requeued."""
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
        self.remove(replica, "its canary disagreed; it starts over")
        self.replicas[replica.replica_id] = fresh
        self.changed.set()
        return fresh

    # -- what goes wrong -------------------------------------------------------------------------------------------

    def suspect(self, replica: Replica, reason: str) -> None:
        """It may be gone: no new rollouts, and those under way go on until patience ends or it gives a sign of life."""
        if replica.state in (ReplicaState.SUSPECT, ReplicaState.STALE, ReplicaState.DEAD):
            return
        before = replica.state
        self._move(replica, ReplicaState.SUSPECT, reason)
        replica.before_suspicion = before

    def _clear(self, replica: Replica) -> None:
        """A sign of life of a suspect: back to where it was, or to JOINING when it has missed weights."""
        is_proved = self._is_current(replica) and replica.policy_version <= replica.trusted_version
        if replica.is_leaving:
            self._move(replica, ReplicaState.DRAINING)
        elif replica.before_suspicion is ReplicaState.SERVING and is_proved:
            self._move(replica, ReplicaState.SERVING)
        else:
            self._move(replica, ReplicaState.JOINING)

    def fail(self, replica: Replica, error: SpecrlError) -> None:
        """A call of it broke. SUSPECT if it cannot be reached, STALE if it can: it must join anew."""
        if isinstance(error, PeerUnavailable):
            self.suspect(replica, str(error))
        else:
            log.error("generation_failed", replica=replica.replica_id, reason=str(error))
            self.make_stale(replica, str(error))

    def make_stale(self, replica: Replica, reason: str) -> None:
        """It must register again, and catch up, before it is given anything. Its calls end."""
        if replica.state not in (ReplicaState.STALE, ReplicaState.DEAD):
            self._move(replica, ReplicaState.STALE, reason)
            replica.gone.set()

    def remove(self, replica: Replica, reason: str) -> None:
        """A replica is gone. Its calls end, its slots are requeued by whoever waits for them. Idempotent."""
        if self.replicas.get(replica.replica_id) is replica:
            del self.replicas[replica.replica_id]
            self._move(replica, ReplicaState.DEAD, reason)
            replica.gone.set()

    def _move(self, replica: Replica, after: ReplicaState, reason: str = "") -> None:
        """The one place where a replica's state changes. Raises TransitionForbidden."""
        before = replica.state
        check_transition(replica.replica_id, before, after)
        is_trouble = after in (ReplicaState.SUSPECT, ReplicaState.STALE, ReplicaState.DEAD)
        say = log.warning if is_trouble else log.info
        say("replica_moved", replica=replica.replica_id, before=before.value, after=after.value, reason=reason)
        self.transitions[before, after] += 1
        metrics.REPLICA_TRANSITIONS.labels(self._run, before.value, after.value).inc()
        replica.state, replica.reason, replica.before_suspicion = after, reason, None
        replica.moved.set()
        self.changed.set()

    # -- leaving ---------------------------------------------------------------------------------------------------

    def drain(self, replica: Replica) -> None:
        """Give it nothing new. In the middle of an update it drains once that is over. Idempotent."""
        replica.is_leaving = True
        if replica.state in (ReplicaState.JOINING, ReplicaState.SERVING):
            self._move(replica, ReplicaState.DRAINING)

    def dismiss(self, replica_id: str) -> None:
        """Have a replica leave: its next heartbeat is told so. Raises VersionConflict when it is not here."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            known = ", ".join(sorted(self.replicas)) or "none"
            raise VersionConflict(f"a replica that is to leave must be here, got {replica_id}; there are: {known}")
        replica.must_leave = True
        self.drain(replica)

    async def leave(self, peer_id: str, incarnation: str, drain_s: float = 0.0) -> None:
        """A goodbye. A replica drains first: returns when nothing that it got is under way, or after `drain_s`."""
        replica = self.replicas.get(peer_id)
        if replica is not None and replica.peer.incarnation == incarnation:
            if replica.state is ReplicaState.SUSPECT:
                self._clear(replica)
            self.drain(replica)
            try:
                await self._until_idle(replica, drain_s)
            finally:  # also when the call is broken off: whoever made it has ended
                self.remove(replica, f"it left with {replica.inflight} rollouts under way")
        elif self.trainer is not None and self.trainer.peer.incarnation == incarnation:
            self.lose_trainer("it left")

    @staticmethod
    async def _until_idle(replica: Replica, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while (replica.inflight > 0 or replica.is_receiving) and not replica.gone.is_set():
                    replica.moved.clear()
                    await replica.moved.wait()
        except TimeoutError:
            log.warning("drain_cut_short", replica=replica.replica_id, rollouts=replica.inflight, after_s=within_s)

    # -- trainer and silence -----------------------------------------------------------------------------------------

    def lose_trainer(self, reason: str) -> None:
        """The trainer is gone until one registers. Idempotent."""
        if self.trainer is not None:
            log.warning("trainer_lost", reason=reason)
            self.trainer.gone.set()
            self.trainer = None
            self.changed.set()

    def expire(self) -> None:
        """Suspect replicas that are late, remove peers that fell silent. Called once a heartbeat.

        Nobody is suspected in the middle of an update, whose own deadlines are there for that.
        """
        now = self._clock()
        patience_s = MISSED_HEARTBEATS * self._heartbeat_s
        for replica in list(self.replicas.values()):
            silent_s = now - replica.last_seen_s
            if silent_s > patience_s:
                self.remove(replica, f"no heartbeat for {patience_s:g} s")
            elif silent_s > SUSPECT_HEARTBEATS * self._heartbeat_s and replica.state not in IN_UPDATE:
                self.suspect(replica, f"no heartbeat for {silent_s:.1f} s")
        if self.trainer is not None and now - self.trainer.last_seen_s > patience_s:
            self.lose_trainer(f"no heartbeat for {patience_s:g} s")

    async def refresh(self) -> None:
        """Ask every serving replica for its counters; one that does not answer keeps its last ones."""
        replicas = self.serving()
        outcomes = await asyncio.gather(*(replica.client.status() for replica in replicas), return_exceptions=True)
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, GenerationStatus):
                self.note_status(replica, outcome)
            elif isinstance(outcome, SpecrlError):
                self.suspect(replica, str(outcome))

    def speculation(self) -> SpeculationCounters:
        """Counts of all replicas since the coordinator started, those that are gone included."""
        total = SpeculationCounters()
        for counters in self._counted.values():
            total = total.plus(counters)
        return total

    def step_costs(self) -> dict[str, Sequence[StepCost]]:
        """What steps took, of each engine from its start on, by its replica's incarnation; those gone included."""
        return dict(self._step_costs)
