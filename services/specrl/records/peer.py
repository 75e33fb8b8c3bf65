"""Who takes part in a run: processes that register with the coordinator."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from enum import StrEnum

from specrl.errors import RecordInvalid

HOST = r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%]{2,64}\]"
"""How a host is written in an address: a name, or numbers."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}", re.ASCII)
_ADDRESS = re.compile(rf"(?:{HOST}):(?P<port>[0-9]{{1,5}})", re.ASCII)


class Role(StrEnum):
    GENERATION = "generation"
    TRAINER = "trainer"


@dataclass(frozen=True)
class Peer:
    """One process. `peer_id` is stable over restarts; `incarnation` tells this process from an earlier one.

    metrics_port: where the host of `address` serves its metrics; 0: nowhere.
    """

    peer_id: str
    role: Role
    address: str
    spec_digest: str
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    metrics_port: int = 0

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of its metrics; empty where it serves none."""
        host = self.address.rpartition(":")[0]
        return f"{host}:{self.metrics_port}" if self.metrics_port else ""

    def check(self) -> None:
        """Raise RecordInvalid unless names are ones that logs and metrics can show, and the address can be called."""
        for what, name in (("peer_id", self.peer_id), ("incarnation", self.incarnation)):
            if _NAME.fullmatch(name) is None:
                raise RecordInvalid(
                    f"{what} must be 1 to 253 letters, digits, dots, dashes and underscores, got {name[:64]!r}; "
                    "name the peer so"
                )
        match = _ADDRESS.fullmatch(self.address)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise RecordInvalid(
                f"address must be HOST:PORT, got {self.address[:64]!r} of {self.peer_id}; give where it is reached"
            )
        if not 0 <= self.metrics_port < 1 << 16:
            raise RecordInvalid(
                f"metrics_port must be a port, or 0 for none, got {self.metrics_port} of {self.peer_id}; give either"
            )


@dataclass(frozen=True)
class HeldRollout:
    """A rollout that a replica has under way or finished. policy_version: served when it began; no token is older."""

    rollout_id: str
    policy_version: int


@dataclass(frozen=True)
class Registration:
    """The coordinator's answer to a peer."""

    run: str
    heartbeat_interval_s: float


@dataclass(frozen=True)
class Acknowledgement:
    """The coordinator's answer to a heartbeat. Not is_known: register again. must_leave: drain, then end."""

    is_known: bool
    must_leave: bool = False
