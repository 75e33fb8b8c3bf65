"""What must survive the coordinator: finished rollouts, batches sent to the trainer, steps trained, facts of the run.

One protocol, one suite (tests/contract); SQLite for runs on one machine. Rollouts and batches are protobuf, reports
and facts are JSON. Every method is one transaction and returns when it is durable; the coordinator acts afterwards.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specrl.errors import StoreFailed


@dataclass(frozen=True)
class StoredRollout:
    """A graded rollout of an untrained step; `data` is a protobuf GradedRollout."""

    step: int
    index: int
    sample: int
    attempt: int
    data: bytes


class Store(Protocol):
    """State of one run. Raises StoreFailed when it cannot be read or written; nothing is half-written then."""

    def fact(self, name: str) -> Any | None:
        """A named JSON value; None when it was never set."""

    def set_fact(self, name: str, value: Any) -> None:
        """Set or replace a named JSON value."""

    def put_rollout(self, rollout: StoredRollout) -> None:
        """Keep a finished rollout. Putting the same slot again replaces it."""

    def rollouts(self) -> list[StoredRollout]:
        """Finished rollouts of steps that are not trained, in stream order."""

    def put_batch(self, step: int, data: bytes) -> None:
        """Fix what step `step` trains on, before it is sent. The first content stays: a second one is ignored."""

    def batch(self, step: int) -> bytes | None:
        """What step `step` trains or trained on, while it is kept."""

    def finish_step(self, step: int, report: dict[str, Any]) -> None:
        """Step `step` is trained: keep its report, forget its rollouts. Its batch stays until `forget_batches`."""

    def set_report(self, step: int, report: dict[str, Any]) -> None:
        """Replace a trained step's report, with what became known afterwards."""

    def trained(self) -> int:
        """Last step trained; 0 before the first."""

    def reports(self, after: int = 0) -> list[dict[str, Any]]:
        """Reports of steps > `after`, ascending."""

    def forget_batches(self, up_to: int) -> None:
        """A checkpoint of step `up_to` is complete: batches up to it will never be replayed."""

    def close(self) -> None:
        """Release the file or connection. Idempotent."""


_SCHEMA = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists rollouts (
    step integer, idx integer, sample integer, attempt integer not null, data blob not null,
    primary key (step, idx, sample));
create table if not exists batches (step integer primary key, data blob not null);
create table if not exists steps (step integer primary key, report text not null);
"""


class SqliteStore:
    """Store in one file, write-ahead log, synchronous at every commit."""

    def __init__(self, path: Path) -> None:
        try:
            self._connection = sqlite3.connect(path, isolation_level=None)
            self._connection.execute("pragma journal_mode=wal")
            self._connection.execute("pragma synchronous=full")
            self._connection.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise StoreFailed(
                f"the store must be a SQLite file, got {path}: {error}; move it away or restore it"
            ) from error

    def fact(self, name: str) -> Any | None:
        rows = list(self._read("select value from facts where name = ?", name))
        return json.loads(rows[0][0]) if rows else None

    def set_fact(self, name: str, value: Any) -> None:
        self._write(("insert or replace into facts values (?, ?)", (name, json.dumps(value))))

    def put_rollout(self, rollout: StoredRollout) -> None:
        row = (rollout.step, rollout.index, rollout.sample, rollout.attempt, rollout.data)
        self._write(("insert or replace into rollouts values (?, ?, ?, ?, ?)", row))

    def rollouts(self) -> list[StoredRollout]:
        query = "select step, idx, sample, attempt, data from rollouts order by step, idx, sample"
        return [StoredRollout(*row) for row in self._read(query)]

    def put_batch(self, step: int, data: bytes) -> None:
        self._write(("insert or ignore into batches values (?, ?)", (step, data)))

    def batch(self, step: int) -> bytes | None:
        rows = list(self._read("select data from batches where step = ?", step))
        return rows[0][0] if rows else None

    def finish_step(self, step: int, report: dict[str, Any]) -> None:
        self._write(
            ("insert or replace into steps values (?, ?)", (step, json.dumps(report))),
            ("delete from rollouts where step <= ?", (step,)),
        )

    def set_report(self, step: int, report: dict[str, Any]) -> None:
        self._write(("update steps set report = ? where step = ?", (json.dumps(report), step)))

    def trained(self) -> int:
        rows = list(self._read("select coalesce(max(step), 0) from steps"))
        return int(rows[0][0])

    def reports(self, after: int = 0) -> list[dict[str, Any]]:
        return [
            json.loads(row[0]) for row in self._read("select report from steps where step > ? order by step", after)
        ]

    def forget_batches(self, up_to: int) -> None:
        self._write(("delete from batches where step <= ?", (up_to,)))

    def close(self) -> None:
        self._connection.close()

    def _read(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._connection.execute(query, values)
        except sqlite3.Error as error:
            raise StoreFailed(f"the store must be readable, got {error}; nothing advances until it is") from error

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        try:
            with self._connection:
                self._connection.execute("begin immediate")
                for statement, values in statements:
                    self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise StoreFailed(f"the store must be writable, got {error}; nothing advances until it is") from error
