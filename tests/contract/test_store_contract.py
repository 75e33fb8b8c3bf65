"""One suite for all stores: writes are durable, trained rollouts are deleted, and a step's first batch is kept.

Also: each write is whole or absent wherever its process dies, a newer claim locks an older one out, and a store that
was stopped for a while has lost nothing.
"""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.redis_servers import RedisProcess, needs_redis, redis_settings
from tests.small_disk import mount_small_disk
from tests.store_crashes import WRITES, a_rollout, list_points, open_store_at, read_contents

from specrl.coordinator.ledger import REPORTS_KEPT, SCHEMA_VERSION, Claim, SqliteStore, Store, redis_store, sqlite_store
from specrl.coordinator.ledger.redis_store import RedisStore
from specrl.errors import StoreFailed, StoreInvalid

REPOSITORY = Path(__file__).parents[2]
GROUPS = [(index, sample) for index in range(3) for sample in range(2)]
"""(index, sample) of each rollout of a step with three prompts and two rollouts each."""


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A Redis server that no test stops or reconfigures. Each test uses its own key prefix."""
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@dataclass
class Place:
    """The location of one test's store, and functions to open it."""

    kind: str
    folder: Path
    server: RedisProcess | None = None
    opened: list[Store] = field(default_factory=list)

    def open(self, claim: Claim | None = None) -> Store:
        """Open to write, as a coordinator that starts does."""
        if self.server is None:
            store: Store = SqliteStore(self.folder / "store.db", claim)
        else:
            store = RedisStore(redis_settings(self.server, timeout_s=10), self.prefix, claim or Claim(run_id="run"))
        self.opened.append(store)
        return store

    def read(self) -> Store:
        """Open to read, as the command line does."""
        if self.server is None:
            store: Store = SqliteStore(self.folder / "store.db", is_reader=True)
        else:
            store = RedisStore(redis_settings(self.server, timeout_s=10), self.prefix, None)
        self.opened.append(store)
        return store

    def room(self) -> tuple[int, int]:
        """Rows, or entries of all keys but those about the claim; and bytes of the file's pages, or of the keys."""
        if self.server is None:
            with closing(sqlite3.connect(self.folder / "store.db")) as other:
                counted = "(select count(*) from facts) + (select count(*) from rollouts) "
                counted += "+ (select count(*) from batches) + (select count(*) from steps)"
                (rows,) = other.execute(f"select {counted}").fetchone()
                (pages,) = other.execute("pragma page_count").fetchone()
                (of_bytes,) = other.execute("pragma page_size").fetchone()
            return rows, pages * of_bytes
        with self.server.client() as other:
            keys = sorted(other.scan_iter(match=f"{self.prefix}:*"))
            hashes = [key for key in keys if other.type(key) == b"hash" and not key.endswith(b":meta")]
            return sum(other.hlen(key) for key in hashes), sum(other.memory_usage(key, samples=0) for key in keys)

    @property
    def prefix(self) -> str:
        return f"test:{self.folder.parent.name}:{self.folder.name}"


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    server = request.getfixturevalue("redis_server") if request.param == "redis" else None
    found = Place(request.param, tmp_path, server)
    yield found
    for store in found.opened:
        store.close()


# -- content -----------------------------------------------------------------------------------------------------


def test_writes_survive_a_restart(place: Place) -> None:
    store = place.open()
    store.put_rollouts([a_rollout(sample=1, data=b"\x00\xff")])
    store.put_batch(1, b"batch")
    store.set_fact("validations", [{"reward": 0.5}])
    store.close()
    again = place.open()
    assert again.read_rollouts() == [a_rollout(sample=1, data=b"\x00\xff")]
    assert again.read_batch(1) == b"batch"
    assert again.read_facts().get("validations") == [{"reward": 0.5}]


def test_rollouts_are_read_in_stream_order(place: Place) -> None:
    store = place.open()
    for key in [(2, 0, 0), (10, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 0)]:
        store.put_rollouts([a_rollout(*key)])
    order = [(r.step, r.index, r.sample) for r in store.read_rollouts()]
    assert order == [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (10, 0, 0)]


