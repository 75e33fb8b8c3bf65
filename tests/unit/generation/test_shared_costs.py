"""A replica begins with draft costs of other runs, and keeps its own. vLLM is a stand-in here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.vllm_cases import a_spec

from specrl.coordinator.members.draft_costs import DraftCostTables
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.service import CoordinatorService
from specrl.generation.draft_lengths.controller import DraftLengthController
from specrl.generation.vllm_backend import draft_length_client
from specrl.rpc.server import start_server
from specrl.rpc.shared_costs import CoordinatorCosts

KEY = "0123456789abcdef01234567"
COSTS = {"nodes": [1], "seconds": {"-1": [0.01], "1": [0.02]}}
LEARNT = {"nodes": [1], "seconds": {"-1": [0.03], "1": [None]}}


class StandInCore:
    """An engine core that takes `COSTS` and no other table, and reports `costs`."""

    def __init__(self, costs: dict[str, Any], events: list[dict[str, Any]] | None = None) -> None:
        self.engine_core = self
        self.errored = False  # read before each report; True ends the poller
        self.calls: list[str] = []
        self._report = DraftLengthController(1, (-1, 1)).build_report() | {"costs": costs, "events": events or []}

    async def call_utility_async(self, _method: str, name: str, argument: Any = None) -> Any:
        self.calls.append(name)
        self.errored = name == "report"  # one is enough
        return {"take_costs": argument == COSTS, "report": self._report}[name]


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorCosts]:
    """A coordinator without a folder, and a replica's way to it."""
    service = CoordinatorService(Registry("digest", 1.0, lambda: 0.0), "run", 1.0, draft_costs=DraftCostTables())
    server, port = await start_server(service.add_to, "127.0.0.1", 0)
    yield CoordinatorCosts(f"127.0.0.1:{port}")
    await server.stop(None)


async def seed(shared: CoordinatorCosts, folder: Path) -> tuple[list[str], list[str]]:
    """Start a replica whose cache folder is `folder`; returns its calls of the scheduler and its log events."""
    core = StandInCore(LEARNT)
    with structlog.testing.capture_logs() as events:
        await draft_length_client.seed_costs(core, folder / f"{KEY}.json", shared)
    return core.calls, [event["event"] for event in events]


async def test_a_replica_begins_with_the_costs_of_another_one(coordinator: CoordinatorCosts, tmp_path: Path) -> None:
    assert await seed(coordinator, tmp_path) == ([], []), "and measures nothing if there are none"
    await coordinator.keep_costs(KEY, COSTS)
    assert await seed(coordinator, tmp_path) == (["take_costs"], ["draft_costs_read"])


async def test_the_cache_of_the_machine_comes_first(coordinator: CoordinatorCosts, tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.json").write_text(json.dumps(COSTS))
    await coordinator.keep_costs(KEY, {"nodes": []})
    assert await seed(coordinator, tmp_path) == (["take_costs"], ["draft_costs_read"])


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"nodes": [1], "seconds": {"-1": [0'])
async def test_a_file_that_cannot_be_used_is_ignored(
    coordinator: CoordinatorCosts, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / f"{KEY}.json").write_bytes(content)
    await coordinator.keep_costs(KEY, COSTS)
    assert await seed(coordinator, tmp_path) == (["take_costs"], ["draft_costs_ignored", "draft_costs_read"])


async def test_costs_of_another_engine_are_ignored(coordinator: CoordinatorCosts, tmp_path: Path) -> None:
    await coordinator.keep_costs(KEY, {"nodes": []})
    assert await seed(coordinator, tmp_path) == (["take_costs"], ["draft_costs_ignored"])


async def test_a_coordinator_that_does_not_answer_delays_no_start(tmp_path: Path) -> None:
    assert await seed(CoordinatorCosts("127.0.0.1:1"), tmp_path) == ([], ["draft_costs_not_shared"])


async def poll(core: StandInCore, file: Path, shared: CoordinatorCosts | None) -> list[str]:
    """Poll reports until the core has given one, and close; returns the log events."""
    with structlog.testing.capture_logs() as events, pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_length_client, "REPORT_S", 0.0)
        poller = draft_length_client.ReportPoller(core, "gen-0", file, shared)
        await poller._task
        poller.close()
    return [event["event"] for event in events if event["log_level"] != "debug"]


async def test_costs_are_saved_and_shared_now_and_then(
    coordinator: CoordinatorCosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_length_client, "SAVE_S", 0.0)
    file = tmp_path / "new" / f"{KEY}.json"
    assert await poll(StandInCore(LEARNT), file, coordinator) == []
    assert await coordinator.find_costs(KEY) == json.loads(file.read_text()) == LEARNT


async def test_costs_are_saved_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / f"{KEY}.json"
    await poll(StandInCore({"nodes": [1], "seconds": {"-1": [None], "1": [None]}}), file, None)
    assert not file.exists(), "nothing was learnt"
    await poll(StandInCore(LEARNT), file, None)
    assert json.loads(file.read_text()) == LEARNT


async def test_costs_that_cannot_be_saved_and_seeds_that_were_wrong_are_logged(tmp_path: Path) -> None:
    (tmp_path / "occupied").touch()
    wrong = [{"kind": "costs_contradicted", "batch": 4, "length": 2}]
    found = await poll(StandInCore(LEARNT, wrong), tmp_path / "occupied" / f"{KEY}.json", None)
    assert found == ["draft_costs_contradicted", "draft_costs_not_saved"]


def test_costs_are_kept_for_another_length_of_completions(vllm_imported: None) -> None:
    """Each maxTokens was calibrated anew, for minutes with a model of 30 layers."""

    assert name_costs(sampling={"maxTokens": 64}) == name_costs(sampling={"maxTokens": 128})
    assert name_costs(sampling={"maxTokens": 64}) != name_costs(sampling={"maxTokens": 64, "topK": 4})


def test_costs_are_other_ones_where_gpus_hold_whole_experts(vllm_imported: None) -> None:
    assert name_costs(tensorParallel=2) != name_costs(tensorParallel=2, expertParallel=True)


def name_costs(**generation: Any) -> Path:
    """Return the file of step costs of an engine with these fields."""
    spec = a_spec(Path("/policy"), {"ngram": {}}, generation=generation)
    return draft_length_client.costs_file(spec, [])
