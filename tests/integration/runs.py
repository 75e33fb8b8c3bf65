"""Starts whole runs as a user does: the `specrl` command in its own process, with real engines and a real trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

SPECRL = Path(sys.executable).with_name("specrl")
STOP_S = 90.0  # longest wait for the launcher to stop its processes


@dataclass
class StartedRun:
    """A running `specrl` command. runs: has the folder of its run. output: file of what it prints."""

    process: subprocess.Popen[bytes]
    runs: Path
    output: Path

    @property
    def directory(self) -> Path:
        """The folder of the run. There must be exactly one."""
        (found,) = [path for path in self.runs.iterdir() if (path / "run.yaml").exists()]
        return found

    def reports(self) -> list[dict[str, Any]]:
        """Read the reports of all steps so far, without a line that is still being written."""
        files = list(self.runs.glob("*/metrics.jsonl"))
        lines = files[0].read_text().splitlines() if files else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Poll until the condition holds. Fails if the run ends first, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the run ended: {self.output.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {self.output.read_text()[-3000:]}"
            time.sleep(0.1)

    def kill_program(self, *words: str) -> None:
        """Send SIGKILL to the first process of this run whose command line has all `words`, but not to its children."""
        found = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if all(any(word in part for part in _command_line(child)) for word in words)
        ]
        assert found, f"no process of the run has {words}"
        found[0].send_signal(signal.SIGKILL)

    def finish(self, timeout_s: float) -> str:
        """Wait for the end of the command, and return what it printed. Fails unless the exit code is 0."""
        code = self.process.wait(timeout_s)
        text = self.output.read_text()
        assert code == 0, text[-3000:]
        return text

    def stop(self) -> None:
        """Stop the run if it still runs: first with SIGTERM, as a user does, then with SIGKILL."""
        if self.process.poll() is None:
            self.process.terminate()  # a run that a background job started ignores Ctrl-C
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()


def start(folder: Path, *arguments: str, environment: Mapping[str, str] = os.environ) -> StartedRun:
    """Start `specrl ARGUMENTS` in `folder`. Its output is appended to `folder`/output.txt."""
    output = folder / "output.txt"
    with output.open("ab") as file:
        process = subprocess.Popen(
            [str(SPECRL), *arguments], cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    return StartedRun(process, folder / "runs", output)


def checksums(directory: Path, step: int) -> dict[str, str]:
    """Compute sha256 of every tensor file of a finished run: of its export, and of its checkpoint of `step`."""
    files = [
        *directory.glob("export/**/*.safetensors"),
        *directory.glob(f"checkpoints/step-{step:06d}/**/*.*tensors"),
    ]
    assert len(files) >= 7, "two files of the export; of the checkpoint weights, two moments, drafter and random state"
    return {str(file.relative_to(directory)): sha256(file.read_bytes()).hexdigest() for file in files}


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
