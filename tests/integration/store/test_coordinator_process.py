"""The coordinator process waits for its store at the start, reports an outage, and can be stopped meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from tests.redis_servers import RedisProcess, needs_redis
from tests.run_files import a_model_folder, a_run

from specrl.launcher import run_directory
from specrl.launcher.processes.ports import find_free_port
from specrl.launcher.run_directory import RunDirectory
from specrl.spec import parse_spec

pytestmark = needs_redis
PATIENCE_S = 120.0  # generous, because the machine may be busy


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    started = RedisProcess(tmp_path / "redis", find_free_port(), requirepass="secret")
    yield started
    started.kill()


@pytest.fixture
def directory(tmp_path: Path, server: RedisProcess) -> RunDirectory:
    a_model_folder(tmp_path / "model")
    where = {"redis": {"addresses": [server.address], "timeoutS": 1, "password": {"environment": "STORE_PASSWORD"}}}
    spec = parse_spec(a_run(tmp_path, store=where, telemetry={"heartbeatS": 1}))
    return run_directory.create_run(tmp_path / "runs", spec)


def start(directory: RunDirectory) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specrl.coordinator.main", "--run-directory", str(directory.path)]
    return subprocess.Popen(
        command,
        env=os.environ | {"STORE_PASSWORD": "secret", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the coordinator did not come so far: {process.communicate()[0]}")
        time.sleep(0.05)


def ready(directory: RunDirectory) -> tuple[int, str]:
    address = json.loads(directory.endpoints_file.read_text())["http"]
    answer = httpx2.get(f"{address}/readyz", verify=False, timeout=PATIENCE_S, trust_env=False)  # no TLS here
    return answer.status_code, answer.json()["detail"]


def test_a_coordinator_reports_a_lost_store_and_recovers(directory: RunDirectory, server: RedisProcess) -> None:
    process = start(directory)
    try:
        until(directory.endpoints_file.exists, process)
        assert (directory.path / "store-id").read_text().strip()
        server.kill()
        until(lambda: ready(directory)[1].startswith("waiting for the store"), process)
        assert ready(directory)[0] == 503
        server.start()
        until(lambda: ready(directory)[1].startswith("waiting for the trainer"), process)
        server.kill()
        until(lambda: ready(directory)[1].startswith("waiting for the store"), process)
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert output.count("store_lost") == 2, "once per outage, not per attempt"
    assert "secret" not in output.replace("store_lost", "")


def test_a_coordinator_waits_for_its_store_and_can_be_stopped(directory: RunDirectory, server: RedisProcess) -> None:
    server.kill()
    process = start(directory)
    lines: list[str] = []
    assert process.stdout is not None
    while not any("store_lost" in line for line in lines):
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert not directory.endpoints_file.exists()


def test_a_coordinator_with_the_wrong_password_fails_at_once(directory: RunDirectory, server: RedisProcess) -> None:
    with server.client(password="secret") as admin:
        admin.config_set("requirepass", "another")
    process = start(directory)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "username and password must be accepted" in output) == (2, True), output
