"""The connection to a run's Redis: selects the address, checks the server's settings and translates its errors.

    DISCONNECTED --an address is a primary, durable enough, and has all acknowledged writes--> CONNECTED
    CONNECTED --any error--> DISCONNECTED

The addresses come from the run file, or from a Sentinel at every new connection. A Sentinel supplies only addresses.
This module selects among them, because a Sentinel promotes without knowing which writes were acknowledged.

`timeoutS` bounds every call. Nothing is retried here, and redis-py's own retries are off: only the caller knows whether
a call whose connection broke may be repeated. Credentials are read for every new connection, so they can be rotated.
"""

from __future__ import annotations

import os
import re
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from specrl.errors import SpecrlError, StoreFailed, StoreInvalid, first_line
from specrl.files import read_text
from specrl.spec.store import Durability, RedisStore, Secret

ExplainRefusal = Callable[[redis.Redis], str]
"""Returns why a primary must not be used; empty when it may be."""

_TRANSIENT_ERRORS = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,  # MASTERDOWN too
    redis.exceptions.TryAgainError,
)
_TRANSIENT_CODES = re.compile(r"\b(MISCONF|OOM|READONLY|NOREPLICAS|MASTERDOWN|BUSY|UNBLOCKED|NOAUTH)\b")
"""Errors that may pass without a change of configuration; they are retried. redis-py has classes for some of them. The
others, and those with which a script on an old server fails, have their code in the text, not always as first word."""


class RedisServer:
    """A connection to the primary among a run's addresses. Threads take turns.

    accept: called with each candidate; returns why it must not be used, or an empty string.
    """

    def __init__(self, settings: RedisStore, accept: ExplainRefusal = lambda _: "") -> None:
        self._settings = settings
        self._accept = accept
        self._turn = threading.RLock()
        self._held: redis.Redis | None = None
        self._was_held = False

    def check_connection(self) -> None:
        """Connect to a usable primary and disconnect. Raises StoreFailed or StoreInvalid when there is none."""
        try:
            self.run_on_primary(lambda _: None)
        finally:
            self.disconnect()

    def run_on_primary[T](self, work: Callable[[redis.Redis], T]) -> T:
        """Run `work` on the primary. After an error the next call selects a primary again.

        Raises StoreFailed when a retry may succeed; it is then unknown whether `work` was applied. Raises StoreInvalid
        when a retry cannot help.
        """
        with self._turn:
            try:
                if self._held is None:
                    self._held = self._connect_to_primary()
                    self._was_held = True
                return work(self._held)
            except redis.RedisError as error:
                self.disconnect()
                raise self._translate_error(error, self.addresses_text) from error
            except SpecrlError:
                self.disconnect()
                raise

    def disconnect(self) -> None:
        """Close the connection. Idempotent."""
        with self._turn:
            if self._held is not None:
                self._held.close()
                self._held = None

    @property
    def addresses_text(self) -> str:
        """The configured addresses, for messages."""
        sentinel = self._settings.sentinel
        if sentinel is None:
            return ", ".join(self._settings.addresses)
        return f"{sentinel.master_name} of {', '.join(sentinel.addresses)}"

    # -- select a primary ----------------------------------------------------------------------------------------

    def _connect_to_primary(self) -> redis.Redis:
        """Connect to the first address that is a usable primary.

        Raises StoreFailed while any address is unreachable, because that one may have the acknowledged writes that the
        others lack. Raises StoreInvalid when all addresses answered and none has them.
        """
        refusals: list[str] = []
        behind = ""
        is_any_away = False
        for address in self._list_addresses():
            client = self._make_client(address, self._settings.username, self._settings.password)
            try:
                info = client.execute_command("INFO")
                if info.get("role") != "master":
                    refusals.append(f"{address} is a replica")
                elif int(info.get("loading", 0)):  # what INFO says of its durability is not final yet
                    refusals.append(f"{address} is loading its data")
                    is_any_away = True
                else:
                    self._check_settings(address, client, info)
                    reason = self._accept(client)
                    if not reason:
                        return client
                    behind = f"{address} {reason}"
                    refusals.append(behind)
            except redis.RedisError as error:
                translated = self._translate_error(error, address)
                if not isinstance(translated, StoreFailed):
                    client.close()
                    raise translated from error
                refusals.append(f"{address}: {first_line(error)}")
                is_any_away = True
            except SpecrlError:
                client.close()
                raise
            client.close()
        if behind and not is_any_away:
            raise StoreInvalid(f"no address of store.redis has this coordinator's state: {'; '.join(refusals)}")
        raise StoreFailed(
            f"no address of store.redis is a usable primary: {'; '.join(refusals)}; the run waits, and retries until "
            "one is"
        )

    def _list_addresses(self) -> Sequence[str]:
        """Return the servers' addresses: the run file's, or those that the first Sentinel names that knows the primary.

        A Sentinel's answer has the primary first, then its replicas.
        """
        sentinel = self._settings.sentinel
        if sentinel is None:
            return self._settings.addresses
        refusals = []
        for address in sentinel.addresses:
            client = self._make_client(address, None, sentinel.password, "sentinel.password")
            try:
                primary: Any = client.sentinel_get_master_addr_by_name(sentinel.master_name)
                if primary is None:
                    refusals.append(f"{address} knows no {sentinel.master_name}")
                    continue
                replicas: Any = client.sentinel_slaves(sentinel.master_name)
                named = [primary, *((replica["ip"], replica["port"]) for replica in replicas)]
                return [_format_address(host, int(port)) for host, port in named]
            except redis.RedisError as error:
                translated = self._translate_error(error, address)
                if not isinstance(translated, StoreFailed):
                    raise translated from error
                refusals.append(f"{address}: {first_line(error)}")
            finally:
                client.close()
        raise StoreFailed(
            f"no Sentinel of store.redis names a primary: {'; '.join(refusals)}; the run waits, and retries until one "
            "does"
        )

    def _make_client(
        self, address: str, username: Secret | None, password: Secret | None, name: str = "password"
    ) -> redis.Redis:
        """Make a client for one server. name: the password's field in the run file, for messages."""
        host, _, port = address.rpartition(":")
        settings = self._settings
        encryption: dict[str, Any] = {}
        if settings.tls is not None:
            encryption = {
                "ssl": True,
                "ssl_ca_certs": settings.tls.ca_file,
                "ssl_certfile": settings.tls.cert_file,
                "ssl_keyfile": settings.tls.key_file,
            }
            for path in (settings.tls.ca_file, settings.tls.cert_file, settings.tls.key_file):
                if path is not None and not os.access(path, os.R_OK):
                    raise StoreInvalid(f"store.redis.tls must name readable files, got {path}; check the path")
        return redis.Redis(
            host=host.strip("[]"),
            port=int(port),
            db=settings.database if name == "password" else 0,  # a Sentinel has database 0 only
            credential_provider=_RotatingCredentials(username, password, name) if password is not None else None,
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            retry=Retry(NoBackoff(), 0),  # redis-py retries by default since version 6; see the module docstring
            protocol=2,  # RESP2, which every server >= 6 speaks without HELLO
            # No CLIENT SETINFO and no maintenance notices: the ACL of docs/store.md allows neither.
            driver_info=None,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            **encryption,
        )

    def _check_settings(self, address: str, client: redis.Redis, info: Mapping[str, Any]) -> None:
        """Raise StoreInvalid unless the server is as durable as `store.redis.durability` demands."""
        if int(info.get("cluster_enabled", 0)):
            raise StoreInvalid(
                f"store.redis must be a single server or a primary with replicas, got {address} in cluster mode; "
                "use a server without cluster mode"
            )
        policy = info.get("maxmemory_policy", "unknown")
        if policy != "noeviction":
            raise StoreInvalid(
                f"store.redis must never evict a key, got maxmemory-policy={policy} at {address}; "
                "set `maxmemory-policy noeviction`, or use a separate server"
            )
        wanted = self._settings.durability
        if wanted is Durability.VOLATILE:
            return
        if not int(info.get("aof_enabled", 0)):
            raise StoreInvalid(
                f"store.redis must keep acknowledged writes over a restart, got appendonly=no at {address}; "
                "set `appendonly yes`, or accept their loss with `durability: Volatile`"
            )
        if wanted is Durability.EVERY_WRITE:
            fsync = _read_setting(client, "appendfsync")
            if fsync != "always":
                raise StoreInvalid(
                    f"store.redis must keep every write over a restart, got appendfsync={fsync or 'unknown'} at "
                    f"{address}; set `appendfsync always` (and allow the user to read it: +config|get), or accept the "
                    "loss of the last seconds with `durability: EverySecond`"
                )

    # -- translate errors ----------------------------------------------------------------------------------------

    def _translate_error(self, error: redis.RedisError, place: str) -> SpecrlError:
        detail = first_line(error)
        # Refused credentials are a mistake of the run file only before the first connection. Later they may be
        # rotating, and are read again at the next one.
        if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError) and not self._was_held:
            return StoreInvalid(
                f"store.redis.username and password must be accepted, got {detail} from {place}; correct them"
            )
        if _is_refused_certificate(error):
            return StoreInvalid(
                f"store.redis must have a certificate that can be verified, got {detail} from {place}; "
                "check tls.caFile and the host name in the address"
            )
        if isinstance(error, redis.exceptions.NoPermissionError):
            return StoreInvalid(
                f"store.redis.username must have the permissions that a run needs, got {detail} from {place}; "
                "apply the ACL in docs/store.md"
            )
        is_passing = isinstance(error, _TRANSIENT_ERRORS) or _TRANSIENT_CODES.search(str(error))
        if isinstance(error, redis.exceptions.ResponseError) and not is_passing:
            return StoreInvalid(f"store.redis must support Redis 6 commands, got {detail} from {place}; use Redis >= 6")
        return StoreFailed(f"the store at {place} did not answer: {detail}; the run waits, and retries until it does")


