"""Runs of the demo's run file that benchmarks compare: begun, watched, and kept when they are finished."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specrl.coordinator.report import Phase
from specrl.spec import digest, load_spec

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo"
RUN_FILE = DEMO / "run.yaml"
SPECRL = Path(sys.executable).with_name("specrl")
GLANCE_S = 1.0


class Failed(Exception):
    """A command that had to succeed did not; the text names its log."""


def call(command: Sequence[str], log: Path, look: Callable[[], None] = lambda: None) -> None:
    """Run a command to its end, its output in `log`. Raises Failed. On Ctrl-C the command ends cleanly first.

    look: called every second meanwhile.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            while process.poll() is None:
                look()
                try:
                    process.wait(GLANCE_S)
                except subprocess.TimeoutExpired:
                    continue
        except KeyboardInterrupt:
            process.wait()  # it has had the same signal from the terminal
            raise
    if process.returncode:
        raise Failed(f"exit code {process.returncode}; see {log}")


def overrides_of(fields: Mapping[str, str]) -> list[str]:
    """`path=value` for each field."""
    return [f"{path}={value}" for path, value in fields.items()]


def begin(fields: Mapping[str, str], runs: Path, *command: str) -> list[str]:
    """Command line of specrl for the demo's run file with these fields."""
    settings = [word for override in overrides_of(fields) for word in ("--set", override)]
    return [str(SPECRL), *command, "-f", str(RUN_FILE), "--runs", str(runs), "--plain", *settings]


def run(fields: Mapping[str, str], runs: Path, trained: Callable[[int], None] = lambda _: None) -> Path:
    """Folder of the finished run with these fields below `runs`; one that an earlier call left is not repeated.

    trained: told how many steps the run under way has trained, every second. Raises Failed.
    """
    wanted = digest(load_spec(RUN_FILE, overrides_of(fields)))
    found = finished(runs, wanted)
    if found is None:
        shutil.rmtree(runs, ignore_errors=True)
        log = runs.with_suffix(".log")
        call(begin(fields, runs, "run"), log, lambda: trained(_steps(runs)))
        found = finished(runs, wanted)
        if found is None:
            raise Failed(f"no finished run; see {log}")
        for unread in ("checkpoints", "export"):  # tens of MB a run
            shutil.rmtree(found / unread, ignore_errors=True)
    return found


def finished(runs: Path, wanted: str) -> Path | None:
    """Folder of the run below `runs` that has finished, if its run file has this digest."""
    for status in runs.glob("*/status.json"):
        is_finished = json.loads(status.read_text(encoding="utf-8"))["phase"] == Phase.FINISHED
        if is_finished and digest(load_spec(status.parent / "run.yaml")) == wanted:
            return status.parent
    return None


def _steps(runs: Path) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in runs.glob("*/metrics.jsonl"))
