"""What the controllers of others have in common: CRDs, a process, and a Service that leads to it.

In a cluster a controller is a pod. Here it is a process of this machine that runs as administrator, at the address
that pods have for this machine. Its Service has an EndpointSlice with that address, so webhook configurations and
APIServices are upstream's own: the API server calls Services by their endpoints.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2
import yaml
from tests.e2e.go_programs import GoPrograms
from tests.e2e.harness.api import Api, Object, find_condition, wait_until
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.programs import Program
from tests.requirements import CONTROLLERS, NAMESPACES

CRDS = "apiextensions.k8s.io/v1/customresourcedefinitions"


class Installed:
    """CRDs and processes of one project, in a namespace of its own."""

    def __init__(self, programs: GoPrograms, plane: ControlPlane, namespace: str) -> None:
        """Skip the test if the programs are not built, or this machine has no address that pods can reach."""
        if not programs.folder.is_dir():
            CONTROLLERS.skip(f"{programs.name} is not built")
        if plane.network is None:
            NAMESPACES.skip("no address for an endpoint")
        self.admin: Api = plane.admin
        self.address = plane.network.gateway
        self.kubeconfig = plane.kubeconfig
        self.namespace = namespace
        self.folder = plane.folder / programs.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._programs = programs
        self._started: list[Program] = []
        self._definitions: list[str] = []
        self.admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})

    def read(self, name: str) -> list[Object]:
        """Read one of upstream's manifests."""
        return [each for each in yaml.safe_load_all((self._programs.folder / name).read_text()) if each]

    def install_crds(self, names: Iterable[str], change: dict[str, Object] | None = None) -> None:
        """Install CRDs, and wait until they are served. change: fields of a CRD's spec by its plural."""
        for name in names:
            for definition in self.read(name):
                definition["spec"] |= (change or {}).get(definition["spec"]["names"]["plural"], {})
                self._definitions.append(self.admin.apply(definition)["metadata"]["name"])
        for name in self._definitions:
            wait_until(lambda name=name: self._is_served(name), f"{name} is served")  # type: ignore[misc]

    def start(self, name: str, *arguments: str, log: str = "", **environment: str) -> Program:
        """Start one of the programs as administrator."""
        command: list[Any] = [self._programs.folder / name, *arguments]
        environment = {"KUBECONFIG": str(self.kubeconfig)} | environment
        program = Program(name, command, self.folder / f"{log or name}.log", **environment)
        self._started.append(program)
        program.start()
        return program

    def serve(self, name: str, port: int, service_port: int = 443) -> None:
        """Create a Service that leads to a port of this machine."""
        place = {"name": name, "namespace": self.namespace}
        ports = [{"port": service_port, "targetPort": port, "protocol": "TCP"}]
        self.admin.apply({"apiVersion": "v1", "kind": "Service", "metadata": place, "spec": {"ports": ports}})
        self.admin.apply(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": place | {"labels": {"kubernetes.io/service-name": name}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [self.address], "conditions": {"ready": True}}],
                "ports": [{"port": port, "protocol": "TCP"}],
            }
        )

    def mount_secret(self, name: str, folder: Path) -> None:
        """Write a Secret's files to a folder as soon as it has a certificate, as a kubelet does."""

        def find_content() -> dict[str, str] | None:
            found: dict[str, str] = (self.admin.find("v1/secrets", name, self.namespace) or {}).get("data") or {}
            return found if "tls.crt" in found else None

        content = wait_until(find_content, f"{name} has a certificate", explain=self.describe)
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in content.items():
            (folder / file).write_bytes(base64.b64decode(text))

    def describe(self) -> str:
        """Return the ends of the programs' logs."""
        return "\n\n".join(f"{each.name}:\n{each.tail(15)}" for each in self._started)

    def stop(self) -> None:
        """Stop the processes, and remove CRDs and namespace."""
        while self._started:
            self._started.pop().stop()
        for name in self._definitions:
            self.admin.delete(CRDS, name)
        for name in self._definitions:
            wait_until(lambda name=name: self.admin.find(CRDS, name) is None, f"{name} is gone")  # type: ignore[misc]
        self.admin.delete("v1/namespaces", self.namespace)

    def _is_served(self, name: str) -> bool:
        return find_condition(self.admin.get(CRDS, name), "Established").get("status") == "True"


def is_ready(port: int) -> bool:
    """Whether a controller says at this port of the machine that it is ready."""
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/readyz", timeout=5, trust_env=False).is_success
    except httpx2.HTTPError:
        return False
