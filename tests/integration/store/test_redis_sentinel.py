"""With real Sentinels the coordinator's store follows the promotion of a replica after its primary dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.redis_servers import RedisProcess, SentinelProcess, needs_redis, retry_until_success

from specrl.coordinator.ledger import Claim
from specrl.coordinator.ledger.redis_store import RedisStore
from specrl.errors import StoreFailed, StoreInvalid
from specrl.launcher.processes.ports import find_free_port
from specrl.spec.store import RedisStore as Settings
from specrl.spec.store import Secret, Sentinel

pytestmark = needs_redis
Watch = Callable[..., list[SentinelProcess]]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RedisProcess]]:
    """Start a primary and its replica."""
    started = [RedisProcess(tmp_path / name) for name in ("primary", "replica")]
    started[1].replicate(started[0])
    yield started
    for server in started:
        server.kill()


@pytest.fixture
def watch(tmp_path: Path, servers: list[RedisProcess]) -> Iterator[Watch]:
    """Start Sentinels that know each other and both servers."""
    started: list[SentinelProcess] = []

    def begin(count: int, password: str = "") -> list[SentinelProcess]:
        for number in range(count):
            folder = tmp_path / f"sentinel-{number}"
            started.append(SentinelProcess(folder, servers[0], quorum=count // 2 + 1, password=password))
        for one in started:
            one.wait_until_it_knows(replicas=1, sentinels=count - 1)
        return started

    yield begin
    for one in started:
        one.kill()


def a_store(*addresses: str, master_name: str = "main", password: Secret | None = None, acks: int = 0) -> RedisStore:
    sentinel = Sentinel(addresses=addresses, master_name=master_name, password=password)
    return RedisStore(Settings(sentinel=sentinel, timeout_s=2, replica_acks=acks), "run", Claim(run_id="run"))


def test_a_store_follows_a_failover_by_the_sentinels(servers: list[RedisProcess], watch: Watch) -> None:
    sentinels = watch(3)
    primary, replica = servers
    store = a_store(*(one.address for one in sentinels), acks=1)
    store.set_fact("a", 1)
    primary.kill()
    retry_until_success(lambda: store.read_facts().get("a"))
    assert store.read_facts().get("a") == 1, "acknowledged writes are kept"
    with replica.client() as client:
        assert client.info("replication")["role"] == "master"
    primary.start()  # the Sentinels make it a replica, without which no write is confirmed
    retry_until_success(lambda: store.set_fact("a", 2))
    retry_until_success(lambda: store.read_facts().get("a"))
    assert store.read_facts().get("a") == 2
    assert f"main of {sentinels[0].address}" in store.describe()["place"]
    store.close()


def test_an_unreachable_sentinel_is_skipped_and_a_password_is_sent(watch: Watch, tmp_path: Path) -> None:
    (sentinel,) = watch(1, password="watchword")
    file = tmp_path / "password"
    file.write_text("watchword\n")
    away = f"127.0.0.1:{find_free_port()}"
    store = a_store(away, sentinel.address, password=Secret(file=str(file)))
    store.set_fact("a", 1)
    assert store.read_facts().get("a") == 1
    store.close()
    with pytest.raises(StoreInvalid, match=r"username and password must be accepted, got.*"):
        a_store(sentinel.address)
    with pytest.raises(StoreInvalid, match=r"store.redis.sentinel.password must not be empty, got nothing in /"):
        a_store(sentinel.address, password=Secret(file=str(tmp_path / "nowhere")))


def test_sentinels_without_an_answer_are_retried(watch: Watch) -> None:
    (sentinel,) = watch(1)
    away = f"127.0.0.1:{find_free_port()}"
    with pytest.raises(
        StoreFailed, match=rf"no Sentinel of store.redis names a primary: {away}: .*; .* knows no other"
    ):
        a_store(away, sentinel.address, master_name="other")
