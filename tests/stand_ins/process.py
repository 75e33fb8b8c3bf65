"""Runs a replica or a trainer process with a stand-in: service, membership and shutdown are the real ones.

    python -m tests.stand_ins.process generation|trainer <the arguments of specrl-generation or specrl-trainer>

The environment variable TOKEN_SECONDS sets the stand-in engine's seconds per token, and STEP_SECONDS the stand-in
trainer's seconds per step. Not used for measurements.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from tests.stand_ins.engine import TableEngine, TableShape
from tests.stand_ins.trainer_backend import StandInBackend

from specrl.generation import main as generation
from specrl.records import Batch, TrainMetrics
from specrl.spec import load_spec
from specrl.telemetry import logs
from specrl.telemetry.spans import SILENT_RECORDER
from specrl.trainer import main as trainer

VOCAB = 264  # of the model folder in tests/run_files.py


async def _generate(arguments: list[str]) -> None:
    options = generation.parse_arguments(arguments)
    spec = load_spec(options.spec)
    logs.configure_logging("info", options.replica_id, spec.name)
    pace_s = float(os.environ.get("TOKEN_SECONDS", "0.01"))
    engine = TableEngine(options.replica_id, seed=7, shape=TableShape(VOCAB, spec.model.max_length, pace_s))
    await engine.start()
    await generation.run_engine(engine, spec, options)


class PacedBackend(StandInBackend):
    """A trainer whose steps take a while."""

    def train_step(self, batch: Batch) -> TrainMetrics:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return super().train_step(batch)


async def _train(arguments: list[str]) -> None:
    options = trainer.parse_arguments(arguments)
    spec = load_spec(options.spec)
    logs.configure_logging("info", options.peer_id, spec.name)
    backend = PacedBackend(VOCAB, has_drafter=False, seed=1)
    await trainer.run_rank_0(backend, None, spec, options, SILENT_RECORDER)


def main() -> None:
    """Run the process that the first argument names."""
    asyncio.run({"generation": _generate, "trainer": _train}[sys.argv[1]](sys.argv[2:]))


if __name__ == "__main__":
    main()
