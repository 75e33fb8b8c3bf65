"""The command of a job's own store, run with a real server as the container's shell runs it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import redis
from tests.redis_servers import needs_redis
from tests.unit.operator.builders import ClusterFacts, a_job, plan_job

from specrl.launcher.processes.ports import find_free_port
from specrl_operator.children.pods import STORE_PASSWORD, build_store_pod

START_S = 30.0


@needs_redis
def test_the_store_asks_for_the_password_which_is_not_in_its_command_line(tmp_path: Path) -> None:
    """M16: everybody on the node could read it there."""
    (container,) = build_store_pod(plan_job(a_job(), ClusterFacts()))["spec"]["containers"]
    port = find_free_port()
    arguments = [str(tmp_path) if word == "/data" else word for word in container["args"]]
    command = [*container["command"], *arguments, "--port", str(port), "--bind", "127.0.0.1"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | {STORE_PASSWORD: "s3cret-_"}, stdout=log, stderr=log)
    try:
        client = redis.Redis(port=port, password="s3cret-_")
        deadline = time.monotonic() + START_S
        while True:
            try:
                assert client.ping()
                break
            except redis.ConnectionError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)
        assert client.config_get("appendfsync")["appendfsync"] == "always"
        for wrong in (None, "other"):
            try:
                redis.Redis(port=port, password=wrong).ping()
                raise AssertionError("a client without the password was admitted")
            except redis.AuthenticationError:
                pass
        assert b"s3cret" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
    finally:
        server.terminate()
        server.wait(START_S)
