"""The store of runs on one machine: one SQLite file with a write-ahead log, synced to disk at every commit."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specrl.coordinator.ledger.contract import (
    REPORTS_KEPT,
    SCHEMA_VERSION,
    Claim,
    StoredRollout,
    translate_decode_errors,
)
from specrl.errors import SpecrlError, StoreFailed, StoreInvalid

LOCK_WAIT_S = 5.0
"""Longest wait of a write for another process that holds the file's lock, such as `specrl store reset`."""

# SQLite's default page is 4 KiB; a rollout of 8k tokens fits into three pages of 32 KiB. The write-ahead log is copied
# into the file once it has LOG_PAGES pages, 64 MiB. By then half of its rollouts are deleted and need no copy.
# Together these two settings saved two thirds of the time in the kernel.
PAGE_BYTES = 32 * 1024
LOG_PAGES = 2048

_SCHEMA = (
    "create table facts (name text primary key, value text not null)",
    "create table rollouts (step integer, idx integer, sample integer, attempt integer not null, data blob not null, "
    "primary key (step, idx, sample))",
    "create table batches (step integer primary key, data blob not null, indexes text not null)",
    "create table steps (step integer primary key, report text not null)",
    "create table claims (one integer primary key check (one = 1), token text not null, owner text not null)",
)
_TABLES = ("facts", "rollouts", "batches", "steps", "claims")

_TRANSIENT_CODES = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL),
}
"""Errors that may pass, by themselves or once an operator acts: locks, full disks, permissions. They are retried."""

_TRAINED = "(select coalesce(max(step), 0) from steps)"
_IS_UNTRAINED = f"(step < 1 or step > {_TRAINED})"
_IN_BATCH = "(step, idx) in (select batches.step, value from batches, json_each(indexes))"
"""Whether a batch names the rollout's prompt."""

_Statement = tuple[str, Sequence[tuple[Any, ...]]]


