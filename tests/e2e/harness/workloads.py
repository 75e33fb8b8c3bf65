"""JobSet and LeaderWorkerSet: their own controllers, webhooks included, beside the control plane.

In a cluster their webhooks are reached through a Service and make their own certificates; without kube-proxy they are
reached by URL on loopback, with a certificate made here. Their own RBAC is not used: they run as administrators.
"""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import httpx2
import yaml
from tests.e2e.harness.api import Api, Object, condition, until
from tests.e2e.harness.assets import Assets
from tests.e2e.harness.programs import Program, free_port

CRDS = {"jobset": ("jobset-crd.yaml",), "lws": ("lws-crd.yaml", "lws-disaggregated-crd.yaml")}
POD_LABELS = {"jobset": "jobset.sigs.k8s.io/jobset-name", "lws": "leaderworkerset.sigs.k8s.io/name"}
CONFIGURATIONS = {"jobset": "config.jobset.x-k8s.io/v1alpha1", "lws": "config.lws.x-k8s.io/v1alpha1"}


class Workloads:
    """One of the two: `jobset` or `lws`."""

    def __init__(self, name: str, assets: Assets, api: Api, folder: Path) -> None:
        self.name, self._assets, self._api = name, assets, api
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._program: Program | None = None

    def install(self) -> None:
        """CRDs, controller, webhooks; returns when they answer."""
        self.install_crds()
        port, health = free_port(), free_port()
        certificate = _certificate(self._folder)
        self._program = Program(
            self.name,
            [self._path(self.name), "--config", self._configuration(port, health)],
            self._folder / "controller.log",
            KUBECONFIG=str(self._api.kubeconfig(self._folder / "kubeconfig")),
        )
        self._program.start()
        self._program.wait_until(lambda: _is_ready(health), "readiness")
        for webhooks in self._manifests(f"{self.name}-webhooks.yaml"):
            self._api.apply(self._by_url(webhooks, port, certificate))

    def install_crds(self) -> None:
        """The definitions alone, and wait until they are served."""
        for definition in self._definitions():
            self._api.apply(definition)
            name = definition["metadata"]["name"]
            until(lambda name=name: _is_served(self._api, name), f"{name} is served")  # type: ignore[misc]

    def uninstall(self) -> None:
        """Webhooks first, or they would refuse everything; then the controller; CRDs take their objects along."""
        for webhooks in self._manifests(f"{self.name}-webhooks.yaml"):
            kind = webhooks["kind"].lower() + "s"
            self._api.delete(f"admissionregistration.k8s.io/v1/{kind}", self._webhooks_name(webhooks))
        self.stop()
        for definition in self._definitions():
            kind, name = "apiextensions.k8s.io/v1/customresourcedefinitions", definition["metadata"]["name"]
            self._api.delete(kind, name)
            until(lambda kind=kind, name=name: self._api.find(kind, name) is None, f"{name} is gone")  # type: ignore[misc]

    def stop(self) -> None:
        """End the controller."""
        if self._program is not None:
            self._program.stop()
            self._program = None

    def _definitions(self) -> list[Object]:
        return [manifest for name in CRDS[self.name] for manifest in self._manifests(name)]

    def _configuration(self, port: int, health: int) -> Path:
        file = self._folder / "configuration.yaml"
        content = {
            "apiVersion": CONFIGURATIONS[self.name],
            "kind": "Configuration",
            "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(self._folder)},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
        }
        file.write_text(yaml.safe_dump(content))
        return file

    def _by_url(self, webhooks: Object, port: int, certificate: bytes) -> Object:
        """Upstream's configuration, reached on loopback; of pods only the controller's own, as upstream patches it."""
        webhooks["metadata"]["name"] = self._webhooks_name(webhooks)
        for webhook in webhooks["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            bundle = base64.b64encode(certificate).decode()
            webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
            if any("pods" in rule["resources"] for rule in webhook["rules"]):
                expression = {"key": POD_LABELS[self.name], "operator": "Exists"}
                webhook["objectSelector"] = {"matchExpressions": [expression]}
        return webhooks

    def _webhooks_name(self, webhooks: Object) -> str:
        return f"{self.name}-{webhooks['metadata']['name'].removeprefix(f'{self.name}-')}"

    def _manifests(self, name: str) -> list[Object]:
        return [each for each in yaml.safe_load_all(self._path(name).read_text()) if each]

    def _path(self, name: str) -> Path:
        path = self._assets.path(name)
        assert path is not None, name
        return path


def _certificate(folder: Path) -> bytes:
    """tls.crt and tls.key for 127.0.0.1, signed by themselves; returns the certificate."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=webhook", "-days", "2"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*request, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    return certificate.read_bytes()


def _is_served(api: Api, definition: str) -> bool:
    found = api.get("apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    return condition(found, "Established").get("status") == "True"


def _is_ready(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/readyz", verify=False, timeout=5).is_success  # no TLS here
    except httpx2.HTTPError:
        return False
