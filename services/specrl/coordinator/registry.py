"""Who is there: replicas and the trainer, as they registered, and whether they still live.

A replica's states, each change logged:

    JOINING --first commit--> SERVING --update begins--> UPDATING --commit--> SERVING
    UPDATING --refused or failed too often--> STALE --it registers again--> JOINING
    SERVING --its canary disagreed--> JOINING, as a new record: what the old one had is asked again
    any --heartbeats missed, stream broke, left, or a newer incarnation registered--> gone

`changed` is set at every change; whoever waits for members waits on it (the loop and the generation stage), and a
heartbeat's deadline bounds how long a dead peer can be believed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from specrl.coordinator.agreement import Comparison
from specrl.errors import PeerUnavailable, RunInvalid, SpecrlError
from specrl.records import NO_DRAFTER, GenerationStatus, Peer, Role, SpeculationCounters
from specrl.rpc.clients import GenerationClient, TrainerClient

MISSED_HEARTBEATS = 5

log = structlog.get_logger(__name__)


class ReplicaState(StrEnum):
    JOINING = "joining"
    SERVING = "serving"
    UPDATING = "updating"
    STALE = "stale"


@dataclass
class Replica:
    """A live replica. `policy_version` is what it serves, -1 before its first commit.

    drafter_version: policy version at which the drafter that it serves was last trained.
    trusted_version: newest version that a canary has proved here, or that none was due for.
    canary, canary_skips: its last comparison, and canaries in a row that it did not answer.
    moved: set when its state or its trust changes, for whoever waits for one of them.
    """

    peer: Peer
    client: GenerationClient
    state: ReplicaState = ReplicaState.JOINING
    policy_version: int = -1
    drafter_version: int = NO_DRAFTER
    trusted_version: int = -1
    canary: Comparison | None = None
    canary_skips: int = 0
    last_seen_s: float = 0.0
    inflight: int = 0
    status: GenerationStatus | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def replica_id(self) -> str:
        return self.peer.peer_id

    @property
    def is_trusted(self) -> bool:
        """Whether what it finishes now may be stored. False from the start of an update to its canary's verdict."""
        return self.state is not ReplicaState.UPDATING and self.trusted_version >= self.policy_version


