"""A run writes changes to its RLJob's status under its own field manager, and retries the final status."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from tests.stand_ins.api_server import FakeApiServer
from tests.stand_ins.api_server_http import TOKEN, HttpApiServer
from tests.unit.operator.builders import an_rljob, merge

from specrl.coordinator.controls import Controls
from specrl.coordinator.observe.observer import RunObserver
from specrl.coordinator.observe.rljob_status import RLJobStatusWriter, write_sandbox_condition
from specrl.coordinator.requests.rljob_api import RLJobReference
from specrl.formats.reports import Phase, StatusReport, StepReport
from specrl.spec.cluster import FailurePolicy
from specrl_operator.api import Object, find_condition
from specrl_operator.cluster.interface import ClusterError
from specrl_operator.kinds import RLJOB


class Run:
    """Replaces a RunObserver."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.shown = StatusReport(run="tiny", phase=Phase.WAITING, steps=2, policy_version=-1)

    def build_status(self) -> StatusReport:
        return self.shown

    def list_recent_reports(self) -> list[StepReport]:
        return []


@pytest.fixture
def server() -> Iterator[HttpApiServer]:
    fake = FakeApiServer()
    fake.put_object(an_rljob(status={"state": "Running"}))
    served = HttpApiServer(fake)
    yield served
    served.close()


@pytest.fixture
def run() -> Run:
    return Run()


class Asked:
    """Replaces Controls. replicas, policy: those of the RLJob."""

    def __init__(self) -> None:
        self.replicas = 0
        self.policy = FailurePolicy()

    def follow_rljob(self, replicas: int, policy: FailurePolicy) -> None:
        self.replicas = replicas
        self.policy = policy


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def writer(server: HttpApiServer, run: Run, asked: Asked, tmp_path: Path) -> RLJobStatusWriter:
    (tmp_path / "token").write_text(TOKEN + "\n")
    place = RLJobReference("rl", "tiny", server.url, tmp_path)
    return RLJobStatusWriter(cast(RunObserver, run), place, cast(Controls, asked), lambda: run.now)


def said(server: HttpApiServer) -> dict[str, object]:
    found: dict[str, object] = server.fake.objects_by_name(RLJOB)["tiny"]["status"]
    return found


async def test_writing_progress_keeps_the_operators_fields(
    server: HttpApiServer, run: Run, writer: RLJobStatusWriter
) -> None:
    run.shown = run.shown.model_copy(update={"step": 1, "policy_version": 1})
    assert await writer.write_changes()
    status = said(server)
    assert status["state"] == "Running"
    assert status["progress"] == {"step": 1, "policyVersion": 1, "lastUpdateTime": "2026-01-01T00:00:00Z"}
    assert find_condition(status, "CollectiveReady")["status"] == "True"


async def test_the_sandbox_is_reported_alone_and_stays(
    server: HttpApiServer, run: Run, writer: RLJobStatusWriter, tmp_path: Path
) -> None:
    """A coordinator that is restarted reports the sandbox first, beside the progress of the one before it."""
    run.shown = run.shown.model_copy(update={"step": 1, "policy_version": 1})
    assert await writer.write_changes()
    place = RLJobReference("rl", "tiny", server.url, tmp_path)
    await write_sandbox_condition(place, {"rewards.code": "Landlock"})
    status = said(server)
    assert find_condition(status, "SandboxReady")["message"] == "rewards.code: Landlock"
    assert find_condition(status, "CollectiveReady")["status"] == "True"
    assert status["progress"] == {"step": 1, "policyVersion": 1, "lastUpdateTime": "2026-01-01T00:00:00Z"}
    run.shown = run.shown.model_copy(update={"step": 2, "isolations": {"rewards.code": "Landlock"}})
    assert await writer.write_changes()
    assert find_condition(said(server), "SandboxReady")["status"] == "True"


async def test_the_run_follows_the_replicas_that_the_rljob_asks_for(
    server: HttpApiServer, asked: Asked, writer: RLJobStatusWriter
) -> None:
    """A coordinator that was restarted after `kubectl scale` waited 5 minutes for replicas that were gone."""
    edit_spec(server, generation={"replicas": 3})
    assert await writer.write_changes()
    assert asked.replicas == 3


