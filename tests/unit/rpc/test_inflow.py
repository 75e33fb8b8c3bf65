"""Many tasks as one iterator: order, end, failure, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from specrl.rpc.inflow import Inflow


async def counting(first: int, count: int, closed: list[int] | None = None) -> AsyncGenerator[int]:
    try:
        for number in range(first, first + count):
            await asyncio.sleep(0)
            yield number
    finally:
        if closed is not None:
            closed.append(first)


async def test_all_that_all_sources_yield_and_each_in_its_order() -> None:
    inflow: Inflow[int] = Inflow()
    for first in (0, 100, 200):
        inflow.add(counting(first, 20))
    found = [item async for item in inflow.items()]
    assert sorted(found) == [*range(20), *range(100, 120), *range(200, 220)]
    for first in (0, 100, 200):
        assert [item for item in found if first <= item < first + 100] == list(range(first, first + 20))


async def test_tasks_may_be_spawned_by_tasks_and_the_last_of_them_ends_it() -> None:
    inflow: Inflow[int] = Inflow()

    async def generation(number: int) -> None:
        await asyncio.sleep(0)
        inflow.put(number)
        if number < 5:
            inflow.spawn(generation(number + 1))

    inflow.spawn(generation(0))
    assert [item async for item in inflow.items()] == [0, 1, 2, 3, 4, 5]


async def test_what_was_there_before_a_failure_comes_first_and_the_others_are_closed() -> None:
    inflow: Inflow[int] = Inflow()
    closed: list[int] = []

    async def failing() -> None:
        inflow.put(-1)
        raise ValueError("broken")

    async def take() -> None:
        async for item in inflow.items():
            found.append(item)  # noqa: PERF401 - what came before the failure counts, too

    inflow.add(counting(0, 1000, closed))
    inflow.spawn(failing())
    found: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        await take()
    assert -1 in found
    assert closed == [0]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_task_that_is_cancelled_by_somebody_else_does_not_go_unseen() -> None:
    inflow: Inflow[int] = Inflow()

    async def cancelled() -> None:
        raise asyncio.CancelledError

    inflow.spawn(asyncio.Event().wait())  # type: ignore[arg-type]  # whose value nobody reads
    inflow.spawn(cancelled())
    with pytest.raises(asyncio.CancelledError):
        await anext(inflow.items())


async def test_whoever_stops_iterating_closes_every_source() -> None:
    inflow: Inflow[int] = Inflow()
    closed: list[int] = []
    for first in (0, 1000):
        inflow.add(counting(first, 500, closed))
    async with aclosing(inflow.items()) as items:
        await anext(items)
    assert sorted(closed) == [0, 1000]
    assert asyncio.all_tasks() == {asyncio.current_task()}
