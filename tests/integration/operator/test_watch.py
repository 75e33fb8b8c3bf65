"""A watch over a real connection survives silence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import kubernetes
import pytest

from specrl_operator.cluster.kube import KubeCluster
from specrl_operator.kinds import POD

DEADLINE_S = 0.5
SILENCE_S = 2.0


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Sends nothing for longer than a request's deadline, then an ADDED event of a pod."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            time.sleep(SILENCE_S)
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "late", "namespace": "rl"}}
            self.wfile.write(json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n")

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def test_a_watch_survives_a_silence_longer_than_the_request_deadline(server: ThreadingHTTPServer) -> None:
    configuration = kubernetes.client.Configuration()
    configuration.host = f"http://127.0.0.1:{server.server_port}"
    cluster = KubeCluster(kubernetes.client.ApiClient(configuration), DEADLINE_S)
    changes = list(cluster.watch(POD, "rl", "", "1"))
    assert [(change.type, change.item["metadata"]["name"]) for change in changes] == [("ADDED", "late")]
