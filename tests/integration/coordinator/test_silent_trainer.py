"""A trainer whose node is lost without a word, during a call to it, is replaced once its heartbeats are missed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.integration.coordinator.small_run import RecordingBackend, Run, a_spec
from tests.integration.coordinator.test_loop import by_files, check_promises

from specrl.records import Batch, TrainMetrics, WeightChecksums


class HangingBackend(RecordingBackend):
    """Hangs in one kind of call from the moment that `is_silent` is set, until the test ends."""

    def __init__(self, trained: list[Batch], call: str) -> None:
        super().__init__(trained)
        self.call = call
        self.is_silent = threading.Event()
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def train_step(self, batch: Batch) -> TrainMetrics:
        self._hang_in("train")
        found: TrainMetrics = super().train_step(batch)
        return found

    def write_weights(self, folder: Path) -> WeightChecksums:
        self._hang_in("write")
        return super().write_weights(folder)

    def _hang_in(self, call: str) -> None:
        if call == self.call and self.is_silent.is_set():
            self.has_begun.set()
            self.may_end.wait()


@pytest.mark.parametrize("call", ["train", "write"])
async def test_a_trainer_that_is_lost_while_it_recovers_is_replaced(tmp_path: Path, call: str) -> None:
    """While it replayed steps, or wrote weights, its loss was noticed only at the call's deadline: for a step, 1 h."""
    backends: list[HangingBackend] = []

    def make(trained: list[Batch]) -> RecordingBackend:
        backends.append(HangingBackend(trained, call))
        if len(backends) == 2:
            backends[1].is_silent.set()
        return backends[-1]

    spec = a_spec(tmp_path)
    rare = spec.model_copy(
        update={
            "checkpoint": spec.checkpoint.model_copy(update={"every_steps": 100}),
            "weights": spec.weights.model_copy(update={"timeout_s": 600}),
        }
    )
    async with Run(tmp_path, by_files(rare) if call == "write" else rare, make_backend=make) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 2)
        await run.restart_trainer()
        await run.until(backends[1].has_begun.is_set)
        assert run.trainer is not None
        run.trainer.membership.cancel()  # its connections stay open, as those of a lost node do
        silent = run.trainer
        await run.until(lambda: run.registry.trainer is None)
        await run.start_trainer()
        try:
            await run.finish()
            check_promises(run)
        finally:
            backends[1].may_end.set()
            await asyncio.shield(silent.kill())
