"""A replica or a trainer as a process of its own: the real service, membership and ending around a stand-in.

    python -m tests.stand_ins.process generation|trainer <the arguments of specrl-generation or specrl-trainer>

TOKEN_SECONDS in the environment is the pace of the stand-in engine. It takes no part in any measurement.
"""

from __future__ import annotations

import asyncio
import os
import sys

from tests.stand_ins.engine import TableEngine, TableShape
from tests.stand_ins.trainer_backend import StandInBackend

from specrl.generation import main as generation
from specrl.spec import load_spec
from specrl.telemetry import logs
from specrl.telemetry.spans import SILENT
from specrl.trainer import main as trainer

VOCAB = 264  # of the model folder in tests/run_files.py


async def _generate(arguments: list[str]) -> None:
    options = generation.parse(arguments)
    spec = load_spec(options.spec)
    logs.configure("info", options.replica_id, spec.name)
    pace_s = float(os.environ.get("TOKEN_SECONDS", "0.01"))
    engine = TableEngine(options.replica_id, seed=7, shape=TableShape(VOCAB, spec.model.max_length, pace_s))
    await engine.start()
    await generation.run_engine(engine, spec, options)


async def _train(arguments: list[str]) -> None:
    options = trainer.parse(arguments)
    spec = load_spec(options.spec)
    logs.configure("info", options.peer_id, spec.name)
    backend = StandInBackend(VOCAB, has_drafter=False, seed=1)
    await trainer.lead(backend, spec, options, SILENT)  # type: ignore[arg-type]  # one rank needs no control group


def main() -> None:
    """Be the process that the first argument names, until it ends."""
    asyncio.run({"generation": _generate, "trainer": _train}[sys.argv[1]](sys.argv[2:]))


if __name__ == "__main__":
    main()
