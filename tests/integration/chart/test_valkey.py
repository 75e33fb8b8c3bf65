"""The chart's shared store starts with the chart's arguments, and the coordinator's store accepts it.

Runs redis-server, which has the same arguments, or a Valkey if redis-server is not installed.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from tests.e2e.binaries import find
from tests.integration.chart.rendering import ROOT, pods, render
from tests.redis_servers import a_client, needs_redis

from specrl.coordinator.ledger.redis_server import RedisServer
from specrl.launcher.processes.ports import find_free_port
from specrl.spec.store import Durability, RedisStore, Secret


@needs_redis
def test_documented_users_and_the_charts_arguments_make_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render("--set", "valkey.enabled=true,valkey.existingSecret=store-users")
    (container,) = pods(objects)["StatefulSet/specrl-valkey"]["containers"]
    port = find_free_port()
    users = tmp_path / "users.acl"
    users.write_text(acl_of_the_documents("sesame"))
    here = {"/data": str(tmp_path), "/etc/valkey/users.acl": str(users), "6379": str(port)}
    arguments = [here.get(word, word) for word in container["args"]]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([find("redis-server"), "--bind", "127.0.0.1", *arguments], stdout=log, stderr=log)
    try:
        wait_for(port, server, tmp_path / "log")
        monkeypatch.setenv("STORE_PASSWORD", "sesame")
        monkeypatch.setenv("STORE_USER", "specrl")
        settings = RedisStore(
            addresses=(f"127.0.0.1:{port}",),
            username=Secret(environment="STORE_USER"),
            password=Secret(environment="STORE_PASSWORD"),
            durability=Durability.EVERY_WRITE,
            timeout_s=10,
        )
        RedisServer(settings).check_connection()
        with a_client(port) as stranger, pytest.raises(Exception, match=r"(?i)noauth|authentication"):
            stranger.ping()
    finally:
        server.kill()
        server.wait()


def acl_of_the_documents(password: str) -> str:
    """Return the file that docs/deploy.md tells users to write."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("user ")]
    assert len(lines) == 2
    return "\n".join(lines).replace("PASSWORD", password) + "\n"


def wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with a_client(port) as client:
                client.ping()
            return
        except Exception as error:  # noqa: BLE001 - until it answers, with whatever refusal
            if "auth" in str(error).lower():
                return
        assert server.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
        time.sleep(0.05)
