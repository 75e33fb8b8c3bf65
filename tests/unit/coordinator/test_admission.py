"""Who may read a run over HTTP and act on it. Uses a fake API server; tests/e2e/test_run.py uses a real one."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request

from specrl.coordinator.requests.admission import (
    AUDIENCE,
    LONGEST_TOKEN,
    MAX_REMEMBERED,
    REMEMBERED_S,
    ReviewAdmission,
    TokenAdmission,
)
from specrl.coordinator.requests.rljob_api import RLJobReference
from specrl.rpc.run_token import TOKEN_FILE, write_token

ADA = {"username": "ada", "groups": ["team-a"], "uid": "7", "extra": {"scopes": ["all"]}}


@dataclass(frozen=True)
class Cluster(RLJobReference):
    """A fake API server that knows the user of each token and which users are allowed."""

    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    allowed: set[str] = field(default_factory=set)
    asked: list[dict[str, Any]] = field(default_factory=list)
    audiences: list[str] = field(default_factory=lambda: [AUDIENCE])
    away: list[Exception] = field(default_factory=list)

    async def call_api(
        self, method: str, path: str, body: dict[str, Any], kind: str = "application/json", **query: str
    ) -> dict[str, Any]:
        if self.away:
            raise self.away[0]
        self.asked.append(body)
        if path == "authentication.k8s.io/v1/tokenreviews":
            user = self.users.get(body["spec"]["token"])
            if user is None:
                return {"status": {"authenticated": False, "error": "no such token"}}
            return {"status": {"authenticated": True, "user": user, "audiences": self.audiences}}
        assert path == "authorization.k8s.io/v1/namespaces/rl/localsubjectaccessreviews"
        return {"status": {"allowed": body["spec"]["user"] in self.allowed}}


@dataclass
class Service:
    """An app that `ReviewAdmission` protects, with a clock that the test sets."""

    cluster: Cluster
    now: float = 0.0

    def __post_init__(self) -> None:
        self._app = FastAPI()
        readers = ReviewAdmission(self.cluster, clock=lambda: self.now)

        @self._app.get("/status", dependencies=[Depends(readers.admit_request)])
        async def status() -> str:
            return "all of it"

    async def asked(self, authorization: str | None) -> httpx2.Response:
        headers = {} if authorization is None else {"Authorization": authorization}
        transport = httpx2.ASGITransport(app=self._app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://run") as client:
            return await client.get("/status", headers=headers)


@pytest.fixture
def service() -> Service:
    return Service(Cluster("rl", "tiny", "https://api", users={"adas": ADA}, allowed={"ada"}))


async def test_a_user_who_may_get_the_rljob_may_read_the_run(service: Service) -> None:
    answer = await service.asked("Bearer adas")
    assert (answer.status_code, answer.json()) == (200, "all of it")
    token, access = (it["spec"] for it in service.cluster.asked)
    assert token == {"token": "adas", "audiences": [AUDIENCE]}
    rljob = {"verb": "get", "group": "specrl.dev", "resource": "rljobs", "namespace": "rl", "name": "tiny"}
    who = {"user": "ada", "groups": ["team-a"], "uid": "7", "extra": {"scopes": ["all"]}}
    assert access == who | {"resourceAttributes": rljob}


@pytest.mark.parametrize("header", [None, "", "adas", "Basic adas", "Bearer", "Bearer  ", "Bearer " + "x" * 20_000])
async def test_a_request_without_a_token_is_refused_without_a_review(service: Service, header: str | None) -> None:
    assert LONGEST_TOKEN < 20_000
    answer = await service.asked(header)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert "kubectl create token ACCOUNT --audience specrl.dev" in answer.text
    assert not service.cluster.asked


async def test_an_unknown_token_or_one_for_another_audience_is_refused(service: Service) -> None:
    answer = await service.asked("Bearer stolen")
    assert answer.status_code == 401
    assert "no such token" in answer.text
    service.cluster.audiences[:] = ["https://kubernetes.default.svc"]
    answer = await service.asked("Bearer adas")
    assert answer.status_code == 401
    assert "not issued for the audience specrl.dev" in answer.text


async def test_a_refused_user_learns_which_role_to_ask_for(service: Service) -> None:
    service.cluster.allowed.clear()
    answer = await service.asked("Bearer adas")
    assert answer.status_code == 403
    assert "ada must be allowed to get rljobs.specrl.dev tiny in namespace rl" in answer.text


async def test_decisions_are_cached_for_a_minute(service: Service) -> None:
    assert (await service.asked("Bearer adas")).status_code == 200
    service.cluster.allowed.clear()
    service.now = REMEMBERED_S - 1
    assert (await service.asked("bearer adas")).status_code == 200
    assert len(service.cluster.asked) == 2
    service.now = REMEMBERED_S + 1
    assert (await service.asked("Bearer adas")).status_code == 403
    assert len(service.cluster.asked) == 4


@pytest.mark.parametrize("error", [httpx2.ConnectError("refused"), OSError("no token"), ValueError("certificate")])
async def test_a_failed_review_admits_nobody_and_is_not_cached(service: Service, error: Exception) -> None:
    service.cluster.away.append(error)
    answer = await service.asked("Bearer adas")
    assert answer.status_code == 503
    assert str(error) in answer.text
    service.cluster.away.clear()
    assert (await service.asked("Bearer adas")).status_code == 200


async def test_a_coordinator_without_the_right_to_review_says_which_value_of_the_chart_grants_it(
    service: Service,
) -> None:
    request = httpx2.Request("POST", "https://api/apis/authentication.k8s.io/v1/tokenreviews")
    forbidden = httpx2.Response(403, request=request)
    service.cluster.away.append(httpx2.HTTPStatusError("forbidden", request=request, response=forbidden))
    answer = await service.asked("Bearer adas")
    assert answer.status_code == 503
    assert "name the job's namespace in the chart's rbac.tokenReviewNamespaces" in answer.text


async def test_a_review_without_a_status_admits_nobody(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(*_: object, **__: object) -> dict[str, Any]:
        return {"kind": "Status"}

    monkeypatch.setattr(Cluster, "call_api", call)
    assert (await service.asked("Bearer adas")).status_code == 503


async def test_refused_tokens_do_not_fill_the_cache(service: Service) -> None:
    readers = ReviewAdmission(service.cluster, clock=lambda: 0.0)
    for number in range(MAX_REMEMBERED + 5):
        await readers._decide_cached(f"guess-{number}")
    assert len(readers._known) == MAX_REMEMBERED


async def test_acting_requires_permission_to_update_the_rljob(service: Service) -> None:
    actors = ReviewAdmission(service.cluster, "update", lambda: 0.0)
    assert (await actors._decide_cached("adas")).status == 200
    assert service.cluster.asked[1]["spec"]["resourceAttributes"]["verb"] == "update"
    service.cluster.allowed.clear()
    refused = await ReviewAdmission(service.cluster, "update", lambda: 0.0)._decide_cached("adas")
    assert "ada must be allowed to update rljobs.specrl.dev tiny in namespace rl" in refused.detail
    assert "editor" in refused.detail


def a_request(authorization: str) -> Request:
    return Request({"type": "http", "headers": [(b"authorization", authorization.encode("latin-1"))]})


async def test_only_the_owner_can_read_the_token_file_and_its_token_admits(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).write_text("of the start before")
    admission = TokenAdmission(tmp_path)
    file = tmp_path / TOKEN_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) >= 43, "256 bits"
    await admission.admit_request(a_request(f"Bearer {file.read_text()}"))
    for wrong in ("", "Bearer", "Bearer x", "Bearer \xff", f"Basic {file.read_text()}", "Bearer of the start before"):
        with pytest.raises(HTTPException) as refused:
            await admission.admit_request(a_request(wrong))
        assert refused.value.status_code == 401
        assert "content of the file token in the run's folder" in refused.value.detail


def test_a_restarted_coordinator_keeps_the_token_of_the_launch(tmp_path: Path) -> None:
    """The page and the peers of the run have it. Each launch draws another one."""
    launched = [write_token(tmp_path) for _ in range(3)]
    assert len(set(launched)) == 3
    TokenAdmission(tmp_path)
    assert (tmp_path / TOKEN_FILE).read_text() == launched[-1]


def test_a_token_that_others_may_have_read_is_replaced(tmp_path: Path) -> None:
    before = write_token(tmp_path)
    (tmp_path / TOKEN_FILE).chmod(0o644)
    TokenAdmission(tmp_path)
    assert (tmp_path / TOKEN_FILE).read_text() != before
    assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