def test_each_of_many_rollouts_is_read_once(place: Place) -> None:
    store = place.open()
    wanted = [a_rollout(1, index, sample, data=bytes(200)) for index in range(60) for sample in range(16)]
    store.put_rollouts(wanted)
    assert store.read_rollouts() == wanted


def test_finishing_a_step_deletes_its_rollouts_and_keeps_its_batch(place: Place) -> None:
    store = place.open()
    store.put_rollouts([a_rollout(step=0), a_rollout(step=1), a_rollout(step=2)])
    store.put_batch(1, b"batch")
    store.finish_step(1, {"step": 1})
    assert [r.step for r in store.read_rollouts()] == [2]
    assert store.read_last_trained_step() == 1
    assert store.read_batch(1) == b"batch"
    assert store.list_batch_steps() == [1]
    store.forget_batches(1)
    assert store.read_batch(1) is None
    assert store.list_batch_steps() == []


def test_rollouts_that_a_batch_names_are_kept_with_it(place: Place) -> None:
    store = place.open()
    for key in [(1, 0, 1), (1, 0, 0), (1, 1, 0), (1, 11, 0), (2, 0, 0)]:
        store.put_rollouts([a_rollout(*key, data=repr(key).encode())])
    store.put_batch(1, b"batch", [11, 0])
    named = [b"(1, 11, 0)", b"(1, 0, 0)", b"(1, 0, 1)"]
    assert [(r.step, r.index) for r in store.read_rollouts()] == [(1, 0), (1, 0), (1, 1), (1, 11), (2, 0)], (
        "not trained yet"
    )
    assert store.read_batch_rollouts(1) == named, "in the order of its indexes, then samples"
    store.finish_step(1, {"step": 1})
    assert [(r.step, r.index) for r in store.read_rollouts()] == [(2, 0)]
    assert store.count_rollouts() == {2: 1}
    store.finish_step(2, {"step": 2})
    again = place.open()
    assert again.read_batch_rollouts(1) == named
    assert again.read_rollouts() == []
    again.forget_batches(1)
    assert again.read_batch_rollouts(1) == []
    assert again.read_rollouts() == []


def test_rollouts_of_later_steps_are_kept(place: Place) -> None:
    store = place.open()
    for key in [(0, 7), (1, 0), (1, 1), (1, 11), (2, 1), (11, 1)]:
        store.put_rollouts([a_rollout(*key)])
    store.finish_step(1, {"step": 1})
    store = place.open()
    assert [(r.step, r.index) for r in store.read_rollouts()] == [(2, 1), (11, 1)]
    store.finish_step(2, {"step": 2})
    assert [(r.step, r.index) for r in store.read_rollouts()] == [(11, 1)]


def test_the_first_batch_of_a_step_is_never_replaced(place: Place) -> None:
    store = place.open()
    assert store.put_batch(1, b"sent"), "this content is certainly the stored one"
    assert not store.put_batch(1, b"assembled again after a restart")
    assert store.read_batch(1) == b"sent"


def test_rollouts_are_counted_by_step(place: Place) -> None:
    store = place.open()
    assert store.count_rollouts() == {}
    store.put_rollouts([a_rollout(*key) for key in [(2, 0, 0), (10, 0, 0), (2, 1, 1), (2, 1, 1)]])
    assert list(store.count_rollouts().items()) == [(2, 2), (10, 1)]
    assert place.read().count_rollouts() == {2: 2, 10: 1}


