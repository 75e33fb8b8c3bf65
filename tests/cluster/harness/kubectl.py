"""kubectl, as a user runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.e2e import binaries


class Kubectl:
    """Runs kubectl as the administrator."""

    def __init__(self, kubeconfig: Path) -> None:
        self._command = [str(binaries.find("kubectl")), "--kubeconfig", str(kubeconfig)]
        # The API server is on this machine; a proxy of the environment cannot reach it.
        self._environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}

    def run(self, *arguments: str, check: bool = True, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command. Fails with its output."""
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"kubectl {arguments}: {done.stderr}\n{done.stdout}"
        return done
