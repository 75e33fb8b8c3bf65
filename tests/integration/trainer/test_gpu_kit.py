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
from benchmarks.gpu.record import render_page
from benchmarks.gpu.runner import run_part

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