def test_the_size_does_not_grow_with_the_number_of_steps(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows or keys, and of bytes, is equal at the same point of every checkpoint period.

    SQLite's file keeps the pages that were freed, and uses them again; its log is left out, which is copied into the
    file when it is as long as the constant says.
    """
    for module in (sqlite_store, redis_store):
        monkeypatch.setattr(module, "REPORTS_KEPT", 20)
    store = place.open()
    took: dict[int, tuple[int, int]] = {}
    for step in range(1, 401):
        store.put_rollouts([a_rollout(step, index, sample, data=os.urandom(2000)) for index, sample in GROUPS])
        store.put_batch(step, os.urandom(1000), [0, 1])
        store.finish_step(step, {"step": step, "words": "w" * 500})
        store.set_report(step, {"step": step, "words": "w" * 600})
        store.set_fact("validations", [{"reward": 0.5}])
        if step % 5 == 0:
            store.forget_batches(step)
            took[step] = place.room()
    rows, size_bytes = took[40]
    assert rows == 1 + 20, "one fact and the newest reports"
    assert {rows_then for step, (rows_then, _) in took.items() if step >= 40} == {rows}
    assert max(bytes_then for _, bytes_then in took.values()) < 1.25 * size_bytes
    assert store.read_rollouts() == []


def test_putting_a_slot_again_replaces_it(place: Place) -> None:
    store = place.open()
    store.put_rollouts([a_rollout(data=b"old")])
    store.put_rollouts([a_rollout(attempt=1, data=b"new")])
    assert store.read_rollouts() == [a_rollout(attempt=1, data=b"new")]


def test_reports_can_be_completed_later(place: Place) -> None:
    store = place.open()
    store.finish_step(1, {"step": 1})
    store.finish_step(2, {"step": 2})
    store.set_report(1, {"step": 1, "reward": 0.5})
    store.set_report(3, {"step": 3})
    assert store.read_reports() == [{"step": 1, "reward": 0.5}, {"step": 2}], "a step that is not trained has no report"
    assert store.read_reports(after=1) == [{"step": 2}]
    assert store.read_last_trained_step() == 2


def test_reports_of_old_steps_are_deleted(place: Place) -> None:
    store = place.open()
    for step in (1, 2, 3, REPORTS_KEPT + 2):
        store.finish_step(step, {"step": step})
    assert [report["step"] for report in store.read_reports()] == [3, REPORTS_KEPT + 2]
    assert store.read_last_trained_step() == REPORTS_KEPT + 2


def test_an_unknown_fact_is_none_and_a_new_store_has_trained_nothing(place: Place) -> None:
    store = place.open()
    assert store.read_facts().get("nothing") is None
    assert store.read_facts() == {}
    assert store.read_last_trained_step() == 0
    assert store.read_batch(1) is None
    assert store.read_rollouts() == []


def test_every_write_is_idempotent(place: Place) -> None:
    store = place.open()
    for write in WRITES:
        write(store)
        once = read_contents(store)
        write(store)
        assert read_contents(store) == once


def test_reset_deletes_everything(place: Place) -> None:
    store = place.open()
    for write in WRITES[:5]:
        write(store)
    store.reset()
    store.close()
    assert read_contents(place.open(Claim(run_id="another"))) == {
        "facts": {},
        "rollouts": [],
        "batches": {},
        "reports": [],
        "trained": 0,
    }


_STEPS = st.integers(0, 4)
_CALLS = st.one_of(
    st.tuples(st.just("set_fact"), st.sampled_from("ab"), st.integers()),
    st.tuples(
        st.just("put_rollouts"),
        st.lists(
            st.builds(a_rollout, _STEPS, st.integers(0, 2), st.integers(0, 1), st.integers(0, 300), st.binary()),
            min_size=1,
        ),
    ),
    st.tuples(
        st.just("put_batch"),
        _STEPS,
        st.binary(),
        st.lists(st.integers(0, 2), max_size=3, unique=True),
    ),
    st.tuples(st.just("finish_step"), _STEPS, st.builds(lambda step: {"step": step}, _STEPS)),
    st.tuples(st.just("set_report"), _STEPS, st.builds(lambda step: {"late": step}, _STEPS)),
    st.tuples(st.just("forget_batches"), _STEPS),
)


@needs_redis
@settings(max_examples=60)
@given(calls=st.lists(_CALLS, max_size=30))
def test_both_stores_have_the_same_content_after_the_same_calls(
    redis_server: RedisProcess, calls: list[tuple[str, Any]]
) -> None:
    claim = Claim()
    stores = [SqliteStore(Path(":memory:")), RedisStore(redis_settings(redis_server), claim.token, claim)]
    for name, *arguments in calls:
        for store in stores:
            getattr(store, name)(*arguments)
    contents = [read_contents(store) for store in stores]
    for store in stores:
        store.close()
    assert contents[0] == contents[1]


# -- processes that are killed -----------------------------------------------------------------------------------


def states(folder: Path) -> list[dict[str, Any]]:
    """Return the store's content after 0, 1, 2, ... of the writes."""
    store = SqliteStore(folder / "model.db")
    found = [read_contents(store)]
    for write in WRITES:
        write(store)
        found.append(read_contents(store))
    store.close()
    return found


def test_a_writer_that_is_killed_leaves_each_write_whole_or_absent(place: Place, tmp_path: Path) -> None:
    where = str(tmp_path) if place.server is None else place.server.address
    command = [sys.executable, "-m", "tests.store_crashes", place.kind, where]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)
    after = states(tmp_path)
    for point, number, moment in list_points():
        store = open_store_at(place.kind, where, point)
        found = read_contents(store)
        allowed = {
            "before": [after[number]],
            "within": [after[number], after[number + 1]],
            "after": [after[number + 1]],
        }
        assert found in allowed[moment], f"a process killed {point}"
        if place.kind == "sqlite" and moment == "within":
            assert found == after[number], "a transaction that was not committed is not there"
        for write in WRITES[number:]:  # a restarted coordinator repeats what was not acknowledged
            write(store)
        assert read_contents(store) == after[-1], f"going on from {point}"
        store.close()


