"""Which Redis servers are accepted and which are refused: credentials, ACL, TLS, durability, failover."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Authority
from tests.redis_servers import RedisProcess, needs_redis, redis_settings, retry_until_success
from tests.requirements import REDIS_TLS
from tests.store_crashes import WRITES, a_rollout, read_contents

from specrl.coordinator.ledger import Claim
from specrl.coordinator.ledger.redis_server import RedisServer
from specrl.coordinator.ledger.redis_store import _WRITE, REPLY_BYTES, RedisStore
from specrl.errors import StoreFailed, StoreInvalid
from specrl.launcher.processes.ports import find_free_port
from specrl.spec.store import Durability, Secret, Tls

pytestmark = needs_redis
Start = Callable[..., RedisProcess]

RULE = (
    "+info +config|get +auth +select +ping +eval +hget +hgetall +hlen +hmget +hset +hsetnx +hkeys "
    "+hexists +hdel +exists +sadd +smembers +srem +unlink +wait"
)
"""The ACL of docs/store.md, restricted to the run's keys."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Returns a function that starts servers, which are stopped after the test."""
    started: list[RedisProcess] = []

    def one_more(**options: Any) -> RedisProcess:
        started.append(RedisProcess(tmp_path / f"server-{len(started)}", **options))
        return started[-1]

    yield one_more
    for server in started:
        server.kill()


def a_store(*servers: RedisProcess, **fields: Any) -> RedisStore:
    return RedisStore(redis_settings(*servers, **fields), "run", Claim(run_id="run"))


def everything_works(store: RedisStore) -> None:
    for write in WRITES:
        write(store)
    assert read_contents(store)["trained"] == 2
    store.reset()
    store.close()


# -- credentials and permissions ---------------------------------------------------------------------------------


def test_a_password_comes_from_a_file_or_the_environment(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(requirepass="open sesame")
    file = tmp_path / "password"
    file.write_text("open sesame\n")
    everything_works(a_store(server, password=Secret(file=str(file))))
    monkeypatch.setenv("STORE_PASSWORD", "open sesame")
    everything_works(a_store(server, password=Secret(environment="STORE_PASSWORD")))


def test_a_wrong_or_missing_password_is_refused_at_once_and_never_quoted(start: Start, tmp_path: Path) -> None:
    server = start(requirepass="open sesame")
    file = tmp_path / "password"
    file.write_text("open barley")
    for secret in (Secret(file=str(file)), None):
        with pytest.raises(StoreInvalid, match=r"username and password must be accepted.*correct them") as caught:
            a_store(server, password=secret)
        assert "barley" not in str(caught.value)
    for missing in (Secret(file=str(tmp_path / "nowhere")), Secret(environment="NOT_SET_ANYWHERE")):
        with pytest.raises(
            StoreInvalid, match=r"store.redis.password must not be empty, got nothing in (/|environment)"
        ):
            a_store(server, password=missing)


def test_a_password_can_be_rotated_during_a_run(start: Start, tmp_path: Path) -> None:
    server = start(requirepass="first")
    file = tmp_path / "password"
    file.write_text("first")
    store = a_store(server, password=Secret(file=str(file)))
    admin = server.client(password="first")
    store.set_fact("a", 1)
    admin.config_set("requirepass", "second")
    store._server.disconnect()  # as if the connection had broken
    with pytest.raises(StoreFailed):
        store.set_fact("a", 2)
    file.write_text("second")
    store.set_fact("a", 2)
    assert store.read_facts().get("a") == 2
    store.close()


def test_the_documented_acl_is_sufficient(start: Start, tmp_path: Path) -> None:
    server = start()
    assert RULE in " ".join((Path(__file__).parents[3] / "docs" / "store.md").read_text().split())
    with server.client() as admin:
        user = ("runner", "on", ">pass word", "resetkeys", "~run:*", "-@all")
        admin.execute_command("ACL", "SETUSER", *user, *RULE.split())
    for name, value in (("user", "runner"), ("password", "pass word")):
        (tmp_path / name).write_text(value)
    secrets = {"username": Secret(file=str(tmp_path / "user")), "password": Secret(file=str(tmp_path / "password"))}
    everything_works(a_store(server, **secrets))
    with pytest.raises(StoreInvalid, match=r"username must have the permissions.*docs/store.md"):
        RedisStore(redis_settings(server, **secrets), "another", Claim())
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "runner", "-config|get")
    with pytest.raises(StoreInvalid, match=r"appendfsync=unknown.*\+config\|get"):
        a_store(server, **secrets)


