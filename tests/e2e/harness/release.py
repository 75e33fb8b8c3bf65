"""Install the chart as a user does: with the real helm. The operator runs in a pod with the chart's ServiceAccount."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.harness.kubelet_process import STORAGE_CLASS
from tests.e2e.harness.nodes import OURS

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm"
HELM_TIMEOUT_S = 300

VALUES: dict[str, Any] = {
    "images": {"preloaded": True},
    "operator": {"nodeSelector": {OURS: "processes"}},
    "rbac": {"tokenReviewNamespaces": ["*"]},  # every test has a namespace of its own
    "jobs": {"storeClass": STORAGE_CLASS["metadata"]["name"], "storeSize": "1Gi"},  # type: ignore[index]
}
"""Values of every release here. The operator's pod runs as a process."""


class Release:
    """A release of the chart. Its name contains the chart's, and is therefore the prefix of its objects."""

    def __init__(
        self,
        helm: Path,
        kubeconfig: Path,
        name: str,
        namespace: str,
        values: dict[str, Any] | None = None,
        *,
        chart: Path = CHART,
    ) -> None:
        """values: of every installation and upgrade; None takes VALUES. chart: that of this tree, or another one."""
        self.name = name
        self._chart = chart
        self._values = VALUES if values is None else values
        self.namespace = namespace
        self._helm = helm
        self._kubeconfig = kubeconfig

    @property
    def account(self) -> str:
        """The operator's ServiceAccount."""
        return self.name

    def install(self, **values: Any) -> str:
        """Install the chart, and wait until the operator is ready. Returns helm's output."""
        return self.run("install", self.name, self._chart, "--create-namespace", *self._settings(values))

    def upgrade(self, **values: Any) -> str:
        """Upgrade to other values, which replace the previous ones."""
        return self.run("upgrade", self.name, self._chart, "--reset-values", *self._settings(values))

    def uninstall(self) -> str:
        return self.run("uninstall", self.name, "--wait", f"--timeout={HELM_TIMEOUT_S}s")

    def test(self) -> str:
        """Run `helm test`. Returns helm's output."""
        return self.run("test", self.name, f"--timeout={HELM_TIMEOUT_S}s")

    def run(self, verb: str, *arguments: object) -> str:
        """Run helm in the release's namespace. Fails with helm's output."""
        command = [self._helm, verb, *map(str, arguments), "--namespace", self.namespace]
        command += ["--kubeconfig", self._kubeconfig]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HELM_TIMEOUT_S + 60, check=False)
        assert done.returncode == 0, f"helm {verb}: {done.stderr}\n{done.stdout}"
        return done.stdout

    def _settings(self, values: dict[str, Any]) -> list[str]:
        settings = ["--wait", f"--timeout={HELM_TIMEOUT_S}s"]
        for section, content in _merged(self._values, values).items():
            settings += ["--set-json", f"{section}={json.dumps(content)}"]
        return settings


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    nested = {key: _merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return base | over | nested
