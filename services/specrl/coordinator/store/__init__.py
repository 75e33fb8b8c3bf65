"""What must survive the coordinator: finished rollouts, batches sent to the trainer, steps trained, facts of the run.

`contract` says what every store promises; SQLite keeps it for runs on one machine, Redis for clusters. They are called
by `coordinator/store_link.py` alone, which waits for a store that is away, and by the command line, which reads.
"""

from __future__ import annotations

import re
import uuid
from contextlib import suppress
from pathlib import Path

from specrl.coordinator.store.contract import REPORTS_KEPT, SCHEMA_VERSION, Claim, Store, StoredRollout
from specrl.coordinator.store.sqlite_store import SqliteStore
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
    "check_server",
    "claim_for",
    "open_store",
    "read_store",
]


def open_store(spec: RunSpec, directory: Path, claim: Claim) -> Store:
    """Open the run's store to write, and claim it: whoever did before cannot write any more.

    Raises StoreFailed when it may be there later, StoreInvalid when it must not be used.
    """
    if spec.redis is not None:
        from specrl.coordinator.store.redis_store import RedisStore

        return RedisStore(spec.redis, key_prefix(spec, directory), claim)
    return SqliteStore(directory / "store.db", claim)


def read_store(spec: RunSpec, directory: Path) -> Store:
    """Open the run's store to read only; its coordinator may be writing. Raises StoreFailed or StoreInvalid."""
    if spec.redis is not None:
        from specrl.coordinator.store.redis_store import RedisStore

        return RedisStore(spec.redis, key_prefix(spec, directory), None)
    return SqliteStore(directory / "store.db", is_reader=True)


def check_server(spec: RunSpec) -> None:
    """Raise StoreFailed or StoreInvalid unless the run's store can be reached and keeps what it is given."""
    if spec.redis is not None:
        from specrl.coordinator.store.redis_server import RedisServer

        RedisServer(spec.redis).check()


def key_prefix(spec: RunSpec, directory: Path) -> str:
    """What every key of the run begins with, in a store that it shares."""
    assert spec.redis is not None
    return spec.redis.key_prefix or f"specrl:{directory.resolve().name}"


def claim_for(directory: Path, run_id: str | None = None) -> Claim:
    """A new claim under the identity of the run in `directory`, which lies in its file `store-id` from now on.

    run_id: the identity of a run whose folder may be lost with its pod, 32 hexadecimal digits; without one it is drawn.
    It tells the keys of this run from those of another one that had the same name. Raises StoreFailed or StoreInvalid.
    """
    path = directory / "store-id"
    try:
        if not path.exists():
            with suppress(FileExistsError):  # another process was faster; both read what it wrote
                create_text(path, run_id or uuid.uuid4().hex)
        found = read_text(path).strip()
        if re.fullmatch(r"[0-9a-f]{32}", found) is None:
            raise StoreInvalid(f"{path} must hold the run's id, 32 hexadecimal digits, got another; restore it")
        if run_id not in (None, found):
            raise StoreInvalid(f"{directory} must be this run's folder, got one of run {found}; use another folder")
        return Claim(run_id=found)
    except UnicodeDecodeError as error:
        raise StoreInvalid(f"{path} must hold the run's id, got bytes that are no text; restore it") from error
    except OSError as error:
        raise StoreFailed(
            f"the run's folder must be writable, got {directory}: {error.strerror}; make room or fix permissions"
        ) from error