def put_until_it_fails(store: Store, first: int, data: Callable[[int], bytes]) -> int:
    """Put four rollouts at a time until the store fails. Returns the number of the write that was not acknowledged."""
    for index in range(first, first + 100_000):
        try:
            store.put_rollouts([a_rollout(1, index, sample, data=data(index)) for sample in range(4)])
        except StoreFailed:
            return index
    raise AssertionError("the store never failed")


@needs_redis
def test_a_redis_server_that_is_killed_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path)
    dice = random.Random(1)  # noqa: S311 - when to kill is no secret
    acknowledged = 0
    claim = Claim()
    try:
        for _ in range(5):
            store = RedisStore(redis_settings(server), "run", claim)
            killer = threading.Timer(dice.uniform(0.02, 0.3), server.kill)
            killer.start()
            acknowledged = put_until_it_fails(store, acknowledged, lambda _: bytes(2000))
            killer.join()
            server.start()
            found = store.read_rollouts()
            assert len(found) in (4 * acknowledged, 4 * acknowledged + 4), "the last one was applied or not, and whole"
            acknowledged = len(found) // 4
            store.close()
    finally:
        server.kill()
    assert acknowledged > 5


# -- claims ------------------------------------------------------------------------------------------------------


def test_a_newer_claim_locks_the_older_coordinator_out(place: Place) -> None:
    older = place.open()
    older.put_batch(1, b"mine")
    newer = place.open(Claim(run_id="run", owner="the other one"))
    for write in WRITES:
        with pytest.raises((StoreInvalid, StoreFailed)):
            write(older)
    with pytest.raises(StoreInvalid, match=r"claimed by the other one.*newer coordinator has taken the run over"):
        older.set_fact("still", "here")
    assert read_contents(newer)["batches"] == {1: (b"mine", [])}
    assert newer.read_facts() == {}
    newer.set_fact("goes", "on")


def test_a_coordinator_cannot_write_after_a_reset(place: Place) -> None:
    running = place.open()
    store = place.open()
    store.reset()
    for _ in range(2):
        with pytest.raises((StoreInvalid, StoreFailed)):
            running.put_batch(1, b"late")
    assert place.open().list_batch_steps() == []


def test_claiming_twice_with_one_token_changes_nothing(place: Place) -> None:
    claim = Claim(run_id="run")
    first = place.open(claim)
    first.set_fact("a", 1)
    place.open(claim)
    first.set_fact("a", 2)
    assert first.read_facts().get("a") == 2


