"""The programs of `helm test`, run as in their pods."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tests.integration.chart.rendering import pods, render

ANSWERS = {"/healthz": b"ok\n", "/metrics": b"specrl_operator_is_leader 1.0\n", "/other": b"up 1.0\n"}


class Server(HTTPServer):
    """Closes the first connections without an answer."""

    refusals = 0

    def verify_request(self, request: object, client_address: object) -> bool:
        self.refusals -= 1
        return self.refusals < 0


class Operator(BaseHTTPRequestHandler):
    """Answers like the operator."""

    def do_GET(self) -> None:
        found = ANSWERS.get(self.path)
        self.send_response(200 if found else 503)
        self.end_headers()
        self.wfile.write(found or b"a watch hangs\n")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Operator)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(("name", "broken"), [("healthz", "/elsewhere"), ("metrics", "/other")])
def test_the_charts_tests_fail_if_the_operator_does_not_answer(name: str, broken: str, address: str) -> None:
    (container,) = pods(render())[f"Pod/specrl-test-{name}"]["containers"]
    assert container["command"] == ["python", "-c"]
    program, url, want = container["args"]
    service = "http://specrl-operator.specrl-system:8080"
    path = f"/{name}"
    assert url == service + path
    assert run(program, address + path, want).returncode == 0
    assert run(program, address + broken, want).returncode != 0


def test_the_charts_tests_wait_until_a_network_policy_lets_them_through(server: Server, address: str) -> None:
    """The first try came before the policy's rules had the new pod's address, and `helm test` failed."""
    (container,) = pods(render())["Pod/specrl-test-healthz"]["containers"]
    program, _, want = container["args"]
    server.refusals = 2
    done = run(program, f"{address}/healthz", want)
    assert done.returncode == 0, done.stderr


def test_the_rljob_test_is_valid_python_and_sends_the_smallest_job() -> None:
    (container,) = pods(render())["Pod/specrl-test-rljob"]["containers"]
    compile(container["args"][0], "rljob", "exec")
    assert "dryRun=All" in container["args"][0]
    assert '"kind":"RLJob"' in container["args"][1]
