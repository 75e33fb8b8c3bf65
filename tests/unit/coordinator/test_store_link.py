"""While the store is unreachable, calls queue behind the failed one, which is retried; writes keep their order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client import REGISTRY
from tests.store_crashes import a_rollout, read_contents

from specrl.coordinator.ledger import SqliteStore
from specrl.coordinator.ledger.store_link import FIRST_WAIT_S, LONGEST_WAIT_S, MAX_TOGETHER_BYTES, StoreLink
from specrl.errors import StoreFailed, StoreInvalid


class AwayStore(SqliteStore):
    """Fails the next `away` calls: before they are applied or, with `answers_are_lost`, after."""

    def __init__(self, path: Path) -> None:
        self.away = 0
        self.answers_are_lost = False
        self.calls: list[str] = []
        super().__init__(path)

    def _execute_statements(self, *statements: Any) -> None:
        self.calls.append(statements[0][0])
        self._fail(lambda: super(AwayStore, self)._execute_statements(*statements))

    def _query_rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        self._fail(lambda: found.extend(super(AwayStore, self)._query_rows(query, *values)))
        return found

    def _fail(self, work: Callable[[], None]) -> None:
        if self.away <= 0:
            work()
            return
        self.away -= 1
        if self.answers_are_lost:
            work()
        raise StoreFailed("the store must answer, got silence; wait")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AwayStore]:
    opened = AwayStore(tmp_path / "store.db")
    yield opened
    opened.close()


class Clock:
    """Replaces sleeping: returns at once and records the seconds."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.has_slept = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.has_slept.set()
        await asyncio.sleep(0)


def retries(run: str) -> float:
    samples = next(metric for metric in REGISTRY.collect() if metric.name == "specrl_coordinator_store_retries").samples
    return sum(s.value for s in samples if s.name.endswith("_total") and s.labels["rljob"] == run)


