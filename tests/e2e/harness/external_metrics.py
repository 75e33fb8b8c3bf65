"""A stub of the external metrics API (external.metrics.k8s.io), as prometheus-adapter or KEDA serve it.

The API server's aggregation layer forwards requests for the group to it. Tests set the values.
"""

from __future__ import annotations

import json
import ssl
import subprocess
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit

from tests.e2e.harness.api import Api, Object

GROUP = "external.metrics.k8s.io"
VERSION = "v1beta1"
NAMESPACE = "kube-system"
NAME = "external-metrics"


class JsonHandler(BaseHTTPRequestHandler):
    """Answers with JSON, and is silent."""

    def answer(self, status: int, content: object) -> None:
        """Send an answer."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class ExternalMetrics:
    """The stub. values: by namespace, metric and label selector; a metric without a value has no items."""

    def __init__(self, address: str, folder: Path) -> None:
        """address: of this machine, which must not be loopback: Kubernetes refuses that as an endpoint."""
        self.values: dict[tuple[str, str, str], float] = {}
        self.asked: set[tuple[str, str, str]] = set()
        self._address = address
        self._server = ThreadingHTTPServer((address, 0), self._make_handler())
        key = folder / "metrics.key"
        certificate = folder / "metrics.crt"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}"]
        command += ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)

    def start(self, admin: Api) -> None:
        """Serve, and register with the API server."""
        self._thread.start()
        for item in self._build_objects():
            admin.create(item)

    def stop(self, admin: Api) -> None:
        admin.delete("apiregistration.k8s.io/v1/apiservices", f"{VERSION}.{GROUP}")
        admin.delete("v1/services", NAME, NAMESPACE)
        self._server.shutdown()
        self._server.server_close()

    def _build_objects(self) -> list[Object]:
        port = self._server.server_port
        place = {"name": NAME, "namespace": NAMESPACE}
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": place, "spec": {"ports": [{"port": port}]}},
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": place | {"labels": {"kubernetes.io/service-name": NAME}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [self._address], "conditions": {"ready": True}}],
                "ports": [{"port": port, "protocol": "TCP"}],
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": f"{VERSION}.{GROUP}"},
                "spec": {
                    "group": GROUP,
                    "version": VERSION,
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                    "insecureSkipTLSVerify": True,
                    "service": place | {"port": port},
                },
            },
        ]

    def answer(self, path: str) -> Object | None:
        """Answer a request; None for an unknown path."""
        url = urlsplit(path)
        words = url.path.strip("/").split("/")
        if words == ["apis", GROUP, VERSION]:
            kind = {"name": "*", "kind": "ExternalMetricValueList", "namespaced": True, "verbs": ["get"]}
            found = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}"}
            return found | {"resources": [kind]}
        if words[:3] != ["apis", GROUP, VERSION] or len(words) != 6 or words[3] != "namespaces":
            return None
        key = (words[4], words[5], parse_qs(url.query).get("labelSelector", [""])[0])
        self.asked.add(key)
        value = self.values.get(key)
        item = {
            "metricName": words[5],
            "metricLabels": {},
            "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "value": f"{round(1000 * (value or 0))}m",
        }
        listed = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}}
        return listed | {"items": [] if value is None else [item]}

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                found = stub.answer(self.path)
                if found is None:
                    self.answer(404, {"kind": "Status", "code": 404})
                else:
                    self.answer(200, found)

        return Handler
