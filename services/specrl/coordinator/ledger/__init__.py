"""The durable state of a run: finished rollouts, batches sent to the trainer, trained steps, and facts of the run.

`contract.py` defines what every store guarantees. SQLite implements it for runs on one machine, Redis for clusters.
Two callers use a store: `store_link.py`, which retries while the store is unreachable, and the command line, which
inspects, exports and resets it.
"""

from __future__ import annotations

import re
import uuid
from contextlib import suppress
from pathlib import Path

from specrl.coordinator.ledger.contract import REPORTS_KEPT, SCHEMA_VERSION, Claim, Store, StoredRollout
from specrl.coordinator.ledger.sqlite_store import SqliteStore
from specrl.errors import StoreFailed, StoreInvalid
from specrl.files import create_text, read_text
from specrl.spec import RunSpec

__all__ = [
    "REPORTS_KEPT",
    "SCHEMA_VERSION",
    "Claim",
    "SqliteStore",
    "Store",
    "StoredRollout",
    "check_store_server",
    "make_claim",
    "open_store",
    "open_store_reader",
]


def open_store(spec: RunSpec, directory: Path, claim: Claim) -> Store:
    """Open the run's store for writing and claim it. The previous claimant can no longer write.

    Raises StoreFailed when a retry may succeed, StoreInvalid when the store must not be used.
    """
    return _open_store(spec, directory, claim)


def open_store_reader(spec: RunSpec, directory: Path) -> Store:
    """Open the run's store read-only; the coordinator may be writing to it. Raises StoreFailed or StoreInvalid."""
    return _open_store(spec, directory, None)


def _open_store(spec: RunSpec, directory: Path, claim: Claim | None) -> Store:
    if spec.redis is not None:
        # Imported here, so that runs on SQLite do not load the redis package.
        from specrl.coordinator.ledger.redis_store import RedisStore

        # Several runs may share a Redis, so all keys of a run have its prefix.
        prefix = spec.redis.key_prefix or f"specrl:{directory.resolve().name}"
        return RedisStore(spec.redis, prefix, claim)
    return SqliteStore(directory / "store.db", claim, is_reader=claim is None)


def check_store_server(spec: RunSpec) -> None:
    """Raise StoreFailed or StoreInvalid unless the run's Redis is reachable and as durable as the run file demands.

    A SQLite store has no server to check.
    """
    if spec.redis is not None:
        from specrl.coordinator.ledger.redis_server import RedisServer

        RedisServer(spec.redis).check_connection()


def make_claim(directory: Path, run_id: str | None = None) -> Claim:
    """Make a claim with the run's id, and keep that id in the file `store-id` of `directory`.

    The id tells the keys of this run from those of another run with the same name.
    run_id: 32 hexadecimal digits, for a run whose folder may be lost with its pod; None draws a random id.
    Raises StoreFailed or StoreInvalid.
    """
    path = directory / "store-id"
    try:
        if not path.exists():
            with suppress(FileExistsError):  # another process created it first; read that one's id below
                create_text(path, run_id or uuid.uuid4().hex)
        found = read_text(path).strip()
        if re.fullmatch(r"[0-9a-f]{32}", found) is None:
            raise StoreInvalid(
                f"{path} must hold the run's id, 32 hexadecimal digits, got other text; restore the file"
            )
        if run_id not in (None, found):
            raise StoreInvalid(
                f"{directory} must be the folder of run {run_id}, got the folder of run {found}; use another folder"
            )
        return Claim(run_id=found)
    except UnicodeDecodeError as error:
        raise StoreInvalid(f"{path} must hold the run's id, got bytes that are not UTF-8; restore the file") from error
    except OSError as error:
        raise StoreFailed(
            f"the run's folder must be writable, got {directory}: {error.strerror}; free space or fix its permissions"
        ) from error