@pytest.mark.parametrize("answers_are_lost", [False, True])
async def test_a_write_is_retried_until_it_succeeds_and_logged_once(store: AwayStore, answers_are_lost: bool) -> None:
    clock = Clock()
    run = f"lost-{answers_are_lost}"
    link = StoreLink(run, store, clock.sleep)
    store.away = 12
    store.answers_are_lost = answers_are_lost
    with structlog.testing.capture_logs() as logs:
        await link.finish_step(1, {"step": 1})
        await link.set_fact("a", 1)
    assert read_contents(store)["reports"] == [{"step": 1}]
    assert (link.last_trained_step(), link.cached_facts().get("a"), link.outage_reason) == (1, 1, "")
    assert [entry["event"] for entry in logs] == ["store_lost", "store_recovered"]
    assert (link.retry_count, retries(run)) == (12, 12)
    assert clock.slept[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert clock.slept[-1] == LONGEST_WAIT_S == max(clock.slept)
    await link.close()


async def test_calls_queue_behind_a_failed_one_in_order(store: AwayStore) -> None:
    link = StoreLink("run", store, Clock().sleep)
    store.away = 5
    store.calls.clear()
    await asyncio.gather(
        link.set_fact("a", 1), link.put_batch(1, b"batch"), link.set_fact("a", 2), link.finish_step(1, {"step": 1})
    )
    tables = [call.split("into ")[1].split()[0] for call in store.calls]
    assert tables == ["facts"] * 6 + ["batches", "facts", "steps"]
    assert store.read_facts().get("a") == 2
    await link.close()


async def test_rollouts_of_later_steps_stay(store: AwayStore) -> None:
    link = StoreLink("run", store, Clock().sleep)
    rows = [a_rollout(1, 0), a_rollout(1, 1), a_rollout(2, 0)]
    await asyncio.gather(*(link.put_rollout(row) for row in rows))
    await link.finish_step(1, {"step": 1})
    assert await link.read_rollouts() == rows[2:]
    await link.close()


async def test_the_cache_changes_only_after_the_write_is_durable(store: AwayStore) -> None:
    clock = Clock()
    link = StoreLink("run", store, clock.sleep)
    store.away = 10**9
    finishing = asyncio.create_task(link.finish_step(1, {"step": 1}))
    await clock.has_slept.wait()
    assert link.last_trained_step() == 0
    assert link.cached_reports() == []
    assert "got silence" in link.outage_reason
    store.away = 0
    await finishing
    assert (link.last_trained_step(), link.cached_reports(), store.read_last_trained_step()) == (1, [{"step": 1}], 1)
    await link.close()


async def test_rollouts_that_finish_while_the_store_is_busy_are_written_together(store: AwayStore) -> None:
    link = StoreLink("run", store, Clock().sleep)
    store.away = 3
    store.calls.clear()
    rows = [a_rollout(1, index, 0) for index in range(200)]
    await asyncio.gather(*(link.put_rollout(row) for row in rows))
    assert await link.read_rollouts() == rows
    assert len(store.calls) - 3 == 5, "one write of the first rollout, then writes of at most 64"
    await link.close()


async def test_rollouts_that_are_written_together_are_bounded_by_their_bytes(store: AwayStore) -> None:
    """Only their number was bounded. Redis refuses a request of 1 GB, which was repeated for ever."""
    link = StoreLink("run", store, Clock().sleep)
    store.calls.clear()
    shares = [0.1, 0.4, 0.4, 0.4, 1.2, 0.1]  # of a write
    rows = [a_rollout(1, place, data=bytes(int(share * MAX_TOGETHER_BYTES))) for place, share in enumerate(shares)]
    await asyncio.gather(*(link.put_rollout(row) for row in rows))
    assert await link.read_rollouts() == rows
    assert len(store.calls) == 5, "the first alone, two within the limit, one, the one beyond the limit, and the last"
    await link.close()


async def test_a_cancelled_call_lets_the_next_one_run(store: AwayStore) -> None:
    clock = Clock()
    link = StoreLink("run", store, clock.sleep)
    store.away = 10**9
    waiting = [asyncio.create_task(link.set_fact("a", 1)), asyncio.create_task(link.put_rollout(a_rollout()))]
    await clock.has_slept.wait()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    store.away = 0
    await link.put_rollout(a_rollout(index=1))
    assert link.cached_facts().get("a") is None
    assert [row.index for row in store.read_rollouts()] == [0, 1], "both are stored, although one caller was cancelled"
    await link.close()


async def test_a_link_that_stopped_retrying_raises_at_once(store: AwayStore) -> None:
    clock = Clock()
    link = StoreLink("run", store, clock.sleep)
    store.away = 10**9
    link.stop_retrying()
    with pytest.raises(StoreFailed):
        await link.forget_batches(1)
    assert clock.slept == []
    await link.close()


async def test_a_store_that_another_coordinator_claimed_is_not_retried(store: AwayStore, tmp_path: Path) -> None:
    clock = Clock()
    link = StoreLink("run", store, clock.sleep)
    newer = SqliteStore(tmp_path / "store.db")
    for _ in range(2):
        with pytest.raises(StoreInvalid, match="newer coordinator"):
            await link.put_rollout(a_rollout())
    assert clock.slept == []
    newer.close()
    await link.close()


async def test_a_batch_that_was_fixed_before_a_restart_stays(store: AwayStore) -> None:
    store.put_batch(3, b"sent")
    link = StoreLink("run", store, Clock().sleep)
    assert not await link.put_batch(3, b"assembled again")
    assert await link.read_batch(3) == b"sent"
    await link.close()


async def test_the_cache_equals_the_store(store: AwayStore) -> None:
    store.finish_step(1, {"step": 1})
    store.finish_step(2, {"step": 2})
    store.set_fact("a", [1])
    link = StoreLink("run", store, Clock().sleep)
    await link.set_report(1, {"step": 1, "reward": 0.5})
    await link.set_report(7, {"step": 7})
    assert link.cached_reports() == store.read_reports() == [{"step": 1, "reward": 0.5}, {"step": 2}]
    assert link.cached_reports(after=1) == [{"step": 2}]
    assert (link.last_trained_step(), link.cached_facts().get("a"), link.cached_facts().get("b")) == (2, [1], None)
    await link.close()


async def test_the_link_opens_as_soon_as_the_store_is_reachable(tmp_path: Path) -> None:
    clock = Clock()
    attempts = 0

    def open_store() -> SqliteStore:
        nonlocal attempts
        attempts += 1
        if attempts <= 3:
            raise StoreFailed("the store must answer, got refused; wait")
        return SqliteStore(tmp_path / "store.db")

    with structlog.testing.capture_logs() as logs:
        link = await StoreLink.open("run", open_store, clock.sleep)
    assert [entry["event"] for entry in logs] == ["store_lost", "store_recovered"]
    assert clock.slept == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    await link.close()
