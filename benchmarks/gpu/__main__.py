"""Runs the kit and writes its record: `python -m benchmarks.gpu`, or on a CPU `make gpu-check`.

    python -m benchmarks.gpu                             # on a machine with a GPU
    python -m benchmarks.gpu --out DIR                   # on a CPU: every part in miniature
    python -m benchmarks.gpu --only step,memory --out DIR

With a GPU and without --out, the record is kept in results/, and the package's list of fast kernels that passed is
written from all records there.

The exit code is 1 if a part failed. A part that is skipped is no failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.record import name_record, write_passed_kernels, write_record
from benchmarks.gpu.runner import Outcome, run_part

RESULTS = Path(__file__).parent / "results"
# Wall seconds after which a part's process is killed. The catalogue's names are repeated here, since it imports
# packages that a machine may lack. A test compares them.
DEADLINES_S = {
    "versions": 60,
    "step": 150,
    "memory": 75,
    "optimizer": 60,
    "attention": 30,
    "varlenAttention": 30,
    "fusedSwiglu": 60,
    "copies": 30,
    "broadcast": 60,
    "lockedMemory": 30,
    "sharedCard": 90,
    "busyDevice": 60,
    "lostMember": 90,
    "generation": 180,
    "eagerSteps": 150,
    "draftLengths": 150,
}
BUDGET_S = 570
"""Of all parts together: less than ten minutes. A part gets what is left of it, if that is less than its deadline."""


def run_parts(names: list[str], scale: int, injected: frozenset[str]) -> list[Outcome]:
    """Run the parts in order, and print each outcome."""
    end = time.monotonic() + BUDGET_S
    outcomes = []
    for name in names:
        options = ["--inject"] if name in injected else []
        left = max(1.0, end - time.monotonic())
        outcome = run_part(name, [str(scale), *options], min(DEADLINES_S[name], left))
        print(f"{name:<14}{outcome.state:<9}{outcome.seconds:6.1f} s  {outcome.reason}", flush=True)
        outcomes.append(outcome)
    return outcomes


def has_usable_gpu() -> bool:
    """Whether this environment's torch can use a GPU. A process of its own asks, so that this one holds no memory."""
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", question], check=False, capture_output=True).returncode == 0


def main() -> None:
    """Parse the command line, run, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"folder of the record; default with a GPU: {RESULTS}")
    parser.add_argument("--only", help="parts, separated by commas; default: all")
    parser.add_argument("--scale", type=int, choices=(0, 1, 2), help="0: for tests, 1: miniature, 2: for a GPU")
    parser.add_argument("--inject", default="", help="parts to report a failure of, to test the kit itself")
    arguments = parser.parse_args()
    has_gpu = (arguments.out is None or arguments.scale is None) and has_usable_gpu()
    if arguments.out is None and not has_gpu:
        parser.error(
            "--out must be given where torch finds no GPU, since such figures do not belong into results/; with a GPU "
            "use an environment whose torch is built for it (docs/gpu.md)"
        )
    names = arguments.only.split(",") if arguments.only else list(DEADLINES_S)
    if arguments.out is None and "versions" not in names:
        names = ["versions", *names]  # it names the record
    unknown = sorted({*names, *filter(None, arguments.inject.split(","))} - set(DEADLINES_S))
    if unknown:
        parser.error(f"parts must be of {', '.join(DEADLINES_S)}, got {', '.join(unknown)}")
    scale = arguments.scale if arguments.scale is not None else (2 if has_gpu else 1)
    outcomes = run_parts(names, scale, frozenset(arguments.inject.split(",")))
    name = name_record(outcomes, time.strftime("%Y-%m-%d"))
    print(write_record(arguments.out or RESULTS, name, outcomes))
    if arguments.out is None:
        write_passed_kernels(RESULTS)
    sys.exit(any(outcome.state == "failed" for outcome in outcomes))


if __name__ == "__main__":
    main()
