"""Store in one file: write-ahead log, synchronous at every commit. For runs on one machine."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specrl.coordinator.store.contract import REPORTS_KEPT, SCHEMA_VERSION, Claim, StoredRollout, as_written
from specrl.errors import SpecrlError, StoreFailed, StoreInvalid

LOCK_WAIT_S = 5.0
"""How long a write waits for another process that holds the file."""

PAGE_BYTES, LOG_PAGES = 32 * 1024, 2048
"""Of a new file; and of the write-ahead log before it is copied into the file. A rollout of 8k tokens is three such
pages, where SQLite's own are 4 KiB, and of a log of 64 MiB half is forgotten before it would be copied: together they
saved two thirds of the time in the kernel."""

_VERSION_1 = (
    "create table facts (name text primary key, value text not null)",
    "create table rollouts (step integer, idx integer, sample integer, attempt integer not null, data blob not null, "
    "primary key (step, idx, sample))",
    "create table batches (step integer primary key, data blob not null)",
    "create table steps (step integer primary key, report text not null)",
)
_VERSION_2 = (
    "create table claims (one integer primary key check (one = 1), token text not null, owner text not null)",
)
_VERSION_3 = ("alter table batches add column prompts text not null default '[]'",)
_OLDER = "create temp view batches as select step, data, '[]' as prompts from main.batches"
"""How a reader, which must not migrate it, sees a file before version 3."""

_TABLES_1 = {"facts", "rollouts", "batches", "steps"}

_PASSING = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL),
}
"""What can end by itself or by somebody's help, without the file being another one: locks, full disks, permissions."""

_NAMED = "select json_extract(value, '$[0]'), json_extract(value, '$[1]') from"
"""(step, index) of every prompt in a JSON list of such pairs."""
_TRAINED = "(select coalesce(max(step), 0) from steps)"
_IN_BATCHES = f"(step, idx) in ({_NAMED} batches, json_each(prompts) where batches.step <= {{}})"
_IN_TRAINED = _IN_BATCHES.format(_TRAINED)
"""Whether a batch, up to some step or of a trained one, names a rollout's prompt."""

_Statement = tuple[str, Sequence[tuple[Any, ...]]]


