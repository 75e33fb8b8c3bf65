"""A coordinator that ends before or after any durable write, several times in one run, breaks none of its promises.

What the store itself keeps when its process is killed in the middle of a write, tests/store_crashes.py says; whole runs
whose processes are killed at such points, docs/chaos.md.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration.coordinator.small_run import Run, a_spec
from tests.integration.coordinator.test_loop import check_promises

from specrl.coordinator.store import SqliteStore, Store
from specrl.coordinator.store_link import OPERATIONS

WRITES = [name for name in OPERATIONS if name.startswith(("put_", "set_", "finish_", "forget_"))]
MOST = 3
"""Strikes in a run. Batches are forgotten less often."""
PATIENCE_S = 60.0


class Struck(Exception):
    """Here the coordinator ends."""


@dataclass
class Strikes:
    """At every second call of one write, before it is made or after, until `left` is 0."""

    write: str
    is_after: bool
    left: int = MOST
    calls: int = 0


class StruckStore:
    """Passes all calls on, and strikes."""

    def __init__(self, store: Store, strikes: Strikes) -> None:
        self._store, self._strikes = store, strikes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return partial(self._strike, found) if name == self._strikes.write else found

    def _strike(self, write: Any, *args: Any) -> Any:
        strikes = self._strikes
        strikes.calls += 1
        is_due = strikes.left > 0 and strikes.calls % 2 == 0
        strikes.left -= is_due
        if is_due and not strikes.is_after:
            raise Struck
        answer = write(*args)
        if is_due:
            raise Struck
        return answer


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("write", WRITES)
async def test_a_coordinator_that_ends_at_a_write_goes_on_after_it(tmp_path: Path, write: str, is_after: bool) -> None:
    strikes = Strikes(write, is_after)

    def open_store(folder: Path) -> Any:
        return StruckStore(SqliteStore(folder / "store.db"), strikes)

    async with Run(tmp_path, a_spec(tmp_path, steps=8), open_store=open_store) as run:
        while True:
            await asyncio.wait({run.running}, timeout=PATIENCE_S)
            if run.running.exception() is None:
                break
            assert isinstance(run.running.exception(), Struck)
            await run.restart_coordinator()
        check_promises(run)
    assert strikes.left < MOST
