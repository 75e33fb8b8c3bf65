"""Many tasks as one iterator: order, end and failure, and that no task is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from specrl.rpc.task_stream import TaskStream


async def counting(first: int, count: int, closed: list[int] | None = None) -> AsyncGenerator[int]:
    try:
        for number in range(first, first + count):
            await asyncio.sleep(0)
            yield number
    finally:
        if closed is not None:
            closed.append(first)


async def test_items_of_all_sources_are_yielded_and_each_source_keeps_its_order() -> None:
    inflow: TaskStream[int] = TaskStream()
    for first in (0, 100, 200):
        inflow.add_source(counting(first, 20))
    found = [item async for item in inflow.iterate_items()]
    assert sorted(found) == [*range(20), *range(100, 120), *range(200, 220)]
    for first in (0, 100, 200):
        assert [item for item in found if first <= item < first + 100] == list(range(first, first + 20))


async def test_tasks_may_spawn_tasks_and_the_last_one_ends_the_stream() -> None:
    inflow: TaskStream[int] = TaskStream()

    async def generation(number: int) -> None:
        await asyncio.sleep(0)
        inflow.put(number)
        if number < 5:
            inflow.spawn_task(generation(number + 1))

    inflow.spawn_task(generation(0))
    assert [item async for item in inflow.iterate_items()] == [0, 1, 2, 3, 4, 5]


async def test_items_before_a_failure_are_yielded_and_other_sources_are_closed() -> None:
    inflow: TaskStream[int] = TaskStream()
    closed: list[int] = []

    async def failing() -> None:
        inflow.put(-1)
        raise ValueError("broken")

    async def take() -> None:
        async for item in inflow.iterate_items():
            found.append(item)  # noqa: PERF401 - items before the failure count, too

    inflow.add_source(counting(0, 1000, closed))
    inflow.spawn_task(failing())
    found: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        await take()
    assert -1 in found
    assert closed == [0]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_cancellation_of_a_task_ends_the_stream() -> None:
    inflow: TaskStream[int] = TaskStream()

    async def cancelled() -> None:
        raise asyncio.CancelledError

    inflow.spawn_task(asyncio.Event().wait())  # type: ignore[arg-type]  # its result is not used
    inflow.spawn_task(cancelled())
    with pytest.raises(asyncio.CancelledError):
        await anext(inflow.iterate_items())


async def test_closing_the_iterator_closes_every_source() -> None:
    inflow: TaskStream[int] = TaskStream()
    closed: list[int] = []
    for first in (0, 1000):
        inflow.add_source(counting(first, 500, closed))
    async with aclosing(inflow.iterate_items()) as items:
        await anext(items)
    assert sorted(closed) == [0, 1000]
    assert asyncio.all_tasks() == {asyncio.current_task()}
