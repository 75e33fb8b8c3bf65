"""cert-manager's real controllers, those for CA and self-signed issuers, and an authority made by them.

Its webhook, which only refuses unsound objects, is left out, and so is the check of CRDs by cainjector.
"""

from __future__ import annotations

from tests.e2e.controllers.build import CERT_MANAGER, CERT_MANAGER_CRDS
from tests.e2e.controllers.installed import Installed
from tests.e2e.harness.api import Object, is_condition_true, wait_until
from tests.e2e.harness.control_plane import ControlPlane

GROUP = "cert-manager.io/v1"
CERTIFICATES = f"{GROUP}/certificates"
ISSUERS = f"{GROUP}/issuers"


class CertManager:
    """An installed cert-manager."""

    def __init__(self, plane: ControlPlane) -> None:
        self._it = Installed(CERT_MANAGER, plane, "cert-manager")
        self._admin = plane.admin

    def install(self) -> None:
        """Install the CRDs, and start the controllers."""
        self._it.install_crds(f"{name}.yaml" for name in CERT_MANAGER_CRDS)
        self._it.start("controller", f"--kubeconfig={self._it.kubeconfig}")

    def add_authority(self, name: str, namespace: str) -> None:
        """Create a CA issuer, whose own certificate a self-signed issuer makes. Waits until it is ready."""
        self._apply("Issuer", f"{name}-root", namespace, {"selfSigned": {}})
        root = {"kind": "Issuer", "name": f"{name}-root"}
        ca = {"isCA": True, "commonName": name, "secretName": f"{name}-ca", "issuerRef": root}
        self._apply("Certificate", f"{name}-ca", namespace, ca | {"privateKey": {"algorithm": "ECDSA"}})
        self._apply("Issuer", name, namespace, {"ca": {"secretName": f"{name}-ca"}})
        wait_until(
            lambda: is_condition_true(self._admin.get(ISSUERS, name, namespace), "Ready"),
            f"{name} is ready",
            explain=self.describe,
        )

    def renew(self, name: str, namespace: str) -> None:
        """Ask for a new certificate, as `cmctl renew` does."""
        status = self._admin.get(CERTIFICATES, name, namespace)["status"]
        now = {"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "a test"}
        kept = [each for each in status["conditions"] if each["type"] != "Issuing"]
        conditions = [*kept, now | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]
        change = {"status": {"conditions": conditions}}
        self._admin.patch(CERTIFICATES, name, change, namespace, subresource="status")

    def describe(self) -> str:
        """Return the end of the controllers' log."""
        return self._it.describe()

    def uninstall(self) -> None:
        """Stop the controllers and remove everything."""
        self._it.stop()

    def _apply(self, kind: str, name: str, namespace: str, spec: Object) -> None:
        metadata = {"name": name, "namespace": namespace}
        self._admin.apply({"apiVersion": GROUP, "kind": kind, "metadata": metadata, "spec": spec})