class SqliteStore:
    """A store in one file, over one connection. Threads take turns."""

    def __init__(self, path: Path, claim: Claim | None = None, *, is_reader: bool = False) -> None:
        """Open the file, creating it if necessary, and claim it. A reader neither creates nor claims it."""
        self._path = path
        self._turn = threading.Lock()
        self._token: str | None = None
        mode = "ro" if is_reader else "rwc"
        with _translate_errors(f"{path} must be a store"):
            self._connection = sqlite3.connect(
                f"file:{quote(str(path))}?mode={mode}",
                uri=True,
                isolation_level=None,  # transactions begin where `_begin_transaction` says, not where sqlite3 guesses
                check_same_thread=False,  # `_turn` serialises the threads
                timeout=LOCK_WAIT_S,
            )
        try:
            with _translate_errors(f"{path} must be a store"):
                if is_reader:
                    self._check_version(is_reader=True)
                else:
                    self._claim_file(claim or Claim())
        except SpecrlError:
            self._connection.close()
            raise

    def _claim_file(self, claim: Claim) -> None:
        self._connection.execute(f"pragma page_size={PAGE_BYTES}")  # takes effect in a new file only
        self._connection.execute("pragma journal_mode=wal")
        self._connection.execute(f"pragma wal_autocheckpoint={LOG_PAGES}")
        # In WAL mode `normal` would not sync at each commit, and a power cut could lose acknowledged writes.
        self._connection.execute("pragma synchronous=full")
        # Debian's SQLite has it on by default, and would overwrite every deleted rollout with zeros.
        self._connection.execute("pragma secure_delete=off")
        with self._begin_transaction():
            if self._check_version(is_reader=False):
                for statement in _SCHEMA:
                    self._connection.execute(statement)
                self._connection.execute(f"pragma user_version={SCHEMA_VERSION}")
            self._connection.execute("insert or replace into claims values (1, ?, ?)", (claim.token, claim.owner))
        self._token = claim.token

    def _check_version(self, *, is_reader: bool) -> bool:
        """Return whether the file has no tables yet. Raises StoreInvalid for any other file that is not our store."""
        version = int(self._connection.execute("pragma user_version").fetchone()[0])
        tables = {row[0] for row in self._connection.execute("select name from sqlite_master where type = 'table'")}
        if version == SCHEMA_VERSION:
            return False
        if version:
            raise StoreInvalid(
                f"the store must have schema version {SCHEMA_VERSION}, got {version} in {self._path}; use the version "
                "of specrl that wrote it, or start a new run"
            )
        if not tables and not is_reader:
            return True
        raise StoreInvalid(
            f"the store must be a file that specrl wrote, got {self._path} with tables "
            f"{', '.join(sorted(tables)) or 'none'}; move it away or restore it"
        )

    def read_facts(self) -> dict[str, Any]:
        rows = self._query_rows("select name, value from facts order by name")
        with translate_decode_errors(str(self._path)):
            return {name: json.loads(value) for name, value in rows}

    def set_fact(self, name: str, value: Any) -> None:
        self._execute_statements(("insert or replace into facts values (?, ?)", [(name, json.dumps(value))]))

    def put_rollouts(self, rollouts: Sequence[StoredRollout]) -> None:
        rows = [(row.step, row.index, row.sample, row.attempt, row.data) for row in rollouts]
        self._execute_statements(("insert or replace into rollouts values (?, ?, ?, ?, ?)", rows))

    def read_rollouts(self) -> list[StoredRollout]:
        query = f"select step, idx, sample, attempt, data from rollouts where {_IS_UNTRAINED} order by 1, 2, 3"  # noqa: S608
        return [StoredRollout(*row) for row in self._query_rows(query)]

    def count_rollouts(self) -> dict[int, int]:
        query = f"select step, count(*) from rollouts where {_IS_UNTRAINED} group by step order by step"  # noqa: S608
        return dict(self._query_rows(query))

    def put_batch(self, step: int, data: bytes, indexes: Sequence[int] = ()) -> bool:
        row = (step, data, json.dumps(indexes))
        return self._execute_statements(("insert or ignore into batches values (?, ?, ?)", [row])) == 1

    def read_batch(self, step: int) -> bytes | None:
        rows = self._query_rows("select data from batches where step = ?", step)
        return rows[0][0] if rows else None

    def read_batch_rollouts(self, step: int) -> list[bytes]:
        rows = self._query_rows(
            "select rollouts.data from batches, json_each(indexes) as prompt cross join rollouts "
            "on rollouts.step = batches.step and idx = prompt.value where batches.step = ? order by prompt.key, sample",
            step,
        )
        return [row[0] for row in rows]

    def list_batch_steps(self) -> list[int]:
        return [row[0] for row in self._query_rows("select step from batches order by step")]

    def finish_step(self, step: int, report: dict[str, Any]) -> None:
        self._execute_statements(
            ("insert or replace into steps values (?, ?)", [(step, json.dumps(report))]),
            ("delete from steps where step <= ?", [(step - REPORTS_KEPT,)]),
            (f"delete from rollouts where step <= ? and not {_IN_BATCH}", [(step,)]),  # noqa: S608
        )

    def set_report(self, step: int, report: dict[str, Any]) -> None:
        self._execute_statements(("update steps set report = ? where step = ?", [(json.dumps(report), step)]))

    def read_last_trained_step(self) -> int:
        return int(self._query_rows("select coalesce(max(step), 0) from steps")[0][0])

    def read_reports(self, after: int = 0) -> list[dict[str, Any]]:
        rows = self._query_rows("select report from steps where step > ? order by step", after)
        with translate_decode_errors(str(self._path)):
            return [json.loads(row[0]) for row in rows]

    def forget_batches(self, up_to: int) -> None:
        self._execute_statements(
            (
                f"delete from rollouts where step in (select step from batches where step <= min(?, {_TRAINED}))",  # noqa: S608
                [(up_to,)],
            ),
            ("delete from batches where step <= ?", [(up_to,)]),
        )

    def reset(self) -> None:
        self._execute_statements(*[(f"delete from {table}", [()]) for table in _TABLES])  # noqa: S608 - our own names

    def describe(self) -> dict[str, Any]:
        owners = self._query_rows("select owner from claims")
        size_bytes = self._path.stat().st_size if self._path.exists() else 0
        return {
            "kind": "sqlite",
            "place": str(self._path),
            "schemaVersion": SCHEMA_VERSION,
            "claimedBy": owners[0][0] if owners else None,
            "sizeBytes": size_bytes,
        }

    def close(self) -> None:
        with self._turn:
            self._connection.close()

    def _query_rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._turn, _translate_errors("the store must be readable"):
            return self._connection.execute(query, values).fetchall()

    def _execute_statements(self, *statements: _Statement) -> int:
        """Apply all statements in one transaction, if the claim still holds. Returns how many rows changed."""
        changed = 0
        with self._turn, _translate_errors("the store must be writable"), self._begin_transaction():
            held = self._connection.execute("select token, owner from claims").fetchone()
            if held is None or held[0] != self._token:
                raise StoreInvalid(
                    f"{self._path} was claimed by {held[1] if held else 'nobody'}: a newer coordinator has taken the "
                    "run over, or the store was reset; this coordinator stops, and has written nothing since"
                )
            for statement, rows in statements:
                changed += self._connection.executemany(statement, rows).rowcount
        return changed

    @contextmanager
    def _begin_transaction(self) -> Iterator[None]:
        # `immediate` takes the write lock now, and waits for it. A deferred transaction would take it after reading the
        # claim, and fail at once (SQLITE_BUSY_SNAPSHOT) if another process had written meanwhile.
        self._connection.execute("begin immediate")
        try:
            yield
            self._connection.execute("commit")
        except BaseException:
            if self._connection.in_transaction:  # some errors roll back by themselves; a failed commit may not
                self._connection.execute("rollback")
            raise


@contextmanager
def _translate_errors(rule: str) -> Iterator[None]:
    """Translate SQLite's errors: into StoreFailed when a retry may succeed, into StoreInvalid otherwise."""
    try:
        yield
    except sqlite3.Error as error:
        primary = getattr(error, "sqlite_errorcode", -1) & 0xFF  # the low byte; the others extend it
        if primary in _TRANSIENT_CODES:
            raise StoreFailed(f"{rule}, got {error}; the run waits, and retries until it is") from error
        raise StoreInvalid(f"{rule}, got {error}; move it away or restore it") from error
