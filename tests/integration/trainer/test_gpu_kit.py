"""The kit for a first hour on a GPU runs on a CPU, each part can fail, and no part ends the others.

The parts that need vLLM are left out: each starts an engine. `python -m benchmarks.gpu --out DIR` runs them, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import __main__ as kit
from benchmarks.gpu.part import State
from benchmarks.gpu.record import KERNEL_RECORDS, list_passed_kernels, render_page, write_passed_kernels, write_record
from benchmarks.gpu.runner import Outcome, run_part

LIMIT_S = 300
NEED_VLLM = {"generation", "eagerSteps", "draftLengths"}


def test_every_part_passes_on_a_cpu_and_fails_with_broken_figures() -> None:
    names = [name for name in kit.DEADLINES_S if name not in NEED_VLLM]
    command = [sys.executable, "-m", "tests.integration.trainer.gpu_kit_worker", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    faults = json.loads(done.stdout.splitlines()[-1])
    assert set(faults) == set(names), "the parts of the command line are those of the catalogue"
    assert {name: sound for name, (sound, _) in faults.items()} == dict.fromkeys(names)
    assert not [name for name, (_, broken) in faults.items() if broken is None]


PART = """
import json, os, signal, sys, time
name, file = sys.argv[1:3]
if name == "crashes":
    sys.exit("CUDA error: no kernel image is available")
if name == "hangs":
    time.sleep(600)
if name == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "ends":
    open(file, "w").write(json.dumps({"state": "ok", "reason": "", "figures": {"mfu": 0.5}}))
"""


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("ends", State.OK, ""),
        ("crashes", State.FAILED, "exit status 1: CUDA error: no kernel image is available"),
        ("hangs", State.FAILED, "did not end within 2 s"),
        ("killed", State.FAILED, "exit status -9: no output"),
        ("silent", State.FAILED, "wrote no outcome: FileNotFoundError"),
    ],
)
def test_part_that_crashes_or_hangs_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: State, reason: str
) -> None:
    (tmp_path / "a_part.py").write_text(PART)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = run_part(name, [], 2.0 if name == "hangs" else LIMIT_S, module="a_part")
    assert outcome.state is state
    assert outcome.reason.startswith(reason)
    assert f"| {name} | {state} |" in render_page("a-card", [outcome])


CARD = "NVIDIA H100 80GB HBM3"


def keep_record(folder: Path, date: str, card: str, states: dict[str, State]) -> None:
    """Write a record as of a machine with a GPU."""
    figures = {"kernelDevice": card, "kernelTorch": "2.13.0+cu130"}
    outcomes = [Outcome(name, state, "", dict(figures)) for name, state in states.items()]
    write_record(folder, f"{card.split()[1].lower()}-{date}", [*outcomes, Outcome("step", State.OK, "", {"mfu": 0.5})])


def test_kernels_that_passed_on_a_card_become_records_of_the_package(tmp_path: Path) -> None:
    keep_record(tmp_path, "2026-12-01", CARD, {"varlenAttention": State.OK, "fusedSwiglu": State.FAILED})
    keep_record(tmp_path, "2026-11-30", "NVIDIA B200", {"fusedSwiglu": State.OK})
    place = {"torch": "2.13.0+cu130"}
    of_b200 = {"kernel": "fusedSwiglu", "device": "NVIDIA B200", **place, "record": "b200-2026-11-30"}
    of_h100 = {"kernel": "varlenAttention", "device": CARD, **place, "record": "h100-2026-12-01"}
    assert list_passed_kernels(tmp_path) == [of_b200, of_h100]
    keep_record(tmp_path, "2026-12-02", CARD, {"varlenAttention": State.FAILED})
    write_passed_kernels(tmp_path, tmp_path / "written")
    assert json.loads((tmp_path / "written").read_text()) == {"passed": [of_b200]}, "the newest record counts"


def test_the_package_has_the_kernels_of_the_records_that_are_kept() -> None:
    assert json.loads(KERNEL_RECORDS.read_text()) == {"passed": list_passed_kernels(kit.RESULTS)}
