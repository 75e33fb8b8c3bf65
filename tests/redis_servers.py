"""Real Redis servers and Sentinels. Tests can stop, kill and restart them with the same data."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from tests.e2e.binaries import find
from tests.requirements import REDIS

from specrl.errors import StoreFailed
from specrl.launcher.processes.ports import find_free_port
from specrl.spec.store import RedisStore

needs_redis = pytest.mark.needs(REDIS)
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


class RedisProcess:
    """One redis-server process with its own folder and port."""

    def __init__(self, folder: Path, port: int | None = None, **options: str) -> None:
        """options: settings of the server, with `_` instead of `-`. They override DURABLE."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port or find_free_port()
        self._options = DURABLE | {name.replace("_", "-"): value for name, value in options.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server, which loads its data from disk, and wait until its socket listens."""
        listening = {"port": str(self.port)} | {"bind": "127.0.0.1", "dir": str(self.folder), "save": ""}
        settings = [word for name, value in (listening | self._options).items() for word in (f"--{name}", value)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([find("redis-server"), *settings], stdout=log, stderr=log)
        port = int(self._options.get("tls-port", self.port))
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                log_text = (self.folder / "server.log").read_text()
                assert self._process.poll() is None, log_text
                assert time.monotonic() < deadline, log_text
                time.sleep(0.01)
        if "tls-port" not in self._options and "requirepass" not in self._options:
            while self.client().info("persistence")["loading"]:
                time.sleep(0.01)

    def kill(self) -> None:
        """Kill the server with SIGKILL, as a crash of its machine would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the server with SIGSTOP: connections stay open, but it answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wait_for_end(self, timeout_s: float = 30.0) -> None:
        """Wait until the server exits by itself."""
        assert self._process is not None
        self._process.wait(timeout_s)
        self._process = None

    def client(self, **options: Any) -> redis.Redis:
        """Make a client for the test. It never retries."""
        return a_client(self.port, **options)

    def replicate(self, primary: RedisProcess) -> None:
        """Become a replica of `primary`, and wait until it is synchronised."""
        with self.client() as client:
            client.replicaof("127.0.0.1", primary.port)
            deadline = time.monotonic() + 30
            while client.info("replication")["master_link_status"] != "up":
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def promote(self) -> None:
        """Become a primary."""
        with self.client() as client:
            client.replicaof("NO", "ONE")


class SentinelProcess:
    """One redis-sentinel. It watches `primary` as `main`, and fails over when `quorum` Sentinels miss it for 2 s."""

    def __init__(self, folder: Path, primary: RedisProcess, quorum: int, password: str = "") -> None:
        folder.mkdir(parents=True)
        self.port = find_free_port()
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"sentinel monitor main 127.0.0.1 {primary.port} {quorum}",
            "sentinel down-after-milliseconds main 2000",
            "sentinel failover-timeout main 5000",
        ]
        file = folder / "sentinel.conf"
        file.write_text("\n".join([*lines, f"requirepass {password}"] if password else lines) + "\n")
        with (folder / "sentinel.log").open("ab") as log:
            self._process = subprocess.Popen([find("redis-server"), str(file), "--sentinel"], stdout=log, stderr=log)
        self._password = password

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait_until_it_knows(self, replicas: int, sentinels: int, timeout_s: float = 60.0) -> None:
        """Wait until the Sentinel has found this number of replicas and of other Sentinels."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = {}
            try:
                with a_client(self.port, password=self._password or None) as client:
                    found = client.sentinel_master("main")
                if (found["num-slaves"], found["num-other-sentinels"]) == (replicas, sentinels):
                    return
            except redis.ConnectionError:
                pass
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def a_client(port: int, **options: Any) -> redis.Redis:
    """Make a client for the test. It never retries."""
    return redis.Redis(
        host="127.0.0.1",
        port=port,
        protocol=2,
        socket_timeout=10,
        retry=Retry(NoBackoff(), 0),
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        **options,
    )


def retry_until_success(work: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Retry `work` while it raises StoreFailed, as the coordinator's link to its store does."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            work()
            return
        except StoreFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def redis_settings(*servers: RedisProcess, **fields: Any) -> RedisStore:
    """Return the run file's settings for these servers, with a timeout of one second."""
    return RedisStore(**({"addresses": tuple(server.address for server in servers), "timeout_s": 1} | fields))
