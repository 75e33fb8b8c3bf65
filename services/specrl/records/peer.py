"""Who takes part in a run: processes that register with the coordinator."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    GENERATION = "generation"
    TRAINER = "trainer"


@dataclass(frozen=True)
class Peer:
    """One process. `peer_id` is stable over restarts; `incarnation` tells this process from an earlier one."""

    peer_id: str
    role: Role
    address: str
    spec_digest: str
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Registration:
    """The coordinator's answer to a peer."""

    run: str
    heartbeat_interval_s: float
