"""A stand-in for a replica's Generate call: requests go to an engine in this process, without gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

from specrl.generation.engine import Engine
from specrl.records import Rollout, RolloutRequest
from specrl.rpc.clients import GenerateOptions
from specrl.rpc.task_stream import TaskStream


class EngineCall:
    """Implements `replica_session.Call`. asked: all requests that it was given."""

    def __init__(self, engine: Engine) -> None:
        self.asked: list[RolloutRequest] = []
        self._engine = engine
        self._rollouts: TaskStream[Rollout] = TaskStream()
        self._is_over = asyncio.Event()

    def request_rollouts(self, requests: Sequence[RolloutRequest], options: GenerateOptions) -> None:
        self.asked += requests
        found = cast(AsyncGenerator[Rollout], self._engine.generate(requests, options.admit_together))
        self._rollouts.add_source(found)

    def close_requests(self) -> None:
        self._is_over.set()

    async def receive_rollouts(self) -> AsyncGenerator[Rollout]:
        self._rollouts.spawn_task(self._until_over())
        async with aclosing(self._rollouts.iterate_items()) as rollouts:
            async for rollout in rollouts:
                yield rollout

    async def _until_over(self) -> None:
        await self._is_over.wait()
