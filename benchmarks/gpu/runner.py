"""Runs each part in a process of its own with a deadline. Whatever becomes of a part, the others run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.part import Figures, State

ROOT = Path(__file__).parents[2]
SECRET_MARKS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Variables whose names contain these do not reach a part, so that no error message can print them."""
TRAINER_PARTS = ("step", "memory", "optimizer")
"""Parts whose allocator is set as in a run's trainers."""


@dataclass
class Outcome:
    """How a part ended. reason: why it failed or was skipped. seconds: wall time with the process's start."""

    name: str
    state: State
    reason: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0


def run_part(name: str, arguments: list[str], deadline_s: float, module: str = "benchmarks.gpu.child") -> Outcome:
    """Run a part in `python -m module NAME FILE ARGUMENTS` and read its outcome from FILE. Never raises."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        file = Path(scratch) / "outcome.json"
        log = Path(scratch) / "log"
        with log.open("wb") as output:
            # A session of its own: engines and group members that it leaves behind are killed with it.
            process = subprocess.Popen(
                [sys.executable, "-m", module, name, str(file), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=_build_environment(os.environ, name),
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outcome = _read_outcome(name, file, status, deadline_s, log)
    outcome.seconds = time.monotonic() - started
    return outcome


def _read_outcome(name: str, file: Path, status: int | None, deadline_s: float, log: Path) -> Outcome:
    if status is None:
        return Outcome(name, State.FAILED, f"did not end within {deadline_s:g} s")
    if status == 0:
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
            return Outcome(name, State(read["state"]), read["reason"], read["figures"])
        except (OSError, ValueError, KeyError) as error:
            return Outcome(name, State.FAILED, f"wrote no outcome: {type(error).__name__}: {error}")
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Outcome(name, State.FAILED, f"exit status {status}: {lines[-1] if lines else 'no output'}")


def _build_environment(outer: Mapping[str, str], name: str) -> dict[str, str]:
    """Make specrl and the benchmarks importable from the checkout, and accept versions that nobody has compared."""
    kept = {name: value for name, value in outer.items() if not any(mark in name.upper() for mark in SECRET_MARKS)}
    folders = [ROOT, ROOT / "services", ROOT / "operators"]
    inherited = [outer["PYTHONPATH"]] if outer.get("PYTHONPATH") else []
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if name in TRAINER_PARTS else {}
    return kept | {
        **allocator,
        "PYTHONPATH": os.pathsep.join([*map(str, folders), *inherited]),
        "SPECRL_UNREAD_VERSIONS": "warn",
        "HF_HUB_OFFLINE": "1",
    }
