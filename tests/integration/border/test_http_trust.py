"""Which HTTPS servers our own HTTP calls trust. Real handshakes on loopback; a refused server never sees a token."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx2
import pytest
from tests.certificates import Authority

from specrl.coordinator.requests.rljob_api import RLJobReference
from specrl.errors import RunInvalid
from specrl.launcher.coordinator_client import CoordinatorReports, request_run_action
from specrl.launcher.run_directory import RunDirectory
from specrl.rpc import run_token

UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"


@dataclass
class Served:
    """An HTTPS server on loopback; `seen` are the paths that it was asked for."""

    port: int
    seen: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """As older clusters have them: Python 3.13 by itself would refuse it."""
    return Authority(tmp_path_factory.mktemp("ours"), has_key_usage=False)


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("another"))


@pytest.fixture
def server(request: pytest.FixtureRequest, ours: Authority) -> Iterator[Served]:
    """With a certificate of our authority for this address; the parameter is another name."""
    ours.sign("server", [getattr(request, "param", "IP:127.0.0.1")])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.folder / "server.pem", ours.folder / "server.key")
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"run": "tiny", "phase": "training"}')

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        Thread(target=http.serve_forever, daemon=True).start()
        yield Served(http.server_port, seen)
        http.shutdown()


def install(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> None:
    """Have this machine trust an authority, by its store and by the environment."""
    paths = ssl.get_default_verify_paths()._replace(openssl_cafile=str(authority.file), cafile=str(authority.file))
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))


def place_at(server: Served, folder: Path, authority: Authority) -> RLJobReference:
    """The API server, and the account of a pod that trusts `authority`."""
    (folder / "token").write_text("secret")
    (folder / "ca.crt").write_bytes(authority.file.read_bytes())
    return RLJobReference("team-a", "tiny", server.url, folder)


async def test_an_api_server_of_the_pod_s_authority_is_trusted(server: Served, ours: Authority, tmp_path: Path) -> None:
    """With Python 3.13, too, whose default flags refuse authorities without key usage, as this one is."""
    answer = await place_at(server, tmp_path, ours).call_api("GET", "specrl.dev/v1", {})
    assert (answer["run"], server.seen) == ("tiny", ["/apis/specrl.dev/v1"])


async def test_an_api_server_of_another_authority_is_refused_even_if_the_machine_trusts_it(
    server: Served, ours: Authority, another: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, ours)
    with pytest.raises(httpx2.ConnectError, match=UNTRUSTED):
        await place_at(server, tmp_path, another).call_api("GET", "specrl.dev/v1", {})
    assert server.seen == []


@pytest.mark.parametrize("server", ["DNS:elsewhere"], indirect=True)
async def test_an_api_server_with_a_certificate_for_another_name_is_refused(
    server: Served, ours: Authority, tmp_path: Path
) -> None:
    with pytest.raises(httpx2.ConnectError, match=r"not valid for '127\.0\.0\.1'"):
        await place_at(server, tmp_path, ours).call_api("GET", "specrl.dev/v1", {})
    assert server.seen == []


def test_the_launcher_refuses_https_whatever_the_machine_trusts(
    server: Served, ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It speaks plain HTTP to its own machine. httpx2 by itself would trust what the machine's store holds."""
    install(monkeypatch, ours)
    with httpx2.Client(trust_env=False) as trusting:
        assert trusting.get(server.url).status_code == 200, "the machine trusts it"
    server.seen.clear()
    directory = RunDirectory(tmp_path)
    run_token.write_token(tmp_path)
    directory.endpoints_file.write_text(json.dumps({"http": server.url}))
    with directory.lock(), pytest.raises(RunInvalid, match=UNTRUSTED):
        request_run_action(directory, "POST", "/pause")
    with CoordinatorReports(server.url) as reports:
        assert reports.fetch_status() is None
    assert server.seen == []
