"""Stand-in replicas and trainers by fork: one process imports what they need, and each of them begins as its copy.

To import torch and gRPC costs seconds of CPU time, a fork milliseconds. The server opens no channel and computes
nothing, so that a copy is like a process that was started anew. It reads a JSON object a line from standard input and
answers each with a line:

    {"start": ARGUMENTS, "environment": VARIABLES, "log": PATH}     process id of a `tests.stand_ins.process ARGUMENTS`
    {"poll": PROCESS ID}                                            exit code, minus the signal's number; null: it runs

At the end of its input it kills what still runs.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

MODULE = "tests.stand_ins.forking"


class ForkServer:
    """The server, as the tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for pytest
        )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Start a stand-in; what it says goes to the end of `log`."""
        return Forked(self, self.ask(start=list(arguments), environment=dict(environment), log=str(log)))

    def ask(self, **request: Any) -> Any:
        """Send a request; returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it and what it started."""
        self._process.communicate()


class Forked:
    """A process of the server's: what tests use of subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        if self._code is None:
            self._code = self._server.ask(poll=self.pid)
        return self._code

    def wait(self, timeout: float) -> int:
        """Exit code once it has ended. Raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it alone, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def fork_server() -> ForkServer:
    """The one of this session."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def main() -> None:
    """Serve requests until the input ends."""
    from tests.stand_ins import process  # before the first fork

    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                _be_stand_in(process.main, request)
            running.add(pid)
            answer: int | None = pid
        else:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            running.discard(ended)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _be_stand_in(run: Any, request: dict[str, Any]) -> None:
    """In the copy: does not return."""
    code = 1
    try:
        os.environ.update(request["environment"])
        with Path(os.devnull).open("rb") as nothing, Path(request["log"]).open("ab") as log:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        run(request["start"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter would say it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