@dataclass
class Trainer:
    """The live trainer. `gone` is set when it is known to be lost."""

    peer: Peer
    client: TrainerClient
    last_seen_s: float = 0.0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Registry:
    """All peers of one run. `clock` gives monotonic seconds."""

    def __init__(self, spec_digest: str, heartbeat_s: float, clock: Callable[[], float]) -> None:
        self._digest = spec_digest
        self._clock = clock
        self._patience_s = heartbeat_s * MISSED_HEARTBEATS
        self._counted: dict[str, SpeculationCounters] = {}
        self.replicas: dict[str, Replica] = {}
        self.trainer: Trainer | None = None
        self.changed = asyncio.Event()

    def serving(self) -> list[Replica]:
        """Replicas that may be given work, by id."""
        return [self.replicas[key] for key in sorted(self.replicas) if self.replicas[key].state is ReplicaState.SERVING]

    def joining(self) -> list[Replica]:
        """Replicas that wait for their first weights, by id."""
        return [self.replicas[key] for key in sorted(self.replicas) if self.replicas[key].state is ReplicaState.JOINING]

    def to_update(self) -> list[Replica]:
        """Replicas that a new version goes to: all but the ejected ones, by id."""
        return [
            self.replicas[key] for key in sorted(self.replicas) if self.replicas[key].state is not ReplicaState.STALE
        ]

    def register(self, peer: Peer) -> None:
        """Take in a peer, replacing an earlier incarnation. Raises RunInvalid when it runs another run file."""
        if peer.spec_digest != self._digest:
            raise RunInvalid(
                f"a peer must run the coordinator's run file, got {peer.peer_id} with digest {peer.spec_digest[:12]} "
                f"instead of {self._digest[:12]}; start it with the run directory's run.yaml"
            )
        if peer.role is Role.TRAINER:
            if self.trainer is not None:
                self.trainer.gone.set()
            self.trainer = Trainer(peer, TrainerClient(peer.address), self._clock())
        else:
            before = self.replicas.get(peer.peer_id)
            if before is not None:
                self.remove(before, "a newer incarnation registered")
            client = GenerationClient(peer.address, peer.peer_id)
            self.replicas[peer.peer_id] = Replica(peer, client, last_seen_s=self._clock())
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
        if status is not None:
            self.note_status(replica, status)
        return True

    def note_status(self, replica: Replica, status: GenerationStatus) -> None:
        """Keep a replica's newest status; say so when its drafter was switched."""
        before, now = replica.status.drafting if replica.status else None, status.drafting
        if now is not None and now.state != (before.state if before is not None else "drafting"):
            gain = round(now.predicted_gain, 3)
            log.info("drafter_moved", replica=replica.replica_id, state=now.state, predicted_gain=gain)
        replica.status = status
        self._counted[replica.peer.incarnation] = status.speculation

    def move(self, replica: Replica, state: ReplicaState) -> None:
        """Change a replica's state."""
        log.info("replica_moved", replica=replica.replica_id, before=replica.state.value, after=state.value)
        replica.state = state
        replica.moved.set()
        self.changed.set()

    def trust(self, replica: Replica, policy_version: int) -> None:
        """What a replica samples under `policy_version` may be stored."""
        replica.trusted_version = policy_version
        replica.moved.set()

    def remove(self, replica: Replica, reason: str) -> None:
        """A replica is gone. Its streams end, its slots are requeued by whoever reads them. Idempotent."""
        if self.replicas.get(replica.replica_id) is replica:
            del self.replicas[replica.replica_id]
            log.warning("replica_lost", replica=replica.replica_id, reason=reason)
            replica.gone.set()
            self.changed.set()

    def fail(self, replica: Replica, error: SpecrlError) -> None:
        """A replica broke a stream. It is gone if it cannot be reached, STALE if it can: it must join anew."""
        if isinstance(error, PeerUnavailable):
            self.remove(replica, str(error))
            return
        log.error("generation_failed", replica=replica.replica_id, reason=str(error))
        self.move(replica, ReplicaState.STALE)
        replica.gone.set()

    def start_over(self, replica: Replica) -> Replica:
        """Take a live replica for one that just joined: streams of the old record end, what they had is requeued."""
        fresh = Replica(
            replica.peer,
            replica.client,
            canary=replica.canary,
            canary_skips=replica.canary_skips,
            last_seen_s=replica.last_seen_s,
            status=replica.status,
        )
        self.replicas[replica.replica_id] = fresh
        log.warning("replica_started_over", replica=replica.replica_id)
        replica.gone.set()
        self.changed.set()
        return fresh

    def lose_trainer(self, reason: str) -> None:
        """The trainer is gone until one registers. Idempotent."""
        if self.trainer is not None:
            log.warning("trainer_lost", reason=reason)
            self.trainer.gone.set()
            self.trainer = None
            self.changed.set()

    def leave(self, peer_id: str, incarnation: str) -> None:
        """A clean goodbye."""
        replica = self.replicas.get(peer_id)
        if replica is not None and replica.peer.incarnation == incarnation:
            self.remove(replica, "it left")
        elif self.trainer is not None and self.trainer.peer.incarnation == incarnation:
            self.lose_trainer("it left")

    def expire(self) -> None:
        """Remove peers whose heartbeats stopped. Called once a heartbeat."""
        now = self._clock()
        for replica in list(self.replicas.values()):
            if now - replica.last_seen_s > self._patience_s:
                self.remove(replica, f"no heartbeat for {self._patience_s:g} s")
        if self.trainer is not None and now - self.trainer.last_seen_s > self._patience_s:
            self.lose_trainer(f"no heartbeat for {self._patience_s:g} s")

    async def refresh(self) -> None:
        """Ask every serving replica for its counters; one that does not answer keeps its last ones."""
        replicas = self.serving()
        outcomes = await asyncio.gather(*(replica.client.status() for replica in replicas), return_exceptions=True)
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, GenerationStatus):
                self.note_status(replica, outcome)

    def speculation(self) -> SpeculationCounters:
        """Counts of all replicas since the coordinator started, those that are gone included."""
        total = SpeculationCounters()
        for counters in self._counted.values():
            total = total.plus(counters)
        return total
