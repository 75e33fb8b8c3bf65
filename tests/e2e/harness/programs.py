"""Start programs for the harness: with a log, and with a guard that always stops them.

A killed test run leaves nothing behind: the kernel kills each program when the thread that started it ends. Programs
must therefore be started from the main thread (services/specrl/launcher/processes/child_guard.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specrl.launcher.processes.child_guard import guarded_command

STOP_S = 8.0  # seconds; enough for an API server to finish its watches, then it is killed
START_S = 180.0  # seconds; startup takes a minute on a busy machine


class Program:
    """A process with its log file."""

    def __init__(self, name: str, command: Sequence[str | Path | int], log: Path, **environment: str) -> None:
        self.name = name
        self.log = log
        self._command = [str(word) for word in command]
        self._environment = os.environ | environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id; the program must be started."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the program, and append its output to the log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                guarded_command(self._command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Poll `is_ready`. Fails with the log's end if the program exits first, or after START_S."""
        deadline = time.monotonic() + START_S
        while not is_ready():
            assert self._process is not None
            ended = self._process.poll()
            assert ended is None, f"{self.name} ended with {ended} before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{self.name}: no {what} in {START_S:.0f} s:\n{self.tail()}"
            time.sleep(0.05)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 40) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait(self, timeout_s: float) -> int:
        """Wait until the program exits by itself. Returns its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def signal(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def stop(self, grace_s: float = STOP_S) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`. Does nothing if the program is not running."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
