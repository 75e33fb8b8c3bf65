"""The chart as a user installs it: the real helm, and the operator in a pod under the chart's own ServiceAccount."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.harness.nodes import OURS
from tests.e2e.harness.played import STORAGE_CLASS

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm"
HELM_TIMEOUT_S = 300

VALUES: dict[str, Any] = {
    "operator": {"nodeSelector": {OURS: "processes"}},
    "jobs": {"storeClass": STORAGE_CLASS["metadata"]["name"], "storeSize": "1Gi"},  # type: ignore[index]
}
"""Of every release here: the operator is started for real."""


class Release:
    """One release of the chart. A name that contains the chart's is the prefix of everything in it."""

    def __init__(self, helm: Path, kubeconfig: Path, name: str, namespace: str) -> None:
        self.name, self.namespace = name, namespace
        self._helm, self._kubeconfig = helm, kubeconfig

    @property
    def account(self) -> str:
        """The ServiceAccount of its operator."""
        return self.name

    def install(self, **values: Any) -> str:
        """Install, and wait until the operator is ready; what helm says."""
        return self.run("install", self.name, CHART, "--create-namespace", *self._settings(values))

    def upgrade(self, **values: Any) -> str:
        """To other values, which replace those of before."""
        return self.run("upgrade", self.name, CHART, "--reset-values", *self._settings(values))

    def uninstall(self) -> str:
        return self.run("uninstall", self.name, "--wait", f"--timeout={HELM_TIMEOUT_S}s")

    def test(self) -> str:
        """The chart's own tests."""
        return self.run("test", self.name, f"--timeout={HELM_TIMEOUT_S}s")

    def run(self, verb: str, *arguments: object) -> str:
        """Any command of helm's in the release's namespace; fails with what helm says."""
        command = [self._helm, verb, *map(str, arguments), "--namespace", self.namespace]
        command += ["--kubeconfig", self._kubeconfig]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HELM_TIMEOUT_S + 60, check=False)
        assert done.returncode == 0, f"helm {verb}: {done.stderr}\n{done.stdout}"
        return done.stdout

    def _settings(self, values: dict[str, Any]) -> list[str]:
        settings = ["--wait", f"--timeout={HELM_TIMEOUT_S}s"]
        for section, content in _merged(VALUES, values).items():
            settings += ["--set-json", f"{section}={json.dumps(content)}"]
        return settings


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    nested = {key: _merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return base | over | nested
