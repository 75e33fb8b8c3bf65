"""If its store fails, a run waits, loses nothing, trains nothing twice, and can be stopped.

Each test drives a whole run in one event loop, as tests/integration/coordinator does. The store is a real SQLite file
or a real Redis server.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from tests.integration.coordinator.small_run import Run, a_spec
from tests.integration.coordinator.test_loop import check_promises
from tests.redis_servers import RedisProcess, needs_redis, redis_settings

from specrl.coordinator.ledger import Claim, SqliteStore, sqlite_store
from specrl.coordinator.ledger.redis_store import RedisStore
from specrl.coordinator.main import _run_until_stopped
from specrl.coordinator.observe.web.app import make_app
from specrl.errors import StoreInvalid
from specrl.formats.reports import Phase


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RedisProcess]]:
    started = [RedisProcess(tmp_path / name) for name in ("first", "second")]
    yield started
    for server in started:
        server.kill()


def on_redis(folder: Path, *servers: RedisProcess, **fields: int) -> Run:
    """Make a small run with its state in Redis. Each of its coordinators makes a new claim."""
    spec = a_spec(folder)
    return Run(
        folder,
        spec,
        open_store=lambda _: RedisStore(redis_settings(*servers, **fields), "small", Claim(run_id="small")),
    )


@asynccontextmanager
async def page(run: Run) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(make_app(run.context, run.observer))
    async with httpx2.AsyncClient(transport=transport, base_url="http://coordinator") as client:
        yield client


async def nothing_advances_while_away(run: Run) -> None:
    """Check that readiness is false, the status has the reason, and no step is trained."""
    await run.until(lambda: bool(run.link.outage_reason))
    trained = run.link.last_trained_step()
    sent = len(run.trained)
    async with page(run) as client:
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["detail"][:21]) == (503, "waiting for the store")
        assert (await client.get("/healthz")).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'specrl_coordinator_store_reachable{rljob="small"} 0.0' in metrics
    await asyncio.sleep(0.7)
    assert run.link.last_trained_step() == trained
    assert len(run.trained) <= sent + 1, "at most the batch that was sent before"
    assert not run.running.done()


async def ends_well(run: Run) -> None:
    await run.finish()
    check_promises(run)
    assert run.link.retry_count > 0
    async with page(run) as client:
        assert (await client.get("/readyz")).status_code == 200


@needs_redis
async def test_a_run_on_redis_survives_restarts_of_all_processes(tmp_path: Path, servers: list[RedisProcess]) -> None:
    async with on_redis(tmp_path, servers[0]) as run:
        await run.until(lambda: run.link.last_trained_step() >= 1)
        await run.restart_trainer()
        await run.until(lambda: run.link.last_trained_step() >= 2)
        await run.restart_coordinator()
        await run.until(lambda: run.link.last_trained_step() >= 3)
        await run.restart_replica("gen-0")
        await run.finish()
        check_promises(run)
        assert run.store.list_batch_steps() == [5, 6], (
            "since the previous checkpoint, to which the trainer may fall back"
        )


@needs_redis
async def test_a_restarted_redis_server_costs_only_time(tmp_path: Path, servers: list[RedisProcess]) -> None:
    async with on_redis(tmp_path, servers[0]) as run:
        await run.until(lambda: run.link.last_trained_step() >= 2)
        servers[0].kill()
        await nothing_advances_while_away(run)
        await asyncio.to_thread(servers[0].start)
        await ends_well(run)


@needs_redis
async def test_a_redis_server_that_hangs_costs_only_time(tmp_path: Path, servers: list[RedisProcess]) -> None:
    async with on_redis(tmp_path, servers[0]) as run:
        await run.until(lambda: run.link.last_trained_step() >= 2)
        servers[0].pause()
        await nothing_advances_while_away(run)
        servers[0].resume()
        await ends_well(run)


@needs_redis
async def test_a_full_redis_server_costs_only_time(tmp_path: Path, servers: list[RedisProcess]) -> None:
    admin = servers[0].client()
    async with on_redis(tmp_path, servers[0]) as run:
        await run.until(lambda: run.link.last_trained_step() >= 2)
        admin.config_set("maxmemory", 1)
        await nothing_advances_while_away(run)
        admin.config_set("maxmemory", 0)
        await ends_well(run)


@needs_redis
async def test_a_failover_to_a_complete_replica_costs_only_time(tmp_path: Path, servers: list[RedisProcess]) -> None:
    primary, standby = servers
    standby.replicate(primary)
    async with on_redis(tmp_path, *servers) as run:
        await run.until(lambda: run.link.last_trained_step() >= 2)
        with primary.client() as admin:
            # Writes are paused, so that the replica has all acknowledged writes when it is promoted.
            admin.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            assert admin.execute_command("WAIT", 1, 10_000) == 1
        primary.kill()
        await nothing_advances_while_away(run)
        standby.promote()
        await ends_well(run)
        with standby.client() as admin:
            assert admin.hget("small:meta", "trained") == b"6"


async def test_a_locked_sqlite_file_costs_only_time(tmp_path: Path) -> None:
    def impatient(folder: Path) -> SqliteStore:
        store = SqliteStore(folder / "store.db")
        store._connection.execute("pragma busy_timeout=50")
        return store

    async with Run(tmp_path, a_spec(tmp_path), open_store=impatient) as run:
        await run.until(lambda: run.link.last_trained_step() >= 2)
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None, timeout=30)
        other.execute("begin immediate")
        await nothing_advances_while_away(run)
        other.execute("rollback")
        other.close()
        await ends_well(run)


async def test_a_full_disk_under_sqlite_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "PAGE_BYTES", 4096)  # with larger pages so small a run would not need more disk
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.link.last_trained_step() >= 2)
        limit = "pragma max_page_count={}"
        with run.store._turn:  # type: ignore[attr-defined]
            run.store._connection.execute(limit.format(1))  # type: ignore[attr-defined]
            run.store._connection.execute("vacuum")  # type: ignore[attr-defined]
        await nothing_advances_while_away(run)
        with run.store._turn:  # type: ignore[attr-defined]
            run.store._connection.execute(limit.format(1_000_000))  # type: ignore[attr-defined]
        await ends_well(run)


@needs_redis
async def test_a_run_can_be_stopped_without_its_store_and_resumed(tmp_path: Path, servers: list[RedisProcess]) -> None:
    async with on_redis(tmp_path, servers[0]) as run:
        run.running.cancel()  # replaced by the coordinator process' own loop handling
        await asyncio.gather(run.running, return_exceptions=True)
        stop = asyncio.Event()
        driving = asyncio.create_task(_run_until_stopped(run.loop, stop, None))
        await run.until(lambda: run.link.last_trained_step() >= 2)
        servers[0].kill()
        await run.until(lambda: bool(run.link.outage_reason))
        stop.set()
        async with asyncio.timeout(30):
            await driving
        assert run.observer.build_status().phase is Phase.STOPPED
        servers[0].start()
        await run.restart_coordinator()
        await run.finish()
        check_promises(run)


async def test_the_older_of_two_coordinators_of_a_run_ends(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.link.last_trained_step() >= 2)
        newer = SqliteStore(tmp_path / "store.db")
        with pytest.raises(StoreInvalid, match="newer coordinator has taken the run over"):
            await run.finish()
        newer.close()
        await run.restart_coordinator()
        await run.finish()
        check_promises(run)
