"""Peers: the processes that register with the coordinator, and what both sides say to each other.

`rpc/membership.py` sends these records, and the coordinator's registry keeps them.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from enum import StrEnum

from specrl.errors import RecordInvalid

HOST = r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%]{2,64}\]"
"""Pattern of a host in an address: a DNS name or IPv4 address, or an IPv6 address in brackets."""

# 253 is the longest DNS name (RFC 1035). Peer names become label values of metrics and Kubernetes object names.
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}", re.ASCII)
_ADDRESS = re.compile(rf"(?:{HOST}):(?P<port>[0-9]{{1,5}})", re.ASCII)


class Role(StrEnum):
    GENERATION = "generation"
    TRAINER = "trainer"


@dataclass(frozen=True)
class Peer:
    """One process of a run.

    peer_id: stable over restarts. incarnation: tells this process from an earlier one of the same name. address:
    HOST:PORT of its gRPC service. spec_digest: sha256 of the resolved run file. metrics_port: TCP port of its
    Prometheus metrics on the host of `address`; 0: no metrics.
    """

    peer_id: str
    role: Role
    address: str
    spec_digest: str
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    metrics_port: int = 0

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of its metrics; empty if it serves none."""
        # rpartition, because an IPv6 host contains colons
        host = self.address.rpartition(":")[0]
        return f"{host}:{self.metrics_port}" if self.metrics_port else ""

    def check(self) -> None:
        """Raise RecordInvalid unless names fit logs and metrics, and addresses can be dialled."""
        for what, name in (("peer_id", self.peer_id), ("incarnation", self.incarnation)):
            if _NAME.fullmatch(name) is None:
                raise RecordInvalid(
                    f"{what} must be 1 to 253 letters, digits, dots, dashes and underscores, got {name[:64]!r}; "
                    "rename the peer"
                )
        match = _ADDRESS.fullmatch(self.address)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise RecordInvalid(
                f"address of {self.peer_id} must be HOST:PORT, got {self.address[:64]!r}; use an address that the "
                "coordinator can reach"
            )
        if not 0 <= self.metrics_port < 1 << 16:
            raise RecordInvalid(
                f"metrics_port of {self.peer_id} must be 0 to 65535, got {self.metrics_port}; use 0 for no metrics"
            )


@dataclass(frozen=True)
class HeldRollout:
    """A rollout that a replica has in progress or finished, and that a restarted coordinator may resume.

    policy_version: version served when the rollout began; none of its tokens is older.
    """

    rollout_id: str
    policy_version: int


@dataclass(frozen=True)
class Registration:
    """The coordinator's reply to a registration. run: the run's name."""

    run: str
    heartbeat_interval_s: float


@dataclass(frozen=True)
class Acknowledgement:
    """The coordinator's reply to a heartbeat.

    is_known: False after the coordinator restarted or removed the peer, which then registers again. must_leave: the
    replica was dismissed; it drains, then ends.
    """

    is_known: bool
    must_leave: bool = False