# -- TLS ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a CA with a server and a client certificate, and a second CA."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(folder)
    _ = Authority(folder, "other")
    for name in ("server", "client"):
        authority.sign(name, ["IP:127.0.0.1"])
    return folder


@pytest.mark.needs(REDIS_TLS)
def test_tls_accepts_only_the_configured_authority(start: Start, certificates: Path) -> None:
    port = find_free_port()
    files = {"tls_cert_file": "server.pem", "tls_key_file": "server.key", "tls_ca_cert_file": "ca.pem"}
    server = start(
        tls_port=str(port), tls_auth_clients="no", **{name: str(certificates / file) for name, file in files.items()}
    )
    fields = {"addresses": (f"127.0.0.1:{port}",)}
    everything_works(a_store(server, tls=Tls(ca_file=str(certificates / "ca.pem")), **fields))
    with pytest.raises(StoreInvalid, match=r"certificate that can be verified.*check tls.caFile"):
        a_store(server, tls=Tls(ca_file=str(certificates / "other.pem")), **fields)
    with pytest.raises(StoreInvalid, match=r"readable files, got .*nowhere"):
        a_store(server, tls=Tls(ca_file=str(certificates / "nowhere.pem")), **fields)
    with server.client() as admin:
        admin.config_set("tls-auth-clients", "yes")
    with pytest.raises((StoreFailed, StoreInvalid)):
        a_store(server, tls=Tls(ca_file=str(certificates / "ca.pem")), **fields)
    mine = {"cert_file": str(certificates / "client.pem"), "key_file": str(certificates / "client.key")}
    everything_works(a_store(server, tls=Tls(ca_file=str(certificates / "ca.pem"), **mine), **fields))


# -- durability --------------------------------------------------------------------------------------------------


def test_a_server_that_evicts_is_refused(start: Start) -> None:
    server = start(maxmemory_policy="allkeys-lru")
    with pytest.raises(StoreInvalid, match=r"never evict a key, got maxmemory-policy=allkeys-lru.*noeviction"):
        a_store(server)
    with pytest.raises(StoreInvalid, match="never evict"):
        RedisServer(redis_settings(server)).check_connection()


def test_a_server_that_may_lose_acknowledged_writes_needs_the_run_files_consent(start: Start) -> None:
    forgetful = start(appendonly="no")
    lazy = start(appendfsync="everysec")
    for durability in (Durability.EVERY_WRITE, Durability.EVERY_SECOND):
        with pytest.raises(StoreInvalid, match=r"appendonly=no.*`durability: Volatile`"):
            a_store(forgetful, durability=durability)
    with pytest.raises(StoreInvalid, match=r"appendfsync=everysec.*`durability: EverySecond`"):
        a_store(lazy)
    everything_works(a_store(lazy, durability=Durability.EVERY_SECOND))
    everything_works(a_store(forgetful, durability=Durability.VOLATILE))


def test_a_server_that_is_loading_its_data_is_retried(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "secret")
    slow = {"key_load_delay": "300", "loading_process_events_interval_bytes": "1024"}  # 0.3 ms a write
    server = start(requirepass="secret", **slow)
    store = a_store(server, password=Secret(environment="STORE_PASSWORD"))
    store.set_fact("a", 99)
    with server.client(password="secret") as other, other.pipeline(transaction=False) as pipeline:
        for number in range(8192):  # a loading server handles requests once per 1024 writes
            pipeline.set("other", number)
        pipeline.execute()
    server.kill()
    server.start()
    refusals = []
    deadline = time.monotonic() + 60
    while True:
        try:
            assert store.read_facts().get("a") == 99
            break
        except StoreFailed as error:
            refusals.append(str(error))
            assert time.monotonic() < deadline
    assert any("is loading its data" in refusal for refusal in refusals), refusals
    store.close()


