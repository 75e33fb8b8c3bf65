"""A coordinator may crash before or after any durable write, several times in one run, without breaking a guarantee.

tests/store_crashes.py tests a store whose process is killed during a write. docs/chaos.md describes the tests of whole
runs whose processes are killed at such points.
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

from specrl.coordinator.ledger import SqliteStore, Store
from specrl.coordinator.ledger.store_link import OPERATIONS
from specrl.formats.reports import Phase

WRITES = [name for name in OPERATIONS if name.startswith(("put_", "set_", "finish_", "forget_"))]
MOST = 3
"""Crashes per run. forget_batches is called less often, so it has fewer."""
PATIENCE_S = 60.0


class Crashed(Exception):
    """Raised where the coordinator crashes."""


@dataclass
class Crashes:
    """Crashes at every second call of one write, before or after it is applied, until `left` is 0."""

    write: str
    is_after: bool
    left: int = MOST
    calls: int = 0


class CrashingStore:
    """Wraps a store: forwards all calls, and crashes at the chosen ones."""

    def __init__(self, store: Store, crashes: Crashes) -> None:
        self._store = store
        self._crashes = crashes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return partial(self._crash, found) if name == self._crashes.write else found

    def _crash(self, write: Any, *args: Any) -> Any:
        crashes = self._crashes
        crashes.calls += 1
        is_due = crashes.left > 0 and crashes.calls % 2 == 0
        crashes.left -= is_due
        if is_due and not crashes.is_after:
            raise Crashed
        answer = write(*args)
        if is_due:
            raise Crashed
        return answer


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("write", WRITES)
async def test_a_coordinator_that_crashes_at_a_write_resumes(tmp_path: Path, write: str, is_after: bool) -> None:
    crashes = Crashes(write, is_after)

    def open_store(folder: Path) -> Any:
        return CrashingStore(SqliteStore(folder / "store.db"), crashes)

    async with Run(tmp_path, a_spec(tmp_path, steps=8), open_store=open_store) as run:
        while True:
            await asyncio.wait({run.running}, timeout=PATIENCE_S)
            if run.running.exception() is None:
                break
            assert isinstance(run.running.exception(), Crashed)
            await run.restart_coordinator()
        check_promises(run)
    assert crashes.left < MOST


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_checkpoint_is_requested_while_the_trainer_is_one_step_ahead(tmp_path: Path, is_paused: bool) -> None:
    """The loop asked the trainer for a checkpoint of the step before its own, and the refusal ended the run.

    The coordinator had died after step 2 was trained and before it was recorded.
    """
    crashes = Crashes("finish_step", is_after=False, left=1)

    def open_store(folder: Path) -> Any:
        return CrashingStore(SqliteStore(folder / "store.db"), crashes)

    spec = a_spec(tmp_path, steps=4)
    rare = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"every_steps": 100})})
    async with Run(tmp_path, rare, open_store=open_store) as run:
        await asyncio.wait({run.running}, timeout=PATIENCE_S)
        assert isinstance(run.running.exception(), Crashed)
        await run.kill_coordinator()
        store = SqliteStore(tmp_path / "store.db")
        assert store.read_last_trained_step() == 1
        store.set_fact("paused", is_paused)
        store.close()
        await run.start_coordinator()
        controls = run.context.controls
        controls.request_checkpoint()
        await run.until(lambda: run.context.phase.phase is Phase.TRAINING)
        if is_paused:
            assert controls.is_checkpoint_requested
            await controls.resume_run()
        await run.until(lambda: not controls.is_checkpoint_requested)
        assert run.observer.build_status().checkpoint_step >= 2
        await run.finish()
        check_promises(run)
