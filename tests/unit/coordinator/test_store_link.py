"""A store that is away stops everything behind it, is asked again in bounded time, and gets each write in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client import REGISTRY
from tests.store_crashes import a_rollout, content

from specrl.coordinator.store import SqliteStore
from specrl.coordinator.store_link import FIRST_WAIT_S, LONGEST_WAIT_S, StoreLink
from specrl.errors import StoreFailed, StoreInvalid


class AwayStore(SqliteStore):
    """Away for the next `away` calls: each fails before it is applied or, with `answers_are_lost`, after it was."""

    def __init__(self, path: Path) -> None:
        self.away, self.answers_are_lost = 0, False
        self.calls: list[str] = []
        super().__init__(path)

    def _write(self, *statements: Any) -> None:
        self.calls.append(statements[0][0])
        self._fail(lambda: super(AwayStore, self)._write(*statements))

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        self._fail(lambda: found.extend(super(AwayStore, self)._read(query, *values)))
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
    """Sleeps no time, and remembers how long it was asked to."""

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
async def test_a_write_is_repeated_until_it_is_done_and_logged_once(store: AwayStore, answers_are_lost: bool) -> None:
    clock, run = Clock(), f"lost-{answers_are_lost}"
    link = StoreLink(run, store, clock.sleep)
    store.away, store.answers_are_lost = 12, answers_are_lost
    with structlog.testing.capture_logs() as logs:
        await link.finish_step(1, {"step": 1})
        await link.set_fact("a", 1)
    assert content(store)["reports"] == [{"step": 1}]
    assert (link.trained(), link.fact("a"), link.away_because) == (1, 1, "")
    assert [entry["event"] for entry in logs] == ["store_lost", "store_found"]
    assert (link.retries, retries(run)) == (12, 12)
    assert clock.slept[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert clock.slept[-1] == LONGEST_WAIT_S == max(clock.slept)
    await link.close()


async def test_all_calls_wait_behind_the_one_that_fails_and_keep_their_order(store: AwayStore) -> None:
    link = StoreLink("run", store, Clock().sleep)
    store.away = 5
    store.calls.clear()
    await asyncio.gather(
        link.set_fact("a", 1), link.put_batch(1, b"batch"), link.set_fact("a", 2), link.finish_step(1, {"step": 1})
    )
    tables = [call.split("into ")[1].split()[0] for call in store.calls]
    assert tables == ["facts"] * 6 + ["batches", "facts", "steps"]
    assert store.fact("a") == 2
    await link.close()


async def test_rollouts_of_overtaken_prompts_stay(store: AwayStore) -> None:
    link = StoreLink("run", store, Clock().sleep)
    rows = [a_rollout(1, 0), a_rollout(1, 1), a_rollout(2, 0)]
    await asyncio.gather(*(link.put_rollout(row) for row in rows))
    await link.finish_step(1, {"step": 1}, [(1, 1)])
    assert await link.rollouts() == rows[1:]
    await link.close()


async def test_nothing_is_remembered_before_it_is_durable(store: AwayStore) -> None:
    clock = Clock()
    link = StoreLink("run", store, clock.sleep)
    store.away = 10**9
    finishing = asyncio.create_task(link.finish_step(1, {"step": 1}))
    await clock.has_slept.wait()
    assert link.trained() == 0
    assert link.reports() == []
    assert "got silence" in link.away_because
    store.away = 0
    await finishing
    assert (link.trained(), link.reports(), store.trained()) == (1, [{"step": 1}], 1)
    await link.close()


async def test_rollouts_that_finish_while_the_store_is_busy_are_written_together(store: AwayStore) -> None:
    link = StoreLink("run", store, Clock().sleep)
    store.away = 3
    store.calls.clear()
    rows = [a_rollout(1, index, 0) for index in range(200)]
    await asyncio.gather(*(link.put_rollout(row) for row in rows))
    assert await link.rollouts() == rows
    assert len(store.calls) - 3 == 5, "the one that came first, and the others in writes of at most 64"
    await link.close()


async def test_a_cancelled_wait_leaves_the_turn_to_the_next(store: AwayStore) -> None:
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
    assert link.fact("a") is None
    assert [row.index for row in store.rollouts()] == [0, 1], "finished is finished, whoever waited for it"
    await link.close()


async def test_given_up_it_waits_no_longer(store: AwayStore) -> None:
    clock = Clock()
    link = StoreLink("run", store, clock.sleep)
    store.away = 10**9
    link.give_up()
    with pytest.raises(StoreFailed):
        await link.forget_batches(1)
    assert clock.slept == []
    await link.close()


async def test_a_store_that_another_coordinator_claimed_is_not_waited_for(store: AwayStore, tmp_path: Path) -> None:
    clock = Clock()
    link = StoreLink("run", store, clock.sleep)
    newer = SqliteStore(tmp_path / "store.db")
    for _ in range(2):
        with pytest.raises(StoreInvalid, match="newer coordinator"):
            await link.put_rollout(a_rollout())
    assert clock.slept == []
    newer.close()
    await link.close()


async def test_a_batch_that_was_fixed_before_a_restart_is_the_batch(store: AwayStore) -> None:
    store.put_batch(3, b"sent")
    link = StoreLink("run", store, Clock().sleep)
    assert not await link.put_batch(3, b"assembled again")
    assert await link.batch(3) == b"sent"
    await link.close()


async def test_what_is_remembered_is_what_the_store_holds(store: AwayStore) -> None:
    store.finish_step(1, {"step": 1})
    store.finish_step(2, {"step": 2})
    store.set_fact("a", [1])
    link = StoreLink("run", store, Clock().sleep)
    await link.set_report(1, {"step": 1, "reward": 0.5})
    await link.set_report(7, {"step": 7})
    assert link.reports() == store.reports() == [{"step": 1, "reward": 0.5}, {"step": 2}]
    assert link.reports(after=1) == [{"step": 2}]
    assert (link.trained(), link.fact("a"), link.fact("b")) == (2, [1], None)
    await link.close()


async def test_it_is_opened_as_soon_as_it_is_there(tmp_path: Path) -> None:
    clock, attempts = Clock(), 0

    def open_store() -> SqliteStore:
        nonlocal attempts
        attempts += 1
        if attempts <= 3:
            raise StoreFailed("the store must answer, got refused; wait")
        return SqliteStore(tmp_path / "store.db")

    with structlog.testing.capture_logs() as logs:
        link = await StoreLink.open("run", open_store, clock.sleep)
    assert [entry["event"] for entry in logs] == ["store_lost", "store_found"]
    assert clock.slept == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    await link.close()
