"""JobSet and LeaderWorkerSet: their own controllers, webhooks included, beside the control plane.

In a cluster, a Service leads to their webhooks, and they create their own certificates. Without kube-proxy, the API
server calls them by URL on loopback, with a certificate made here. They run as administrators, without their own RBAC.
"""

from __future__ import annotations

import base64
import socket
import subprocess
from pathlib import Path

import httpx2
import yaml
from tests.e2e.harness.api import Api, Object, find_condition, wait_until
from tests.e2e.harness.assets import Assets
from tests.e2e.harness.programs import Program

from specrl.launcher.processes.ports import find_free_port

CRDS = {"jobset": ("jobset-crd.yaml",), "lws": ("lws-crd.yaml", "lws-disaggregated-crd.yaml")}
POD_LABELS = {"jobset": "jobset.sigs.k8s.io/jobset-name", "lws": "leaderworkerset.sigs.k8s.io/name"}
CONFIGURATIONS = {"jobset": "config.jobset.x-k8s.io/v1alpha1", "lws": "config.lws.x-k8s.io/v1alpha1"}


class Workloads:
    """The controller of JobSet or LeaderWorkerSet. name: `jobset` or `lws`."""

    def __init__(self, name: str, assets: Assets, api: Api, folder: Path) -> None:
        self.name = name
        self._assets = assets
        self._api = api
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._program: Program | None = None

    def install(self) -> None:
        """Install CRDs, controller and webhooks. Returns when they answer."""
        self.install_crds()
        port = find_free_port()
        health = find_free_port()
        certificate = _certificate(self._folder)
        self._program = Program(
            self.name,
            [self._path(self.name), "--config", self._configuration(port, health)],
            self._folder / "controller.log",
            KUBECONFIG=str(self._api.kubeconfig(self._folder / "kubeconfig")),
        )
        self._program.start()
        # LeaderWorkerSet reports ready before its webhooks listen.
        self._program.wait_until(lambda: _is_ready(health) and _accepts_connections(port), "readiness")
        for webhooks in self._manifests(f"{self.name}-webhooks.yaml"):
            self._api.apply(self._by_url(webhooks, port, certificate))

    def install_crds(self) -> None:
        """Install the CRDs, and wait until they are served."""
        for definition in self._definitions():
            self._api.apply(definition)
            name = definition["metadata"]["name"]
            wait_until(lambda name=name: _is_served(self._api, name), f"{name} is served")  # type: ignore[misc]

    def uninstall(self) -> None:
        """Remove webhooks, controller and CRDs. Webhooks first: without their controller they refuse every write."""
        for webhooks in self._manifests(f"{self.name}-webhooks.yaml"):
            kind = webhooks["kind"].lower() + "s"
            self._api.delete(f"admissionregistration.k8s.io/v1/{kind}", self._webhooks_name(webhooks))
        self.stop()
        for definition in self._definitions():
            kind = "apiextensions.k8s.io/v1/customresourcedefinitions"
            name = definition["metadata"]["name"]
            self._api.delete(kind, name)
            wait_until(lambda kind=kind, name=name: self._api.find(kind, name) is None, f"{name} is gone")  # type: ignore[misc]

    def stop(self) -> None:
        """Stop the controller."""
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
        """Build upstream's webhook configuration with loopback URLs, as upstream for the controller's pods only."""
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
        path = self._assets.find_path(name)
        assert path is not None, name
        return path


def _certificate(folder: Path) -> bytes:
    """Write a self-signed tls.crt and tls.key for 127.0.0.1. Returns the certificate."""
    certificate = folder / "tls.crt"
    key = folder / "tls.key"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=webhook", "-days", "2"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*request, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    return certificate.read_bytes()


def _is_served(api: Api, definition: str) -> bool:
    found = api.get("apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    return find_condition(found, "Established").get("status") == "True"


def _accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def _is_ready(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/readyz", verify=False, timeout=5).is_success  # no TLS here
    except httpx2.HTTPError:
        return False
