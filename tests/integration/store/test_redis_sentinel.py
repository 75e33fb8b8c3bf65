"""Real Sentinels: they name the servers, promote one when the primary dies, and the coordinator's store goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.redis_servers import RedisProcess, SentinelProcess, free_port, needs_redis

from specrl.coordinator.store import Claim
from specrl.coordinator.store.redis_store import RedisStore
from specrl.errors import StoreFailed, StoreInvalid
from specrl.spec.store import RedisStore as Settings
from specrl.spec.store import Secret, Sentinel

pytestmark = needs_redis
Watch = Callable[..., list[SentinelProcess]]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RedisProcess]]:
    """A primary and its replica."""
    started = [RedisProcess(tmp_path / name) for name in ("primary", "replica")]
    started[1].follow(started[0])
    yield started
    for server in started:
        server.kill()


@pytest.fixture
def watch(tmp_path: Path, servers: list[RedisProcess]) -> Iterator[Watch]:
    """Starts Sentinels that know each other and both servers."""
    started: list[SentinelProcess] = []

    def begin(count: int, password: str = "") -> list[SentinelProcess]:
        for number in range(count):
            folder = tmp_path / f"sentinel-{number}"
            started.append(SentinelProcess(folder, servers[0], quorum=count // 2 + 1, password=password))
        for one in started:
            one.until_it_knows(replicas=1, sentinels=count - 1)
        return started

    yield begin
    for one in started:
        one.kill()


def a_store(*addresses: str, master_name: str = "main", password: Secret | None = None, acks: int = 0) -> RedisStore:
    sentinel = Sentinel(addresses=addresses, master_name=master_name, password=password)
    return RedisStore(Settings(sentinel=sentinel, timeout_s=2, replica_acks=acks), "run", Claim(run_id="run"))


def until_it_succeeds(work: Callable[[], object], timeout_s: float = 120.0) -> None:
    """As the coordinator's link to its store does."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            work()
            return
        except StoreFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_a_store_goes_on_where_the_sentinels_moved_it(servers: list[RedisProcess], watch: Watch) -> None:
    sentinels = watch(3)
    primary, replica = servers
    store = a_store(*(one.address for one in sentinels), acks=1)
    store.set_fact("a", 1)
    primary.kill()
    until_it_succeeds(lambda: store.fact("a"))
    assert store.fact("a") == 1, "what was acknowledged is there"
    with replica.client() as client:
        assert client.info("replication")["role"] == "master"
    primary.start()  # which the Sentinels make a replica: without one no write counts
    until_it_succeeds(lambda: store.set_fact("a", 2))
    until_it_succeeds(lambda: store.fact("a"))
    assert store.fact("a") == 2
    assert f"main of {sentinels[0].address}" in store.describe()["place"]
    store.close()


def test_a_sentinel_that_is_away_is_passed_over_and_one_with_a_password_is_given_it(
    watch: Watch, tmp_path: Path
) -> None:
    (sentinel,) = watch(1, password="watchword")
    file = tmp_path / "password"
    file.write_text("watchword\n")
    away = f"127.0.0.1:{free_port()}"
    store = a_store(away, sentinel.address, password=Secret(file=str(file)))
    store.set_fact("a", 1)
    assert store.fact("a") == 1
    store.close()
    with pytest.raises(StoreInvalid, match=r"must let the coordinator in.*"):
        a_store(sentinel.address)
    with pytest.raises(StoreInvalid, match=r"store.redis.sentinel.password must be there, got nothing in /"):
        a_store(sentinel.address, password=Secret(file=str(tmp_path / "nowhere")))


def test_sentinels_that_are_away_or_know_no_such_primary_are_waited_for(watch: Watch) -> None:
    (sentinel,) = watch(1)
    away = f"127.0.0.1:{free_port()}"
    with pytest.raises(StoreFailed, match=rf"sentinel must name the primary, got {away}: .*; .* knows no other"):
        a_store(away, sentinel.address, master_name="other")