async def test_the_run_follows_the_failure_policy_of_the_rljob(
    server: HttpApiServer, run: Run, asked: Asked, writer: RLJobStatusWriter
) -> None:
    """The run file has none, so SpecrlReplicasBelowMinimum watched for one replica, whatever the job asked for."""
    edit_spec(server, failurePolicy={"minGenerationReplicas": 3})
    assert await writer.write_changes()
    assert asked.policy.min_generation_replicas == 3
    edit_spec(server, failurePolicy={"minGenerationReplicas": 2, "ofANewerVersion": True})
    run.shown = run.shown.model_copy(update={"step": 1})
    assert await writer.write_changes()
    assert asked.policy.min_generation_replicas == 2


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"rdma": {"resourceName": "rdma/ib"}}, ("True", "SocketFallback")),
        ({"nvlink": "Required", "layout": "SameDomain"}, ("False", "MultiNodeNVLinkUnavailable")),
        ({}, ("True", "WeightsArrived")),
    ],
)
async def test_the_transport_is_judged_by_the_placement_of_the_rljob(
    server: HttpApiServer, run: Run, writer: RLJobStatusWriter, placement: Object, expected: object
) -> None:
    """It was judged by the run file, which has no placement: every transport was as ordered."""
    edit_spec(server, placement=placement)
    run.shown = run.shown.model_copy(update={"policy_version": 1, "nccl_transport": "NET/Socket"})
    assert await writer.write_changes()
    found = find_condition(said(server), "CollectiveReady")
    assert (found["status"], found["reason"]) == expected


def edit_spec(server: HttpApiServer, **changes: Object) -> None:
    """Merge changes into the RLJob's spec, as a user does."""
    server.fake.put_object(merge(server.fake.objects_by_name(RLJOB)["tiny"], {"spec": changes}))


async def test_an_unreachable_api_server_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    await write_sandbox_condition(RLJobReference("rl", "tiny", "http://127.0.0.1:9", tmp_path), {"tools": "Landlock"})


async def test_an_unchanged_status_is_not_written(server: HttpApiServer, run: Run, writer: RLJobStatusWriter) -> None:
    assert await writer.write_changes()
    writes = len(server.fake.list_writes())
    run.now += timedelta(minutes=5)
    assert await writer.write_changes()
    assert len(server.fake.list_writes()) == writes


async def test_a_condition_keeps_the_time_of_its_last_transition(
    server: HttpApiServer, run: Run, writer: RLJobStatusWriter
) -> None:
    run.shown = run.shown.model_copy(update={"policy_version": 0})
    await writer.write_changes()
    run.now += timedelta(minutes=5)
    run.shown = run.shown.model_copy(update={"policy_version": 1})
    await writer.write_changes()
    assert find_condition(said(server), "CollectiveReady")["lastTransitionTime"] == "2026-01-01T00:00:00Z"


async def test_a_renewed_token_is_used_and_a_refused_write_is_retried(
    server: HttpApiServer, run: Run, writer: RLJobStatusWriter, tmp_path: Path
) -> None:
    server.tokens = {"renewed"}
    assert not await writer.write_changes()
    (tmp_path / "token").write_text("renewed")
    assert await writer.write_changes()
    (tmp_path / "token").unlink()
    run.shown = run.shown.model_copy(update={"step": 2})
    assert not await writer.write_changes()


async def test_the_final_status_is_retried_until_it_is_written(
    server: HttpApiServer, run: Run, writer: RLJobStatusWriter
) -> None:
    refusals = iter([True, True, False])
    server.fake.refuse = lambda verb, body: _busy() if next(refusals) else None
    run.shown = run.shown.model_copy(update={"phase": Phase.FINISHED, "step": 2})
    assert await writer.write_final_status()
    assert find_condition(said(server), "RunFinished")["status"] == "True"


def _busy() -> ClusterError:
    return ClusterError(503, "busy")
