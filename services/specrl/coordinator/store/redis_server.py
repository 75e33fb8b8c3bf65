"""The Redis server of a run: which one of its addresses, whether it can be trusted with the run, what its errors mean.

    AWAY --an address answers, is a primary, keeps what it is given, has all that was acknowledged--> HELD
    HELD --any error--> AWAY

The addresses are the run file's, or what a Sentinel names: it is asked for addresses alone, and again whenever one is
looked for. Which of them is used is decided here, since a Sentinel promotes by what it sees and not by what was
acknowledged.

Every call is bounded by `timeoutS`. Nothing is retried here: redis-py's own retries are off, since what a call that
broke has done is known to the caller alone. Credentials are read anew for every connection, so that they may rotate.
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

from specrl.errors import SpecrlError, StoreFailed, StoreInvalid
from specrl.spec.store import Durability, RedisStore, Secret

Accept = Callable[[redis.Redis], str]
"""Why a primary must not be used, or nothing."""

_PASSING_KINDS = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,  # MASTERDOWN too
    redis.exceptions.TryAgainError,
)
_PASSING_CODES = re.compile(r"\b(MISCONF|OOM|READONLY|NOREPLICAS|MASTERDOWN|BUSY|UNBLOCKED|NOAUTH)\b")
"""Errors of a server that can do later what it cannot do now. redis-py has classes for some; of the others, and of any
that a script of an old server fails with, the code is in the text, and not always its first word."""


class RedisServer:
    """The primary among a run's addresses; threads take turns."""

    def __init__(self, settings: RedisStore, accept: Accept = lambda _: "") -> None:
        self._settings, self._accept = settings, accept
        self._turn = threading.RLock()
        self._held: redis.Redis | None = None
        self._was_held = False

    def check(self) -> None:
        """Look whether a primary answers that can be trusted. Raises StoreFailed or StoreInvalid."""
        try:
            self.call(lambda _: None)
        finally:
            self.drop()

    def call[T](self, work: Callable[[redis.Redis], T]) -> T:
        """Do `work` on the primary. After an error the next call looks for one again.

        Raises StoreFailed for what may pass, when it is unknown whether `work` was done; StoreInvalid for what stays.
        """
        with self._turn:
            try:
                if self._held is None:
                    self._held = self._found()
                    self._was_held = True
                return work(self._held)
            except redis.RedisError as error:
                self.drop()
                raise self._translated(error, self.place) from error
            except SpecrlError:
                self.drop()
                raise

    def drop(self) -> None:
        """Close the connection. Idempotent."""
        with self._turn:
            if self._held is not None:
                self._held.close()
                self._held = None

    @property
    def place(self) -> str:
        """Where it is looked for; for people."""
        sentinel = self._settings.sentinel
        if sentinel is None:
            return ", ".join(self._settings.addresses)
        return f"{sentinel.master_name} of {', '.join(sentinel.addresses)}"

    # -- which one -----------------------------------------------------------------------------------------------

    def _found(self) -> redis.Redis:
        """The first address that is a primary to be trusted.

        One that lacks acknowledged writes is refused for good only when every other address has answered, and none of
        them has those writes: while one is away, it may be the one that has them.
        """
        refusals: list[str] = []
        behind, is_any_away = "", False
        for address in self._addresses():
            client = self._client(address, self._settings.username, self._settings.password)
            try:
                info = client.execute_command("INFO")
                if info.get("role") != "master":
                    refusals.append(f"{address} is a replica")
                elif int(info.get("loading", 0)):  # what it says of its durability is not yet so
                    refusals.append(f"{address} is reading its data")
                    is_any_away = True
                else:
                    self._check_server(address, client, info)
                    reason = self._accept(client)
                    if not reason:
                        return client
                    behind = f"{address} {reason}"
                    refusals.append(behind)
            except redis.RedisError as error:
                translated = self._translated(error, address)
                if not isinstance(translated, StoreFailed):
                    client.close()
                    raise translated from error
                refusals.append(f"{address}: {_first_line(error)}")
                is_any_away = True
            except SpecrlError:
                client.close()
                raise
            client.close()
        if behind and not is_any_away:
            raise StoreInvalid(f"the store must be this coordinator's, got {'; '.join(refusals)}")
        raise StoreFailed(
            f"store.redis.addresses must hold a primary that answers, got {'; '.join(refusals)}; "
            "nothing advances until one does"
        )

    def _addresses(self) -> Sequence[str]:
        """Of the servers: the primary first, by what the first Sentinel says that answers and knows it."""
        sentinel = self._settings.sentinel
        if sentinel is None:
            return self._settings.addresses
        refusals = []
        for address in sentinel.addresses:
            client = self._client(address, None, sentinel.password, "sentinel.password")
            try:
                primary: Any = client.sentinel_get_master_addr_by_name(sentinel.master_name)
                if primary is None:
                    refusals.append(f"{address} knows no {sentinel.master_name}")
                    continue
                replicas: Any = client.sentinel_slaves(sentinel.master_name)
                named = [primary, *((replica["ip"], replica["port"]) for replica in replicas)]
                return [_address(host, int(port)) for host, port in named]
            except redis.RedisError as error:
                translated = self._translated(error, address)
                if not isinstance(translated, StoreFailed):
                    raise translated from error
                refusals.append(f"{address}: {_first_line(error)}")
            finally:
                client.close()
        raise StoreFailed(
            f"store.redis.sentinel must name the primary, got {'; '.join(refusals)}; nothing advances until one does"
        )

    def _client(
        self, address: str, username: Secret | None, password: Secret | None, name: str = "password"
    ) -> redis.Redis:
        """name: of the password, for whoever has to put it there."""
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
            for file in ("ca_file", "cert_file", "key_file"):
                path = getattr(settings.tls, file)
                if path is not None and not os.access(path, os.R_OK):
                    raise StoreInvalid(f"store.redis.tls must name files that can be read, got {path}; check the path")
        return redis.Redis(
            host=host.strip("[]"),
            port=int(port),
            db=settings.database if name == "password" else 0,  # a Sentinel has no others
            credential_provider=_Credentials(username, password, name) if password is not None else None,
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            **encryption,
        )

    def _check_server(self, address: str, client: redis.Redis, info: Mapping[str, Any]) -> None:
        """Raises StoreInvalid unless the server keeps what it acknowledges as long as the run file demands."""
        if int(info.get("cluster_enabled", 0)):
            raise StoreInvalid(
                f"store.redis must be a single server or a primary with replicas, got {address} in cluster mode; "
                "use one without"
            )
        policy = info.get("maxmemory_policy", "unknown")
        if policy != "noeviction":
            raise StoreInvalid(
                f"store.redis must never evict a key, got maxmemory-policy={policy} at {address}; "
                "set `maxmemory-policy noeviction`, or use a server of its own"
            )
        wanted = self._settings.durability
        if wanted is Durability.VOLATILE:
            return
        if not int(info.get("aof_enabled", 0)):
            raise StoreInvalid(
                f"store.redis must keep what it acknowledged over a restart, got appendonly=no at {address}; "
                "set `appendonly yes`, or accept the loss with `durability: Volatile`"
            )
        if wanted is Durability.EVERY_WRITE:
            fsync = _setting(client, "appendfsync")
            if fsync != "always":
                raise StoreInvalid(
                    f"store.redis must keep every write over a restart, got appendfsync={fsync or 'unknown'} at "
                    f"{address}; set `appendfsync always` (and let the user read it: +config|get), or accept the loss "
                    "of the last seconds with `durability: EverySecond`"
                )

    # -- what went wrong -----------------------------------------------------------------------------------------

    def _translated(self, error: redis.RedisError, place: str) -> SpecrlError:
        said = _first_line(error)
        if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError) and not self._was_held:
            return StoreInvalid(
                f"store.redis must let the coordinator in, got {said} from {place}; check username and password"
            )
        if _is_refused_certificate(error):
            return StoreInvalid(
                f"store.redis must show a certificate that can be verified, got {said} from {place}; "
                "check tls.caFile and the name in the address"
            )
        if isinstance(error, redis.exceptions.NoPermissionError):
            return StoreInvalid(
                f"store.redis.username must be allowed what the run needs, got {said} from {place}; "
                "docs/store.md has the rule"
            )
        is_passing = isinstance(error, _PASSING_KINDS) or _PASSING_CODES.search(str(error))
        if isinstance(error, redis.exceptions.ResponseError) and not is_passing:
            return StoreInvalid(f"store.redis must do what Redis 6 does, got {said} from {place}; use Redis >= 6")
        return StoreFailed(f"the store must answer, got {said} from {place}; nothing advances until it does")


class _Credentials(CredentialProvider):
    """User and password as they are now."""

    def __init__(self, username: Secret | None, password: Secret, name: str) -> None:
        self._username, self._password, self._name = username, password, name

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = _secret(self._password, self._name)
        return (password,) if self._username is None else (_secret(self._username, "username"), password)


def _address(host: str | bytes, port: int) -> str:
    """As the run file has them; redis-py decodes what a Sentinel says in some of its replies."""
    text = host.decode() if isinstance(host, bytes) else host
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"


def _secret(secret: Secret, name: str) -> str:
    """What a secret holds. Raises StoreInvalid, which never quotes it."""
    found: str | None
    if secret.environment is not None:
        found, place = os.environ.get(secret.environment), f"environment variable {secret.environment}"
    else:
        assert secret.file is not None, "exactly one is given"
        place = secret.file
        try:
            found = Path(secret.file).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError):
            found = None
    if not found:
        raise StoreInvalid(f"store.redis.{name} must be there, got nothing in {place}; put it there")
    return found


def _setting(client: redis.Redis, name: str) -> str | None:
    """A setting of the server; None when this user may not read it, or the server has no such command."""
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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
