"""Whole runs as a user starts them: the command line in a process of its own, real engines, real trainer."""

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


@dataclass
class StartedRun:
    """`specrl ...` under way; its run appears under `runs`."""

    process: subprocess.Popen[bytes]
    runs: Path
    output: Path

    @property
    def directory(self) -> Path:
        """The folder of the one run."""
        (found,) = [path for path in self.runs.iterdir() if (path / "run.yaml").exists()]
        return found

    def reports(self) -> list[dict[str, Any]]:
        """Steps reported so far."""
        files = list(self.runs.glob("*/metrics.jsonl"))
        lines = files[0].read_text().splitlines() if files else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something is so; fails when the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, f"the run ended: {self.output.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {self.output.read_text()[-3000:]}"
            time.sleep(0.1)

    def kill_program(self, *words: str) -> None:
        """SIGKILL the one process of this run whose command line holds all of `words`, not its children."""
        found = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if all(any(word in part for part in _command_line(child)) for word in words)
        ]
        assert found, f"no process of the run has {words}"
        found[0].send_signal(signal.SIGKILL)

    def finish(self, timeout_s: float) -> str:
        """Wait for the end; returns what was printed. Fails unless the exit code is 0."""
        code = self.process.wait(timeout_s)
        text = self.output.read_text()
        assert code == 0, text[-3000:]
        return text

    def stop(self) -> None:
        """End it, whatever became of the test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()


def start(folder: Path, *arguments: str, environment: Mapping[str, str] = os.environ) -> StartedRun:
    """Start `specrl ARGUMENTS` with its output at the end of `folder`/output.txt."""
    output = folder / "output.txt"
    with output.open("ab") as file:
        process = subprocess.Popen(
            [str(SPECRL), *arguments], cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    return StartedRun(process, folder / "runs", output)


def checksums(directory: Path, step: int) -> dict[str, str]:
    """sha256 of every tensor file of a finished run's export and of its checkpoint of `step`."""
    files = [
        *directory.glob("export/**/*.safetensors"),
        *directory.glob(f"checkpoints/step-{step:06d}/**/*.*tensors"),
    ]
    assert len(files) >= 7, "policy and drafter; weights, two moments, drafter and random state"
    return {str(file.relative_to(directory)): sha256(file.read_bytes()).hexdigest() for file in files}


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
