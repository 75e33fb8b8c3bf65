"""What a replica's call is to the coordinator's turns, over an engine without a wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

from specrl.generation.engine import Engine
from specrl.records import Rollout, RolloutRequest
from specrl.rpc.clients import Terms
from specrl.rpc.inflow import Inflow


class EngineCall:
    """Implements `turns.Call`. asked: all requests so far."""

    def __init__(self, engine: Engine) -> None:
        self.asked: list[RolloutRequest] = []
        self._engine = engine
        self._rollouts: Inflow[Rollout] = Inflow()
        self._is_over = asyncio.Event()

    def ask(self, requests: Sequence[RolloutRequest], terms: Terms) -> None:
        self.asked += requests
        found = cast(AsyncGenerator[Rollout], self._engine.generate(requests, terms.admit_together))
        self._rollouts.add(found)

    def end(self) -> None:
        self._is_over.set()

    async def rollouts(self) -> AsyncGenerator[Rollout]:
        self._rollouts.spawn(self._until_over())
        async with aclosing(self._rollouts.items()) as rollouts:
            async for rollout in rollouts:
                yield rollout

    async def _until_over(self) -> None:
        await self._is_over.wait()