def test_a_server_that_lost_acknowledged_writes_is_refused(start: Start) -> None:
    server = start(appendonly="no")
    store = a_store(server, durability=Durability.VOLATILE)
    store.put_batch(1, b"sent")
    server.kill()
    with pytest.raises(StoreFailed):
        store.read_batch(1)
    server.start()
    for _ in range(2):
        with pytest.raises(StoreInvalid, match="holds no state of the run"):
            store.read_batch(1)  # must raise: None would mean that no batch was put
    store.close()


def test_another_runs_keys_are_refused_and_left_alone(start: Start) -> None:
    server = start()
    first = RedisStore(redis_settings(server), "shared", Claim(run_id="one"))
    first.set_fact("a", 1)
    with pytest.raises(
        StoreInvalid, match=r"unique to this run, got shared:\*, which holds another run's state \(id one\)"
    ):
        RedisStore(redis_settings(server), "shared", Claim(run_id="two"))
    first.set_fact("a", 2)
    first.close()
    with server.client() as other:
        other.hset("theirs:facts", "colour", "green")
    with pytest.raises(StoreInvalid, match="only keys that specrl wrote"):
        RedisStore(redis_settings(server), "theirs", Claim())


DAMAGE = {
    "a fact that is no JSON": ("HSET", "{p}:facts", "a", b"{"),
    "a fact without end": ("HSET", "{p}:facts", "a", b"[" * 100_000),
    "a fact's name that is no text": ("HSET", "{p}:facts", b"\xff", b"1"),
    "a report that is no JSON": ("HSET", "{p}:reports", "1", b"\xff"),
    "a report of no step": ("HSET", "{p}:reports", "first", b"{}"),
    "a batch of no step": ("HSET", "{p}:batches", "first", b""),
    "rollouts of no step": ("SADD", "{p}:steps", "first"),
    "a rollout of no prompt": ("HSET", "{p}:rollouts:2", "0", b"    "),
    "a rollout of no number": ("HSET", "{p}:rollouts:2", "a:b", b"    "),
    "prompts that are none": ("HSET", "{p}:indexes", "2", b"first"),
    "no number of the last step": ("HSET", "{p}:meta", "trained", b"last"),
    "no number of the last write": ("HSET", "{p}:meta", "sequence", b"last"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_data_that_specrl_did_not_write_are_refused(start: Start, damage: Sequence[Any]) -> None:
    server = start()
    store = RedisStore(redis_settings(server), "specrl:test", Claim("run"))
    for write in WRITES:
        write(store)
    command, key, *rest = damage
    with server.client() as client:
        client.execute_command(command, key.format(p="specrl:test"), *rest)
    with pytest.raises(StoreInvalid, match="must hold data that specrl wrote, got"):
        read_contents(store)
    store.close()


def test_all_keys_are_under_the_prefix(start: Start) -> None:
    server = start()
    store = a_store(server)
    for write in WRITES[:6]:
        write(store)
    with server.client() as admin:
        assert {key.decode().split(":")[0] for key in admin.scan_iter()} == {"run"}
        store.reset()
        assert list(admin.scan_iter()) == []
    store.close()


def test_an_unreachable_server_is_retried() -> None:
    with pytest.raises(StoreFailed, match=r"no address of store.redis is a usable primary: 127.0.0.1:\d+"):
        RedisServer(redis_settings(addresses=(f"127.0.0.1:{find_free_port()}",))).check_connection()


def test_a_write_that_arrives_after_newer_ones_is_refused(start: Start) -> None:
    """A hung server may read such a write from the socket of a connection that was closed meanwhile."""
    server = start()
    claim = Claim(run_id="run")
    store = RedisStore(redis_settings(server), "run", claim)
    with server.client() as late:

        def send(number: int, token: str) -> list[bytes]:
            arguments = (token, number, "fact", "value", '"late"')
            found: list[bytes] = late.execute_command("EVAL", _WRITE, len(store._keys), *store._keys, *arguments)
            return found

        store.set_fact("value", "old")
        store.set_fact("value", "new")
        assert send(1, claim.token) == send(2, claim.token) == send(4, claim.token) == [b"number", b"2"]
        assert send(3, "another coordinator's")[0] == b"claimed"
        assert store.read_facts().get("value") == "new"
        assert send(3, claim.token)[0] == b"done", "a write whose answer is lost ..."
    store.set_fact("value", "newest")
    assert store.read_facts().get("value") == "newest", "... does not cost the next write"
    store.close()


def test_no_reply_has_more_than_a_few_large_rollouts(start: Start) -> None:
    """64 rollouts, or all of a prompt, were one reply: more than 1 GB with the experts of long rollouts."""
    server = start()
    with server.client() as admin:  # the server closes the connection for which it holds a larger reply
        admin.config_set("client-output-buffer-limit", f"normal {2 * REPLY_BYTES} 0 0")
    store = a_store(server, timeout_s=30)
    sizes = [1000, REPLY_BYTES // 3, REPLY_BYTES // 2, 3 * REPLY_BYTES // 2, 0, *[REPLY_BYTES // 3] * 3]
    rows = [a_rollout(1, 0, sample, data=bytes([sample]) * size) for sample, size in enumerate(sizes)]
    for row in rows:
        store.put_rollouts([row])
    store.put_batch(1, b"batch", [0])
    assert store.read_rollouts() == rows
    assert store.read_batch_rollouts(1) == [row.data for row in rows]
    names = [b"0:0", b"9:9", b"0:4"]  # the second was deleted since it was listed
    found = store._server.run_on_primary(lambda client: list(store._read_values(client, 1, names)))
    assert [name for name, _ in found] == [b"0:0", b"0:4"]
    store.close()


# -- failover ----------------------------------------------------------------------------------------------------


def test_a_promoted_replica_that_has_every_write_takes_over(start: Start) -> None:
    primary = start()
    standby = start()
    standby.replicate(primary)
    store = a_store(primary, standby, replica_acks=1)
    store.put_batch(1, b"sent")
    primary.kill()
    for _ in range(2):
        with pytest.raises(StoreFailed):
            store.finish_step(1, {"step": 1})
    standby.promote()
    with pytest.raises(StoreFailed, match=r"0 of 1 replicas of the store confirmed a write"):
        store.finish_step(1, {"step": 1})
    primary.start()
    primary.replicate(standby)
    retry_until_success(lambda: store.finish_step(1, {"step": 1}))
    retry_until_success(lambda: store.finish_step(2, {"step": 2}))
    assert (store.read_last_trained_step(), store.read_batch(1)) == (2, b"sent")
    store.close()


def test_the_store_leaves_a_demoted_primary_for_the_new_one(start: Start) -> None:
    first = start()
    second = start()
    second.replicate(first)
    store = a_store(first, second)
    store.set_fact("a", 1)
    with first.client() as admin:
        admin.set("later", 1)  # WAIT is about writes of its own connection, and replication keeps their order
        admin.wait(1, 10_000)
    second.promote()
    first.replicate(second)
    with pytest.raises(StoreFailed):
        store.set_fact("a", 2)  # READONLY, on the old connection
    store.set_fact("a", 2)
    with second.client() as admin:
        assert admin.hget("run:facts", "a") == b"2"
    store.close()


def test_reads_from_a_demoted_primary_are_discarded(start: Start) -> None:
    first = start()
    empty = start()
    store = a_store(first)
    store.put_batch(1, b"sent")
    first.replicate(empty)
    for _ in range(2):
        with pytest.raises(StoreFailed):
            store.read_batch(1)  # on the old connection; None would mean that no batch was put
    store.close()


def test_a_promoted_replica_that_lacks_writes_is_never_used(start: Start) -> None:
    primary = start()
    standby = start()
    standby.replicate(primary)
    store = a_store(primary, standby)
    with primary.client() as admin:
        admin.set("later", 1)  # WAIT is about writes of its own connection, and replication keeps their order
        admin.wait(1, 10_000)
    standby.promote()  # too early: later writes reach only the old primary
    store.put_batch(1, b"sent")
    primary.kill()
    with pytest.raises(StoreFailed):
        store.read_batch(1)  # on the old connection
    for _ in range(2):
        with pytest.raises(StoreFailed, match=r"has lost acknowledged writes"):
            store.read_batch(1)  # the other server may return with the missing writes
    primary.start()
    assert store.read_batch(1) == b"sent", "from the primary with all writes, although both are primaries"
    primary.replicate(standby)
    store._server.disconnect()
    with pytest.raises(StoreInvalid, match=r"lost acknowledged writes: its last is number 0, but 1 was acknowledged"):
        store.read_batch(1)
    store.close()
