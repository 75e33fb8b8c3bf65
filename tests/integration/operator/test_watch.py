"""A watch over a real connection: one on which nothing happens is no broken one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import kubernetes
import pytest

from specrl_operator.api import POD
from specrl_operator.kube import KubeCluster

DEADLINE_S, SILENCE_S = 0.5, 2.0


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Says nothing for longer than a request may take, then that a pod was added."""

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


def test_watch_outlives_a_silence_that_is_longer_than_the_deadline_of_a_request(server: ThreadingHTTPServer) -> None:
    configuration = kubernetes.client.Configuration()
    configuration.host = f"http://127.0.0.1:{server.server_port}"
    cluster = KubeCluster(kubernetes.client.ApiClient(configuration), DEADLINE_S)
    changes = list(cluster.watch(POD, "rl", "", "1"))
    assert [(change.what, change.item["metadata"]["name"]) for change in changes] == [("ADDED", "late")]
