"""Writers that kill themselves, for the contract suite: one at every point of every write.

    python -m tests.store_crashes sqlite FOLDER        -> FOLDER/POINT.db
    python -m tests.store_crashes redis HOST:PORT      -> keys POINT:*

Each point has a process of its own, forked after the imports: it does the writes before, then dies by SIGKILL before
the write, within it (SQLite: before the commit; Redis: when the write is sent and not yet answered) or after it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis.connection

from specrl.coordinator.store import Claim, SqliteStore, Store, StoredRollout
from specrl.coordinator.store.redis_store import RedisStore
from specrl.spec.store import RedisStore as Settings

MOMENTS = ("before", "within", "after")


def a_rollout(step: int = 1, index: int = 0, sample: int = 0, attempt: int = 0, data: bytes = b"x") -> StoredRollout:
    return StoredRollout(step, index, sample, attempt, data)


WRITES: list[Callable[[Store], object]] = [
    lambda store: store.put_rollouts([a_rollout(1, 0, sample, data=b"y" * 1000) for sample in range(50)]),
    lambda store: store.put_batch(1, b"first" * 1000, [(1, 0)]),
    lambda store: store.put_rollouts([a_rollout(2, 0, 0), a_rollout(1, 0, 3, attempt=1, data=b"again")]),
    lambda store: store.put_rollouts([a_rollout(1, 1, sample) for sample in range(3)]),
    lambda store: store.finish_step(1, {"step": 1}, [(1, 1)]),
    lambda store: store.set_fact("validations", [{"reward": 0.5}]),
    lambda store: store.set_report(1, {"step": 1, "reward": 0.25}),
    lambda store: store.put_batch(2, b"second", [(2, 0), (1, 1)]),
    lambda store: store.finish_step(2, {"step": 2}),
    lambda store: store.forget_batches(1),
]
"""Every kind of write, in an order that a run might have."""


def points() -> Iterator[tuple[str, int, str]]:
    """Name, number of the write and moment of every point."""
    for number in range(len(WRITES)):
        for moment in MOMENTS:
            yield f"{moment}-{number}", number, moment


def content(store: Store) -> dict[str, Any]:
    """All that a store holds of a run."""
    return {
        "facts": store.facts(),
        "rollouts": store.rollouts(),
        "batches": {step: (store.batch(step), store.batch_rollouts(step)) for step in store.batches()},
        "reports": store.reports(),
        "trained": store.trained(),
    }


def open_at(kind: str, place: str, point: str) -> Store:
    """The store of one point."""
    if kind == "sqlite":
        return SqliteStore(Path(place) / f"{point}.db")
    return RedisStore(Settings(addresses=(place,)), point, Claim(run_id=point))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_within(store: Store) -> None:
    """The next write ends this process halfway."""
    if isinstance(store, SqliteStore):
        store._connection.set_trace_callback(lambda statement: die() if statement == "commit" else None)
        return
    send = redis.connection.AbstractConnection.send_packed_command

    def send_and_die(self: Any, command: Any, check_health: bool = True) -> None:
        send(self, command, check_health)
        if any(b"EVAL" in bytes(part[:64]) for part in command):
            die()

    redis.connection.AbstractConnection.send_packed_command = send_and_die  # type: ignore[method-assign]


def _write_until(store: Store, number: int, moment: str) -> None:
    for write in WRITES[:number]:
        write(store)
    if moment == "before":
        die()
    if moment == "within":
        _die_within(store)
    WRITES[number](store)
    die()


def main() -> None:
    kind, place = sys.argv[1:]
    for point, number, moment in points():
        child = os.fork()
        if child == 0:
            try:
                _write_until(open_at(kind, place, point), number, moment)
            finally:
                os._exit(3)  # it should not have come so far
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"{point} ended with {status} instead of SIGKILL")


if __name__ == "__main__":
    main()
