"""A replica takes draft costs from the coordinator instead of measuring them. vLLM is a stand-in here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from specrl.coordinator.members.draft_costs import DraftCostTables
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.service import CoordinatorService
from specrl.generation.vllm_backend import draft_length_client
from specrl.records import Sampling
from specrl.rpc.server import start_server
from specrl.rpc.shared_costs import CoordinatorCosts

KEY = "0123456789abcdef01234567"
COSTS = {"nodes": [1], "seconds": {"-1": [0.01], "1": [0.02]}}
MEASURED = {"nodes": [1], "seconds": {"-1": [0.03], "1": [0.04]}}


class StandInCore:
    """An engine core without batch sizes to measure. It takes `COSTS` and no other table."""

    def __init__(self) -> None:
        self.engine_core = self
        self.calls: list[str] = []

    async def call_utility_async(self, _method: str, name: str, argument: Any = None) -> Any:
        self.calls.append(name)
        return {"take_costs": argument == COSTS, "nodes": [], "end_calibration": MEASURED}[name]


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorCosts]:
    """A coordinator without a folder, and a replica's way to it."""
    service = CoordinatorService(Registry("digest", 1.0, lambda: 0.0), "run", 1.0, draft_costs=DraftCostTables())
    server, port = await start_server(service.add_to, "127.0.0.1", 0)
    yield CoordinatorCosts(f"127.0.0.1:{port}")
    await server.stop(None)


async def calibrate(shared: CoordinatorCosts, folder: Path) -> tuple[list[str], list[str]]:
    """Calibrate a replica whose cache folder is `folder`; returns its calls of the scheduler and its log events."""
    core = StandInCore()
    with structlog.testing.capture_logs() as events:
        await draft_length_client.calibrate_costs(core, folder / f"{KEY}.json", Sampling(8), shared)
    return core.calls, [event["event"] for event in events]


async def test_the_second_replica_of_a_kind_measures_nothing(coordinator: CoordinatorCosts, tmp_path: Path) -> None:
    """Once every pod measured its costs anew: 5 to 12 seconds of a GPU at each start."""
    assert await calibrate(coordinator, tmp_path / "first") == (["nodes", "end_calibration"], ["draft_costs_measured"])
    assert await coordinator.find_costs(KEY) == MEASURED
    await coordinator.keep_costs(KEY, COSTS)  # a table that the stand-in takes
    assert await calibrate(coordinator, tmp_path / "second") == (["take_costs"], ["draft_costs_read"])
    assert json.loads((tmp_path / "second" / f"{KEY}.json").read_text()) == COSTS


async def test_costs_of_this_machines_cache_are_shared(coordinator: CoordinatorCosts, tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.json").write_text(json.dumps(COSTS))
    assert await calibrate(coordinator, tmp_path) == (["take_costs"], ["draft_costs_read"])
    assert await coordinator.find_costs(KEY) == COSTS


async def test_costs_of_another_engine_are_measured_anew(coordinator: CoordinatorCosts, tmp_path: Path) -> None:
    await coordinator.keep_costs(KEY, {"nodes": []})
    calls, events = await calibrate(coordinator, tmp_path)
    assert calls == ["take_costs", "nodes", "end_calibration"]
    assert events == ["draft_costs_ignored", "draft_costs_measured"]
    assert await coordinator.find_costs(KEY) == MEASURED


async def test_a_coordinator_that_does_not_answer_costs_a_measurement(tmp_path: Path) -> None:
    calls, events = await calibrate(CoordinatorCosts("127.0.0.1:1"), tmp_path)
    assert calls == ["nodes", "end_calibration"]
    assert events == ["draft_costs_not_shared", "draft_costs_not_shared", "draft_costs_measured"]
