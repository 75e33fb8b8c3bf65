"""A run tells its RLJob over HTTP: what is new, once, under its own field manager, and the end until it is heard."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from tests.stand_ins.api_server import FakeApiServer
from tests.stand_ins.api_server_http import TOKEN, HttpApiServer
from tests.unit.operator.builders import an_rljob

from specrl.coordinator.board import Board
from specrl.coordinator.report import Phase, Status, StepReport
from specrl.coordinator.rljob import Place, Teller
from specrl_operator.api import RLJOB, condition_of
from specrl_operator.cluster import ClusterError


class Run:
    """Stands where a Board does."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.shown = Status(run="tiny", phase=Phase.WAITING, steps=2, policy_version=-1)

    def status(self) -> Status:
        return self.shown

    def newest_report(self) -> StepReport | None:
        return None


@pytest.fixture
def server() -> Iterator[HttpApiServer]:
    fake = FakeApiServer()
    fake.put(an_rljob(status={"state": "Running"}))
    served = HttpApiServer(fake)
    yield served
    served.close()


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def teller(server: HttpApiServer, run: Run, tmp_path: Path) -> Teller:
    (tmp_path / "token").write_text(TOKEN + "\n")
    return Teller(cast(Board, run), Place("rl", "tiny", server.url, tmp_path), lambda: run.now)


def said(server: HttpApiServer) -> dict[str, object]:
    found: dict[str, object] = server.fake.of(RLJOB)["tiny"]["status"]
    return found


async def test_progress_is_written_and_the_operators_part_stays(
    server: HttpApiServer, run: Run, teller: Teller
) -> None:
    run.shown = run.shown.model_copy(update={"step": 1, "policy_version": 1})
    assert await teller.turn()
    status = said(server)
    assert status["state"] == "Running"
    assert status["progress"] == {"step": 1, "policyVersion": 1, "lastUpdateTime": "2026-01-01T00:00:00Z"}
    assert condition_of(status, "CollectiveReady")["status"] == "True"


async def test_what_has_not_changed_is_not_written(server: HttpApiServer, run: Run, teller: Teller) -> None:
    assert await teller.turn()
    writes = len(server.fake.writes())
    run.now += timedelta(minutes=5)
    assert await teller.turn()
    assert len(server.fake.writes()) == writes


async def test_a_condition_keeps_the_time_at_which_it_turned(server: HttpApiServer, run: Run, teller: Teller) -> None:
    run.shown = run.shown.model_copy(update={"policy_version": 0})
    await teller.turn()
    run.now += timedelta(minutes=5)
    run.shown = run.shown.model_copy(update={"policy_version": 1})
    await teller.turn()
    assert condition_of(said(server), "CollectiveReady")["lastTransitionTime"] == "2026-01-01T00:00:00Z"


async def test_a_renewed_token_is_used_and_a_refusal_is_no_end(
    server: HttpApiServer, run: Run, teller: Teller, tmp_path: Path
) -> None:
    server.tokens = {"renewed"}
    assert not await teller.turn()
    (tmp_path / "token").write_text("renewed")
    assert await teller.turn()
    (tmp_path / "token").unlink()
    run.shown = run.shown.model_copy(update={"step": 2})
    assert not await teller.turn()


async def test_the_end_is_told_until_it_is_heard(server: HttpApiServer, run: Run, teller: Teller) -> None:
    refusals = iter([True, True, False])
    server.fake.refuse = lambda verb, body: _busy() if next(refusals) else None
    run.shown = run.shown.model_copy(update={"phase": Phase.FINISHED, "step": 2})
    assert await teller.end()
    assert condition_of(said(server), "RunFinished")["status"] == "True"


def _busy() -> ClusterError:
    return ClusterError(503, "busy")
