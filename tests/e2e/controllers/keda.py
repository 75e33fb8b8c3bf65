"""KEDA's real operator and metrics server, and the Prometheus that they ask, which is a stub.

The certificates of both are made here, as upstream's manifests let an administrator do. KEDA's webhooks, which only
refuse unsound objects, are left out.
"""

from __future__ import annotations

import base64
import time
from http.server import ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit

from tests.certificates import Authority
from tests.e2e.controllers.build import KEDA, KEDA_CRDS
from tests.e2e.controllers.installed import Installed, is_ready
from tests.e2e.harness.api import Object, find_condition, wait_until
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.external_metrics import JsonHandler

from specrl.launcher.processes.ports import find_free_port

NAMESPACE = "keda"
OPERATOR = "keda-operator"
METRICS = "keda-metrics-apiserver"
SCALED_OBJECTS = "keda.sh/v1alpha1/scaledobjects"
API = "v1beta1.external.metrics.k8s.io"
API_SERVICES = "apiregistration.k8s.io/v1/apiservices"


class Keda:
    """An installed KEDA."""

    def __init__(self, plane: ControlPlane) -> None:
        self._it = Installed(KEDA, plane, NAMESPACE)
        self._admin = plane.admin

    def install(self) -> None:
        """Install everything. Returns when the API server reaches the metrics server."""
        self._it.install_crds(f"{name}.yaml" for name in KEDA_CRDS)
        names = [f"{service}.{NAMESPACE}.svc" for service in (OPERATOR, METRICS)]
        secret = Authority(self._it.folder / "authority").secret(names)
        certificates = self._it.folder / "certificates"
        certificates.mkdir(exist_ok=True)
        for file, content in secret.items():
            (certificates / file).write_bytes(content)
        asked, health, served = find_free_port(), find_free_port(), find_free_port()
        self._it.start(
            "operator",
            f"--cert-dir={certificates}",
            f"--metrics-service-bind-address=127.0.0.1:{asked}",
            f"--health-probe-bind-address=127.0.0.1:{health}",
            "--metrics-bind-address=0",
            POD_NAMESPACE=NAMESPACE,
            KEDA_CLUSTER_OBJECT_NAMESPACE=NAMESPACE,
            WATCH_NAMESPACE="",
        ).wait_until(lambda: is_ready(health), "readiness")
        self._it.start(
            "adapter",
            f"--bind-address={self._it.address}",
            f"--secure-port={served}",
            f"--port={find_free_port()}",
            f"--cert-dir={certificates}",
            f"--tls-cert-file={certificates / 'tls.crt'}",
            f"--tls-private-key-file={certificates / 'tls.key'}",
            f"--metrics-service-address=127.0.0.1:{asked}",
            f"--metrics-service-grpc-authority={names[0]}",
            *(f"--{what}-kubeconfig={self._it.kubeconfig}" for what in ("authentication", "authorization", "lister")),
            POD_NAMESPACE=NAMESPACE,
            KEDA_CLUSTER_OBJECT_NAMESPACE=NAMESPACE,
            WATCH_NAMESPACE="",
        )
        self._it.serve(METRICS, served)
        group = {"group": "external.metrics.k8s.io", "version": "v1beta1"}
        order = {"groupPriorityMinimum": 100, "versionPriority": 100}
        service = {"name": METRICS, "namespace": NAMESPACE}
        spec = {**group, **order, "service": service, "caBundle": base64.b64encode(secret["ca.crt"]).decode()}
        self._admin.apply(
            {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": API}, "spec": spec}
        )
        wait_until(
            lambda: find_condition(self._admin.get(API_SERVICES, API), "Available").get("status") == "True",
            "the metrics server is available",
            explain=self.describe,
        )

    def read_scaled_object(self, name: str, namespace: str) -> Object:
        """Read a ScaledObject."""
        found: Object = self._admin.get(SCALED_OBJECTS, name, namespace)
        return found

    def describe(self) -> str:
        """Return the ends of KEDA's logs."""
        return self._it.describe()

    def uninstall(self) -> None:
        """Remove everything while the operator still runs, since it holds ScaledObjects back by finalizers."""
        for each in self._admin.list(SCALED_OBJECTS):
            self._admin.delete(SCALED_OBJECTS, each["metadata"]["name"], each["metadata"]["namespace"])
        wait_until(lambda: not self._admin.list(SCALED_OBJECTS), "no ScaledObject is left", explain=self.describe)
        self._admin.delete(API_SERVICES, API)
        self._it.stop()


class StubPrometheus:
    """Answers instant queries, as Prometheus does. value: of every series; None: there is none."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.asked: set[str] = set()
        stub = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                stub.asked.update(parse_qs(urlsplit(self.path).query).get("query", []))
                series = [] if stub.value is None else [{"metric": {}, "value": [time.time(), str(stub.value)]}]
                found = {"status": "success", "data": {"resultType": "vector", "result": series}}
                self.answer(200, found)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
