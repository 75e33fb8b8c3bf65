"""Sections about the store, which keeps the coordinator's durable state."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import PathText, RelativePath, Section, ShortText, UnionSection
from specrl.spec.data import NotNegative, Positive

Addresses = Annotated[tuple[ShortText, ...], Field(max_length=32)]


class SqliteStore(Section):
    """A SQLite file in the run's folder, for runs on one machine."""


class Secret(UnionSection):
    """Source of a secret, read at every new connection. Run files never contain the secret itself."""

    file: Annotated[PathText | None, RelativePath.TO_RUN_FILE] = None
    """File with the secret, such as a mounted Kubernetes Secret. A newline at its end is ignored."""
    environment: ShortText | None = None
    """Environment variable of the coordinator with the secret."""


class Tls(Section):
    """TLS. The server's certificate and host name are always verified."""

    ca_file: Annotated[PathText | None, RelativePath.TO_RUN_FILE] = None
    """CA certificates to trust, PEM. Null: the system's."""
    cert_file: Annotated[PathText | None, RelativePath.TO_RUN_FILE] = None
    """Client certificate of the coordinator, PEM, for servers that require one (`tls-auth-clients`). Null: none."""
    key_file: Annotated[PathText | None, RelativePath.TO_RUN_FILE] = None
    """Private key of certFile, PEM. Null: none."""


class Durability(StrEnum):
    EVERY_WRITE = "EveryWrite"
    EVERY_SECOND = "EverySecond"
    VOLATILE = "Volatile"


class Sentinel(Section):
    """Redis Sentinels, which discover the servers and promote one when the primary fails. `tls` applies to them,
    too."""

    addresses: Addresses
    """HOST:PORT of the Sentinels. For every new connection, the first one that answers is asked for the primary."""
    master_name: ShortText
    """Name of the primary, as in `sentinel monitor <masterName> ...`."""
    password: Secret | None = None
    """Password of the Sentinels. Null: they require none."""


class RedisStore(Section):
    """A Redis server, or a primary with standbys; for runs on a cluster. Either `addresses` or `sentinel` is given."""

    addresses: Addresses = ()
    """HOST:PORT of the primary and of every replica that may be promoted. The run uses the one that is the primary and
    has every acknowledged write."""
    sentinel: Sentinel | None = None
    """Sentinels, instead of addresses. Null: `addresses` is given."""
    username: Secret | None = None
    """User in the server's access control list. Null: the default user."""
    password: Secret | None = None
    """Password of the user. Null: the server requires none."""
    tls: Tls | None = None
    """TLS settings. Null: no encryption."""
    database: NotNegative = 0
    """Number of the logical database."""
    key_prefix: ShortText | None = None
    """Prefix of every key of the run: `<keyPrefix>:...`. Null: `specrl:` and the name of the run's folder; in an RLJob
    `specrl:NAMESPACE/` and that name."""
    timeout_s: Positive = 5
    """Deadline of connecting and of every call, in seconds. A call that exceeds it is retried."""
    replica_acks: NotNegative = 0
    """Number of the server's replicas that must acknowledge a write before it counts (Redis `WAIT`)."""
    durability: Durability = Durability.EVERY_WRITE
    """Data that the server may lose when it restarts. A server with weaker settings is refused. `EveryWrite`: nothing
    (`appendonly yes`, `appendfsync always`). `EverySecond`: the last seconds (`appendonly yes`). `Volatile`:
    everything."""


class Store(UnionSection):
    """Store of the coordinator's durable state; exactly one member."""

    sqlite: SqliteStore | None = None
    """A SQLite file in the run's folder."""
    redis: RedisStore | None = None
    """A Redis server."""