class SqliteStore:
    """One file, one connection; threads take turns."""

    def __init__(self, path: Path, claim: Claim | None = None, *, is_reader: bool = False) -> None:
        """Open the file, made if need be, and claim it; a reader neither makes nor claims nor migrates it."""
        self._path = path
        self._turn = threading.Lock()
        self._token: str | None = None
        mode = "ro" if is_reader else "rwc"
        with _translated(f"{path} must be a store"):
            self._connection = sqlite3.connect(
                f"file:{quote(str(path))}?mode={mode}",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=LOCK_WAIT_S,
            )
        try:
            with _translated(f"{path} must be a store"):
                if is_reader:
                    if _VERSION_3[0] in self._check_version(is_reader=True):
                        self._connection.execute(_OLDER)
                else:
                    self._claim(claim or Claim())
        except SpecrlError:
            self._connection.close()
            raise

    def _claim(self, claim: Claim) -> None:
        self._connection.execute(f"pragma page_size={PAGE_BYTES}")  # heeded by a file that is empty yet
        self._connection.execute("pragma journal_mode=wal")
        self._connection.execute(f"pragma wal_autocheckpoint={LOG_PAGES}")
        self._connection.execute("pragma synchronous=full")
        self._connection.execute("pragma secure_delete=off")  # Debian builds it on: what is forgotten would be zeroed
        with self._transaction():
            for statement in self._check_version():
                self._connection.execute(statement)
            self._connection.execute(f"pragma user_version={SCHEMA_VERSION}")
            self._connection.execute("insert or replace into claims values (1, ?, ?)", (claim.token, claim.owner))
        self._token = claim.token

    def _check_version(self, *, is_reader: bool = False) -> tuple[str, ...]:
        """What brings this file to the present schema. Raises StoreInvalid when nothing does."""
        version = int(self._connection.execute("pragma user_version").fetchone()[0])
        tables = {row[0] for row in self._connection.execute("select name from sqlite_master where type = 'table'")}
        if version > SCHEMA_VERSION:
            raise StoreInvalid(
                f"the store must be of schema version <= {SCHEMA_VERSION}, got {version} in {self._path}; "
                "a newer specrl wrote it: use that one, or start a new run"
            )
        if version == SCHEMA_VERSION:
            return ()
        if version == 0 and tables >= _TABLES_1:
            return _VERSION_2 + _VERSION_3
        if version == 2 and tables >= _TABLES_1:
            return _VERSION_3
        if version == 0 and not tables and not is_reader:
            return _VERSION_1 + _VERSION_2 + _VERSION_3
        raise StoreInvalid(
            f"the store must be a file that specrl wrote, got {self._path} of schema version {version} with tables "
            f"{', '.join(sorted(tables)) or 'none'}; move it away or restore it"
        )

    def fact(self, name: str) -> Any | None:
        rows = self._read("select value from facts where name = ?", name)
        with as_written(str(self._path)):
            return json.loads(rows[0][0]) if rows else None

    def facts(self) -> dict[str, Any]:
        rows = self._read("select name, value from facts order by name")
        with as_written(str(self._path)):
            return {name: json.loads(value) for name, value in rows}

    def set_fact(self, name: str, value: Any) -> None:
        self._write(("insert or replace into facts values (?, ?)", [(name, json.dumps(value))]))

    def put_rollouts(self, rollouts: Sequence[StoredRollout]) -> None:
        rows = [(row.step, row.index, row.sample, row.attempt, row.data) for row in rollouts]
        self._write(("insert or replace into rollouts values (?, ?, ?, ?, ?)", rows))

    def rollouts(self) -> list[StoredRollout]:
        query = f"select step, idx, sample, attempt, data from rollouts where not {_IN_TRAINED} order by 1, 2, 3"  # noqa: S608
        return [StoredRollout(*row) for row in self._read(query)]

    def rollout_counts(self) -> dict[int, int]:
        query = f"select step, count(*) from rollouts where not {_IN_TRAINED} group by step order by step"  # noqa: S608
        return dict(self._read(query))

    def put_batch(self, step: int, data: bytes, prompts: Sequence[tuple[int, int]] = ()) -> bool:
        row = (step, data, json.dumps(prompts))
        return self._write(("insert or ignore into batches (step, data, prompts) values (?, ?, ?)", [row])) == 1

    def batch(self, step: int) -> bytes | None:
        rows = self._read("select data from batches where step = ?", step)
        return rows[0][0] if rows else None

    def batch_rollouts(self, step: int) -> list[bytes]:
        rows = self._read(
            "select rollouts.data from batches, json_each(batches.prompts) as prompt cross join rollouts "
            "on rollouts.step = json_extract(prompt.value, '$[0]') and idx = json_extract(prompt.value, '$[1]') "
            "where batches.step = ? order by prompt.key, sample",
            step,
        )
        return [row[0] for row in rows]

    def batches(self) -> list[int]:
        return [row[0] for row in self._read("select step from batches order by step")]

    def finish_step(self, step: int, report: dict[str, Any], kept: Sequence[tuple[int, int]] = ()) -> None:
        self._write(
            ("insert or replace into steps values (?, ?)", [(step, json.dumps(report))]),
            ("delete from steps where step <= ?", [(step - REPORTS_KEPT,)]),
            (
                f"delete from rollouts where step <= ? and (step, idx) not in ({_NAMED} json_each(?)) "  # noqa: S608
                f"and (step, idx) not in ({_NAMED} batches, json_each(prompts))",
                [(step, json.dumps(kept))],
            ),
        )

    def set_report(self, step: int, report: dict[str, Any]) -> None:
        self._write(("update steps set report = ? where step = ?", [(json.dumps(report), step)]))

    def trained(self) -> int:
        return int(self._read("select coalesce(max(step), 0) from steps")[0][0])

    def reports(self, after: int = 0) -> list[dict[str, Any]]:
        rows = self._read("select report from steps where step > ? order by step", after)
        with as_written(str(self._path)):
            return [json.loads(row[0]) for row in rows]

    def forget_batches(self, up_to: int) -> None:
        self._write(
            (f"delete from rollouts where {_IN_BATCHES.format(f'min(?, {_TRAINED})')}", [(up_to,)]),  # noqa: S608
            ("delete from batches where step <= ?", [(up_to,)]),
        )

    def reset(self) -> None:
        tables = [*sorted(_TABLES_1), "claims"]
        self._write(*[(f"delete from {table}", [()]) for table in tables])  # noqa: S608 - our own names

    def describe(self) -> dict[str, Any]:
        version = int(self._read("pragma user_version")[0][0]) or 1
        owners = self._read("select owner from claims") if version > 1 else []
        size_bytes = self._path.stat().st_size if self._path.exists() else 0
        return {
            "kind": "sqlite",
            "place": str(self._path),
            "schemaVersion": version,
            "claimedBy": owners[0][0] if owners else None,
            "sizeBytes": size_bytes,
        }

    def close(self) -> None:
        with self._turn:
            self._connection.close()

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._turn, _translated("the store must be readable"):
            return self._connection.execute(query, values).fetchall()

    def _write(self, *statements: _Statement) -> int:
        """Make all changes or none, if the claim still holds. Returns how many rows there were."""
        changed = 0
        with self._turn, _translated("the store must be writable"), self._transaction():
            held = self._connection.execute("select token, owner from claims").fetchone()
            if held is None or held[0] != self._token:
                raise StoreInvalid(
                    f"the store must be this coordinator's, got {self._path} claimed by {held[1] if held else 'nobody'}"
                    "; a newer coordinator has taken the run over, and nothing of this one was written since"
                )
            for statement, rows in statements:
                changed += self._connection.executemany(statement, rows).rowcount
        return changed

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("begin immediate")
        try:
            yield
            self._connection.execute("commit")
        except BaseException:
            if self._connection.in_transaction:  # some errors end it, and some commits that fail do not
                self._connection.execute("rollback")
            raise


@contextmanager
def _translated(rule: str) -> Iterator[None]:
    """Turn SQLite's errors into ours: those that may pass, and those that stay."""
    try:
        yield
    except sqlite3.Error as error:
        primary = getattr(error, "sqlite_errorcode", -1) & 0xFF
        if primary in _PASSING:
            raise StoreFailed(f"{rule}, got {error}; nothing advances until it is") from error
        raise StoreInvalid(f"{rule}, got {error}; move it away or restore it") from error
