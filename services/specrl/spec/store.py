"""Section about the store: where the coordinator keeps what must survive it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import PathText, Section, ShortText, Union
from specrl.spec.data import NotNegative, Positive

Addresses = Annotated[tuple[ShortText, ...], Field(max_length=32)]


class SqliteStore(Section):
    """One file in the run's folder; for runs on one machine."""


class Secret(Union):
    """Where a secret is read from, at every new connection. It never stands in a run file."""

    file: PathText | None = None
    """File that holds it, as a Kubernetes secret is mounted; the newline at its end is left out."""
    environment: ShortText | None = None
    """Environment variable of the coordinator that holds it."""


class Tls(Section):
    """Encryption. The server's certificate is always verified, its name included."""

    ca_file: PathText | None = None
    """Certificates to trust, PEM. Null: those that the system trusts."""
    cert_file: PathText | None = None
    """Certificate that the coordinator shows, PEM; for servers that ask for one (`tls-auth-clients`)."""
    key_file: PathText | None = None
    """Its private key, PEM."""


class Durability(StrEnum):
    EVERY_WRITE = "EveryWrite"
    EVERY_SECOND = "EverySecond"
    VOLATILE = "Volatile"


class Sentinel(Section):
    """Redis Sentinels, which know the servers and promote one when the primary is lost. `tls` is for them, too."""

    addresses: Addresses
    """HOST:PORT of the Sentinels. The first one that answers is asked, whenever a connection is made."""
    master_name: ShortText
    """What they call the primary, as in `sentinel monitor <masterName> ...`."""
    password: Secret | None = None
    """The Sentinels' own password. Null: they ask for none."""


class RedisStore(Section):
    """A Redis server, or a primary with standbys; for runs on a cluster. Either `addresses` or `sentinel` is given."""

    addresses: Addresses = ()
    """HOST:PORT of the primary and of every replica that may be promoted in its place. The one that is a primary and
    has every acknowledged write is used."""
    sentinel: Sentinel | None = None
    """Sentinels to ask for the addresses instead."""
    username: Secret | None = None
    """User of the server's access control list. Null: the default user."""
    password: Secret | None = None
    """Its password. Null: the server asks for none."""
    tls: Tls | None = None
    """Encryption. Null: none."""
    database: NotNegative = 0
    """Number of the logical database."""
    key_prefix: ShortText | None = None
    """Every key of the run is `<keyPrefix>:...`. Null: `specrl:` and the name of the run's folder."""
    timeout_s: Positive = 5
    """Deadline, in seconds, of connecting and of every call. What takes longer is tried again."""
    replica_acks: NotNegative = 0
    """Replicas of the server that must have received a write before it counts (Redis `WAIT`)."""
    durability: Durability = Durability.EVERY_WRITE
    """What a restart of the server may lose; one that would lose more is refused. `EveryWrite`: nothing (`appendonly
    yes`, `appendfsync always`). `EverySecond`: the last seconds (`appendonly yes`). `Volatile`: everything."""


class Store(Union):
    """Where the coordinator's state is kept; exactly one member."""

    sqlite: SqliteStore | None = None
    """A SQLite file in the run's folder."""
    redis: RedisStore | None = None
    """A Redis server."""