def test_readers_neither_claim_nor_write(place: Place) -> None:
    store = place.open()
    WRITES[0](store)
    reader = place.read()
    assert read_contents(reader) == read_contents(store)
    assert reader.describe()["kind"] == place.kind
    with pytest.raises((StoreInvalid, StoreFailed)):
        reader.set_fact("a", 1)
    store.set_fact("a", 2)
    assert reader.read_facts().get("a") == 2
    assert reader.describe()["claimedBy"] == store.describe()["claimedBy"] is not None


# -- foreign and damaged data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_store_of_another_schema_is_refused(place: Place, other: int) -> None:
    store = place.open()
    store.set_fact("a", 1)
    store.close()
    if place.server is None:
        with sqlite3.connect(place.folder / "store.db") as connection:
            connection.execute(f"pragma user_version={other}")
        connection.close()
    else:
        with place.server.client() as client:
            client.hset(f"{place.prefix}:meta", "schema", other)
    for open_it in (place.open, place.read):
        with pytest.raises(StoreInvalid, match=f"schema version.*got {other}.*use the version of specrl that wrote it"):
            open_it()


def test_a_file_that_is_not_a_store_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_text("this is not a database, whatever its name says" * 100)
    with pytest.raises(StoreInvalid, match=r"store\.db"):
        SqliteStore(path)


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as other:
        other.execute("create table recipes (name text)")
    other.close()
    with pytest.raises(StoreInvalid, match="tables recipes"):
        SqliteStore(path)
    with sqlite3.connect(path) as other:
        assert [row[0] for row in other.execute("select name from sqlite_master")] == ["recipes"]
    other.close()


@pytest.mark.parametrize(
    "damage",
    [
        "insert into facts values ('a', '{')",
        "insert into facts values ('a', '" + "[" * 100_000 + "')",
        "insert into steps values (1, '')",
    ],
    ids=["a fact", "a fact without end", "a report"],
)
def test_a_file_with_malformed_data_is_refused(tmp_path: Path, damage: str) -> None:
    store = SqliteStore(tmp_path / "store.db", Claim())
    store._connection.execute(damage)
    with pytest.raises(StoreInvalid, match=r"must hold data that specrl wrote, got .* in .*store\.db"):
        read_contents(store)
    store.close()


# -- temporary failures ------------------------------------------------------------------------------------------


def a_stopped_write_is_absent_and_works_later(store: Store, stop: Callable[[], None], go: Callable[[], None]) -> None:
    """Check that a write to the stopped store raises StoreFailed and changes nothing, and succeeds afterwards."""
    store.put_rollouts([a_rollout(1, 0, 0)])
    before = read_contents(store)
    stop()
    for _ in range(2):
        with pytest.raises(StoreFailed):
            store.put_rollouts([a_rollout(1, 1, sample, data=bytes(100_000)) for sample in range(20)])
    go()
    assert read_contents(store) == before
    store.put_rollouts([a_rollout(1, 1, sample, data=bytes(100_000)) for sample in range(20)])
    store.finish_step(1, {"step": 1})
    assert store.read_last_trained_step() == 1


