"""Programs that the harness starts: on a leash, with a log, and stopped for certain.

A test run that is killed leaves nothing behind: the kernel kills each program when the thread that started it ends,
so they are started from the main thread (services/specrl/launcher/leash.py).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import specrl.launcher.leash

STOP_S = 8.0  # an API server finishes its watches in that time; what takes longer is killed
START_S = 180.0  # on a machine that compiles something beside it, ready takes a minute


class Program:
    """One process with its log file."""

    def __init__(self, name: str, command: Sequence[str | Path | int], log: Path, **environment: str) -> None:
        self.name, self.log = name, log
        self._command = [str(word) for word in command]
        self._environment = os.environ | environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of a started one."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it; the log is appended to."""
        leash = [sys.executable, specrl.launcher.leash.__file__, str(os.getpid())]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*leash, *self._command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Poll `is_ready`; fails with the log's end when the program ends first, or time is up."""
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
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait(self, timeout_s: float) -> int:
        """Wait until it ends by itself; returns its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def signal(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def stop(self, grace_s: float = STOP_S) -> None:
        """SIGTERM, then SIGKILL for what is still there after `grace_s`; of one that is not running, nothing."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
