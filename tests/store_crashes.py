"""Writes to a store in processes that kill themselves, one at every point of every write. For the contract suite.

    python -m tests.store_crashes sqlite FOLDER        -> FOLDER/POINT.db
    python -m tests.store_crashes redis HOST:PORT      -> keys POINT:*

Each point has its own process, forked after the imports. It makes all earlier writes, then kills itself by SIGKILL
before the write, within it, or after it. Within it means: before SQLite's commit; after the command was sent to Redis,
before the answer.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis.connection

from specrl.coordinator.ledger import Claim, SqliteStore, Store, StoredRollout
from specrl.coordinator.ledger.redis_store import RedisStore
from specrl.spec.store import RedisStore as Settings

MOMENTS = ("before", "within", "after")


def a_rollout(step: int = 1, index: int = 0, sample: int = 0, attempt: int = 0, data: bytes = b"x") -> StoredRollout:
    return StoredRollout(step, index, sample, attempt, data)


WRITES: list[Callable[[Store], object]] = [
    lambda store: store.put_rollouts([a_rollout(1, 0, sample, data=b"y" * 1000) for sample in range(50)]),
    lambda store: store.put_batch(1, b"first" * 1000, [0]),
    lambda store: store.put_rollouts([a_rollout(2, 0, 0), a_rollout(1, 0, 3, attempt=1, data=b"again")]),
    lambda store: store.put_rollouts([a_rollout(1, 1, sample) for sample in range(3)]),
    lambda store: store.finish_step(1, {"step": 1}),
    lambda store: store.set_fact("validations", [{"reward": 0.5}]),
    lambda store: store.set_report(1, {"step": 1, "reward": 0.25}),
    lambda store: store.put_batch(2, b"second", [0]),
    lambda store: store.finish_step(2, {"step": 2}),
    lambda store: store.forget_batches(1),
]
"""Every kind of write, in a realistic order."""


def list_points() -> Iterator[tuple[str, int, str]]:
    """List every point: name, number of the write and moment."""
    for number in range(len(WRITES)):
        for moment in MOMENTS:
            yield f"{moment}-{number}", number, moment


def read_contents(store: Store) -> dict[str, Any]:
    """Read everything that a store contains."""
    return {
        "facts": store.read_facts(),
        "rollouts": store.read_rollouts(),
        "batches": {
            step: (store.read_batch(step), store.read_batch_rollouts(step)) for step in store.list_batch_steps()
        },
        "reports": store.read_reports(),
        "trained": store.read_last_trained_step(),
    }


def open_store_at(kind: str, place: str, point: str) -> Store:
    """Open the store for one point."""
    if kind == "sqlite":
        return SqliteStore(Path(place) / f"{point}.db")
    return RedisStore(Settings(addresses=(place,)), point, Claim(run_id=point))


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_within_next_write(store: Store) -> None:
    """Arrange that this process kills itself halfway through the next write."""
    if isinstance(store, SqliteStore):
        store._connection.set_trace_callback(lambda statement: kill_self() if statement == "commit" else None)
        return
    send = redis.connection.AbstractConnection.send_packed_command

    def send_and_kill_self(self: Any, command: Any, check_health: bool = True) -> None:
        send(self, command, check_health)
        if any(b"EVAL" in bytes(part[:64]) for part in command):
            kill_self()

    redis.connection.AbstractConnection.send_packed_command = send_and_kill_self  # type: ignore[method-assign]


def _write_until(store: Store, number: int, moment: str) -> None:
    for write in WRITES[:number]:
        write(store)
    if moment == "before":
        kill_self()
    if moment == "within":
        _kill_within_next_write(store)
    WRITES[number](store)
    kill_self()


def main() -> None:
    kind, place = sys.argv[1:]
    for point, number, moment in list_points():
        child = os.fork()
        if child == 0:
            try:
                _write_until(open_store_at(kind, place, point), number, moment)
            finally:
                os._exit(3)  # unreachable if the process was killed as planned
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"the writer of point {point} must end by SIGKILL, got wait status {status}")


if __name__ == "__main__":
    main()