def test_a_full_disk_stops_sqlite_until_there_is_space(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    connection = store._connection

    def limit(pages: int) -> None:
        connection.execute(f"pragma max_page_count={pages}")

    a_stopped_write_is_absent_and_works_later(store, lambda: limit(10), lambda: limit(1_000_000))
    store.close()


def test_a_lock_of_another_process_stops_sqlite_until_it_is_gone(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    store._connection.execute("pragma busy_timeout=50")
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    a_stopped_write_is_absent_and_works_later(
        store, lambda: other.execute("begin exclusive") and None, lambda: other.execute("rollback") and None
    )
    other.close()
    store.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisProcess]:
    """A Redis server that belongs to one test, which may stop or reconfigure it."""
    server = RedisProcess(tmp_path / "own", enable_protected_configs="yes")  # one test moves the snapshot
    yield server
    server.kill()


@needs_redis
def test_a_full_redis_server_stops_the_run_until_there_is_memory(own_server: RedisProcess) -> None:
    store = RedisStore(redis_settings(own_server), "run", Claim())
    admin = own_server.client()
    a_stopped_write_is_absent_and_works_later(
        store, lambda: admin.config_set("maxmemory", 1) and None, lambda: admin.config_set("maxmemory", 0) and None
    )
    store.close()


@needs_redis
def test_finishing_a_step_works_on_a_full_server_and_frees_memory(own_server: RedisProcess) -> None:
    store = RedisStore(redis_settings(own_server), "run", Claim())
    admin = own_server.client()
    store.put_rollouts([a_rollout(1, index, 0, data=bytes(100_000)) for index in range(2)])
    store.put_batch(1, b"batch", [0])
    store.put_batch(2, b"batch of failed prompts")

    def sizes() -> int:
        return sum(admin.memory_usage(key, samples=0) for key in admin.keys("run:*"))

    admin.config_set("maxmemory", 1)
    used = [sizes()]
    for write in (lambda: store.finish_step(1, {"step": 1}), lambda: store.forget_batches(1)):
        write()
        used.append(sizes())
    assert (store.read_rollouts(), store.read_last_trained_step()) == ([], 1)
    assert used[0] - used[1] > 80_000, "the rollout that no batch names"
    assert used[1] - used[2] > 80_000, "the rollout that the deleted batch named"
    store.finish_step(2, {"step": 2})
    store.forget_batches(2)
    assert (store.list_batch_steps(), store.read_last_trained_step()) == ([], 2), "although this freed nothing"
    store.close()


@needs_redis
def test_a_server_that_cannot_save_stops_redis_until_it_can(own_server: RedisProcess) -> None:
    """The server answers MISCONF after a failed snapshot. A folder at the snapshot's path makes the snapshot fail."""
    store = RedisStore(redis_settings(own_server), "run", Claim())
    admin = own_server.client()

    def save_until(status: str) -> None:
        deadline = time.monotonic() + 30
        while admin.info("persistence")["rdb_last_bgsave_status"] != status:
            assert time.monotonic() < deadline
            if not admin.info("persistence")["rdb_bgsave_in_progress"]:
                admin.bgsave()
            time.sleep(0.05)

    def stop() -> None:
        (own_server.folder / "occupied").mkdir()
        admin.config_set("dbfilename", "occupied")
        admin.config_set("save", "3600 1")
        save_until("err")

    def go() -> None:
        admin.config_set("dbfilename", "dump.rdb")
        save_until("ok")

    a_stopped_write_is_absent_and_works_later(store, stop, go)
    store.close()


@needs_redis
def test_a_redis_server_on_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """With `appendfsync always` a server that cannot write its log exits, and loses no acknowledged write."""
    with mount_small_disk(tmp_path / "disk", "4m") as disk:
        server = RedisProcess(disk)
        store = RedisStore(redis_settings(server), "run", Claim())
        count = put_until_it_fails(store, 0, lambda _: os.urandom(30_000))
        server.wait_for_end()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True, timeout=30)
        server.start()
        assert len(store.read_rollouts()) in (4 * count, 4 * count + 4)
        store.put_rollouts([a_rollout(1, 100_000, 0)])
        store.close()
        server.kill()


@needs_redis
def test_a_server_that_hangs_times_out_and_its_late_writes_are_refused(own_server: RedisProcess) -> None:
    store = RedisStore(redis_settings(own_server, timeout_s=1), "run", Claim())
    store.set_fact("value", 0)
    own_server.pause()
    began = time.monotonic()
    with pytest.raises(StoreFailed):
        store.set_fact("value", 1)  # stays in the server's socket, and may be executed when the server resumes
    assert time.monotonic() - began < 30
    own_server.resume()
    store.set_fact("value", 2)
    time.sleep(0.2)
    assert store.read_facts().get("value") == 2
    store.close()
