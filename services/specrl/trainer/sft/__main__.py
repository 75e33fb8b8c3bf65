"""One rank of a supervised warm-up. `specrl sft` starts it; RANK and WORLD_SIZE are as from torchrun.

    python -m specrl.trainer.sft --folder DIR --held-out 0.05

    DIR/run.yaml        schedule.steps steps on schedule.promptsPerStep examples of prompts.source each
    DIR/metrics.jsonl   one line per step; before them, for step 0, the held-out loss of the given policy
    DIR/checkpoints/    as in a run; an interrupted warm-up resumes from the newest
    DIR/export/policy   at the end: the policy as a Hugging Face folder

Rank 0 makes the calls and the other ranks follow, as in a run (`ranks.py`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import structlog
from google.protobuf.empty_pb2 import Empty

from specrl.errors import SpecrlError
from specrl.spec import load_process_spec
from specrl.telemetry import logs
from specrl.trainer.calls import RankCalls
from specrl.trainer.ranks import AllRanks, ControlGroup, follow_rank_0
from specrl.trainer.sft.examples import TrainingExamples
from specrl.trainer.sft.training import run_warm_up

STOPPED = 143  # the shell's code for SIGTERM, 128 + 15

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank of the warm-up until it ends, and exit."""
    parser = argparse.ArgumentParser(prog="specrl-sft", description="One rank of a supervised warm-up.")
    parser.add_argument("--folder", type=Path, required=True, help="folder with run.yaml, which gets all results")
    parser.add_argument("--held-out", type=Decimal, required=True, help="share of the examples to hold out")
    given = parser.parse_args(arguments)
    try:
        code = _run_rank(given.folder, given.held_out)
    except SpecrlError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the one message to the user
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # sys.exit would join worker threads; one may hang in a collective with a rank that is gone


def _run_rank(folder: Path, held_out: Decimal) -> int:
    from specrl.trainer.megatron_backend import MegatronBackend

    spec = load_process_spec(folder / "run.yaml")
    rank = int(os.environ.get("RANK", "0"))
    logs.configure_logging(spec.telemetry.log_level.value, f"sft-{rank}", spec.name)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A signal usually reaches all ranks at once. The others ignore it and wait for rank 0's Close, so that none
        # leaves in the middle of a collective.
        signal.signal(number, (lambda *_: stop.set()) if rank == 0 else signal.SIG_IGN)
    started = time.monotonic()
    calls = RankCalls(MegatronBackend(spec), spec, folder, host="")
    control = ControlGroup()
    if control.rank != 0:
        follow_rank_0(calls, control)
        return 0
    ranks = AllRanks(calls, control)
    is_done = run_warm_up(ranks, spec, TrainingExamples(spec, held_out), folder, stop.is_set)
    ranks.run_call(RankCalls.Close, Empty())
    log.info("warm_up_ended", finished=is_done, seconds=round(time.monotonic() - started, 1))
    return 0 if is_done else STOPPED


if __name__ == "__main__":
    main()
