"""The operator as a process, for tests from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.stand_ins.api_server_http import TOKEN, HttpApiServer

PATIENCE_S = 180.0  # generous: a busy machine is slow


class Process:
    """A specrl-operator process."""

    def __init__(self, server: HttpApiServer, folder: Path, *arguments: str) -> None:
        folder.mkdir()
        config = folder / "kubeconfig"
        where = {"cluster": {"server": server.url}, "name": "c"}
        who = {"user": {"token": TOKEN}, "name": "u"}
        both = {"context": {"cluster": "c", "user": "u"}, "name": "x"}
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [where],
                    "users": [who],
                    "contexts": [both],
                    "current-context": "x",
                }
            )
        )
        self._log = (folder / "log").open("w+")
        command = [sys.executable, "-m", "specrl_operator.main", "--context", "x", "--host", "127.0.0.1", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *arguments], env=os.environ | {"KUBECONFIG": str(config)}, stderr=self._log, stdout=self._log
        )

    @property
    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text(encoding="utf-8")

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the operator did not come so far (exit code {self.process.poll()}): {self.log[-4000:]}")
            time.sleep(0.05)

    def address(self) -> str:
        self.until(lambda: '"operator_started"' in self.log)
        line = next(line for line in self.log.splitlines() if '"operator_started"' in line)
        return "http://" + str(yaml.safe_load(line)["address"])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()
