"""Who may read a run over HTTP. The API server here answers from a table; the real one: tests/e2e/test_run.py."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request

from specrl.coordinator.admission import (
    AUDIENCE,
    LONGEST_TOKEN,
    MOST_REMEMBERED,
    REMEMBERED_S,
    ByReview,
    ByToken,
)
from specrl.coordinator.rljob import Place
from specrl.coordinator.run_token import TOKEN_FILE

ADA = {"username": "ada", "groups": ["team-a"], "uid": "7", "extra": {"scopes": ["all"]}}


@dataclass(frozen=True)
class Cluster(Place):
    """Knows whose a token is, and who may read the RLJob."""

    users: dict[str, dict[str, Any]] = field(default_factory=dict)
    allowed: set[str] = field(default_factory=set)
    asked: list[dict[str, Any]] = field(default_factory=list)
    audiences: list[str] = field(default_factory=lambda: [AUDIENCE])
    away: list[Exception] = field(default_factory=list)

    async def call(
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
        assert path == "authorization.k8s.io/v1/subjectaccessreviews"
        return {"status": {"allowed": body["spec"]["user"] in self.allowed}}


@dataclass
class Service:
    """An app behind ByReview, and its clock."""

    cluster: Cluster
    now: float = 0.0

    def __post_init__(self) -> None:
        self._app = FastAPI()
        readers = ByReview(self.cluster, clock=lambda: self.now)

        @self._app.get("/status", dependencies=[Depends(readers.admit)])
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


async def test_a_reader_of_the_rljob_reads_the_run_and_is_asked_about_by_name(service: Service) -> None:
    answer = await service.asked("Bearer adas")
    assert (answer.status_code, answer.json()) == (200, "all of it")
    token, access = (it["spec"] for it in service.cluster.asked)
    assert token == {"token": "adas", "audiences": [AUDIENCE]}
    rljob = {"verb": "get", "group": "specrl.dev", "resource": "rljobs", "namespace": "rl", "name": "tiny"}
    who = {"user": "ada", "groups": ["team-a"], "uid": "7", "extra": {"scopes": ["all"]}}
    assert access == who | {"resourceAttributes": rljob}


@pytest.mark.parametrize("header", [None, "", "adas", "Basic adas", "Bearer", "Bearer  ", "Bearer " + "x" * 20_000])
async def test_without_a_token_nobody_is_asked(service: Service, header: str | None) -> None:
    assert LONGEST_TOKEN < 20_000
    answer = await service.asked(header)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert "kubectl create token ACCOUNT --audience specrl.dev" in answer.text
    assert not service.cluster.asked


async def test_a_token_of_nobody_or_for_another_audience_is_refused(service: Service) -> None:
    answer = await service.asked("Bearer stolen")
    assert answer.status_code == 401
    assert "no such token" in answer.text
    service.cluster.audiences[:] = ["https://kubernetes.default.svc"]
    answer = await service.asked("Bearer adas")
    assert answer.status_code == 401
    assert "not meant for the audience specrl.dev" in answer.text


async def test_who_may_not_read_the_rljob_is_told_what_to_ask_for(service: Service) -> None:
    service.cluster.allowed.clear()
    answer = await service.asked("Bearer adas")
    assert answer.status_code == 403
    assert "ada must be allowed to get rljobs.specrl.dev tiny in rl" in answer.text


async def test_verdicts_are_remembered_for_a_minute(service: Service) -> None:
    assert (await service.asked("Bearer adas")).status_code == 200
    service.cluster.allowed.clear()
    service.now = REMEMBERED_S - 1
    assert (await service.asked("bearer adas")).status_code == 200
    assert len(service.cluster.asked) == 2
    service.now = REMEMBERED_S + 1
    assert (await service.asked("Bearer adas")).status_code == 403
    assert len(service.cluster.asked) == 4


@pytest.mark.parametrize("error", [httpx2.ConnectError("refused"), OSError("no token"), ValueError("certificate")])
async def test_while_the_api_server_is_away_nobody_new_gets_in_and_nothing_is_remembered(
    service: Service, error: Exception
) -> None:
    service.cluster.away.append(error)
    answer = await service.asked("Bearer adas")
    assert answer.status_code == 503
    assert str(error) in answer.text
    service.cluster.away.clear()
    assert (await service.asked("Bearer adas")).status_code == 200


async def test_an_answer_without_a_status_admits_nobody(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(*_: object, **__: object) -> dict[str, Any]:
        return {"kind": "Status"}

    monkeypatch.setattr(Cluster, "call", call)
    assert (await service.asked("Bearer adas")).status_code == 503


async def test_tokens_that_are_no_good_do_not_fill_the_memory(service: Service) -> None:
    readers = ByReview(service.cluster, clock=lambda: 0.0)
    for number in range(MOST_REMEMBERED + 5):
        await readers._verdict(f"guess-{number}")
    assert len(readers._known) == MOST_REMEMBERED


async def test_who_may_act_is_asked_about_with_the_verb_of_a_change(service: Service) -> None:
    actors = ByReview(service.cluster, "update", lambda: 0.0)
    assert (await actors._verdict("adas")).status == 200
    assert service.cluster.asked[1]["spec"]["resourceAttributes"]["verb"] == "update"
    service.cluster.allowed.clear()
    refused = await ByReview(service.cluster, "update", lambda: 0.0)._verdict("adas")
    assert "ada must be allowed to update rljobs.specrl.dev tiny in rl" in refused.detail
    assert "editor" in refused.detail


def a_request(authorization: str) -> Request:
    return Request({"type": "http", "headers": [(b"authorization", authorization.encode("latin-1"))]})


async def test_the_token_file_is_the_owners_alone_and_admits_who_shows_it(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).write_text("of the start before")
    admission = ByToken(tmp_path)
    file = tmp_path / TOKEN_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) >= 43, "256 bits"
    await admission.admit(a_request(f"Bearer {file.read_text()}"))
    for wrong in ("", "Bearer", "Bearer x", "Bearer \xff", f"Basic {file.read_text()}", "Bearer of the start before"):
        with pytest.raises(HTTPException) as refused:
            await admission.admit(a_request(wrong))
        assert refused.value.status_code == 401
        assert "content of the file token in the run's folder" in refused.value.detail


def test_every_start_draws_another_token(tmp_path: Path) -> None:
    tokens = set()
    for _ in range(3):
        ByToken(tmp_path)
        tokens.add((tmp_path / TOKEN_FILE).read_text())
    assert len(tokens) == 3
