"""A short `make chaos`: a run without faults, and one with faults that no other test injects into real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CHEAP = (
    "freeze coordinator",
    "point store.finish_step.after SIGKILL",
    "cut gen-0",  # this and a full disk need namespaces; without them the others happen more often
)
"""Faults after which no engine or trainer must be restarted. A restart takes longer than the rest of the test."""
DEAR = ("kill engine of gen-0", "freeze trainer-1", "full disk")


@pytest.mark.timeout(3000)
def test_a_run_under_faults_ends_in_the_weights_of_one_without(tmp_path: Path) -> None:
    # With this seed the last fault is armed after 3.5 s in which the run goes on, long before its eighth step.
    check_round(tmp_path, CHEAP, seed=10395, steps=8, ranks=1)


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_a_long_run_under_faults_of_every_part_ends_in_the_weights_of_one_without(tmp_path: Path) -> None:
    """`make test` covers the expensive faults in tests that check fewer promises.

    test_demo.py kills a replica, a trainer and a coordinator. trainer/test_lost_rank.py has a rank that hangs, and
    trainer/test_bad_disk.py a full disk.
    """
    check_round(tmp_path, (*CHEAP, *DEAR), seed=7, steps=40, ranks=2)


def check_round(folder: Path, faults: tuple[str, ...], *, seed: int, steps: int, ranks: int) -> None:
    command = [sys.executable, "-m", "tests.chaos", "--rounds", "1", "--faults", str(len(faults)), "--seed", str(seed)]
    command += ["--steps", str(steps), "--ranks", str(ranks), "--folder", str(folder / "chaos")]
    command += [word for fault in faults for word in ("--only", fault)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=2900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"seed {seed}" in done.stdout
    assert f"{4 * steps} prompts settled once each, 0 of them failed with a reason" in done.stdout
    assert "bit for bit those of the run without faults" in done.stdout
    assert f"kept through {len(faults)} faults" in done.stdout