class _RotatingCredentials(CredentialProvider):
    """Reads user and password at every new connection, so that they can be rotated."""

    def __init__(self, username: Secret | None, password: Secret, name: str) -> None:
        self._username = username
        self._password = password
        self._name = name

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = _read_secret(self._password, self._name)
        return (password,) if self._username is None else (_read_secret(self._username, "username"), password)


def _format_address(host: str | bytes, port: int) -> str:
    """Format an address as the run file does. redis-py decodes the host in some Sentinel replies, not in all."""
    text = host.decode() if isinstance(host, bytes) else host
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"


def _read_secret(secret: Secret, name: str) -> str:
    """Read a secret. Raises StoreInvalid, whose message never quotes the value."""
    found: str | None
    if secret.environment is not None:
        found = os.environ.get(secret.environment)
        place = f"environment variable {secret.environment}"
    else:
        assert secret.file is not None, "exactly one is given"
        place = secret.file
        try:
            # Editors end files with a newline, which is not part of the secret; other whitespace may be.
            found = read_text(Path(secret.file)).removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError):
            found = None
    if not found:
        raise StoreInvalid(f"store.redis.{name} must not be empty, got nothing in {place}; put the secret there")
    return found


def _read_setting(client: redis.Redis, name: str) -> str | None:
    """Read a server setting; None when the user lacks the permission or the server lacks the command."""
    try:
        return dict(client.execute_command("CONFIG GET", name)).get(name)
    except redis.exceptions.ResponseError:
        return None


def _is_refused_certificate(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
