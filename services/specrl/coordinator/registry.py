"""Who is there: replicas and the trainer, as they registered, and whether they still live.

A replica's states, each change logged:

    JOINING --first commit--> SERVING --update begins--> UPDATING --commit--> SERVING
    UPDATING --refused or failed too often--> STALE --it registers again--> JOINING
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

from specrl.errors import RunInvalid
from specrl.records import GenerationStatus, Peer, Role, SpeculationCounters
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
    """A live replica. `policy_version` is what it serves, -1 before its first commit."""

    peer: Peer
    client: GenerationClient
    state: ReplicaState = ReplicaState.JOINING
    policy_version: int = -1
    last_seen_s: float = 0.0
    inflight: int = 0
    status: GenerationStatus | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def replica_id(self) -> str:
        return self.peer.peer_id


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
            self.remove(peer.peer_id, "a newer incarnation registered")
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
        """Keep a replica's newest status."""
        replica.status = status
        self._counted[replica.peer.incarnation] = status.speculation

    def move(self, replica: Replica, state: ReplicaState) -> None:
        """Change a replica's state."""
        log.info("replica_moved", replica=replica.replica_id, before=replica.state.value, after=state.value)
        replica.state = state
        self.changed.set()

    def remove(self, peer_id: str, reason: str) -> None:
        """A replica is gone. Its streams end, its slots are requeued by whoever reads them. Idempotent."""
        replica = self.replicas.pop(peer_id, None)
        if replica is not None:
            log.warning("replica_lost", replica=peer_id, reason=reason)
            replica.gone.set()
            self.changed.set()

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
            self.remove(peer_id, "it left")
        elif self.trainer is not None and self.trainer.peer.incarnation == incarnation:
            self.lose_trainer("it left")

    def expire(self) -> None:
        """Remove peers whose heartbeats stopped. Called once a heartbeat."""
        now = self._clock()
        for replica in list(self.replicas.values()):
            if now - replica.last_seen_s > self._patience_s:
                self.remove(replica.replica_id, f"no heartbeat for {self._patience_s:g} s")
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
