"""The REST API over a real run with stand-in engines: answers, actions and admission."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode
from tests.integration.coordinator.small_run import Run, a_spec
from tests.integration.live.live_run import LiveRun

from specrl.coordinator.observe.web.app import make_app

RESOURCES = [
    "/status",
    "/spec",
    "/exposure",
    "/steps",
    "/curves",
    "/timeline",
    "/validations",
    "/replicas",
    "/events",
    "/targets",
]


def test_reading_what_has_no_prompts_needs_no_token_on_one_machine(live: LiveRun) -> None:
    for path in (*RESOURCES, "/metrics", "/healthz", "/readyz", "/openapi.json", "/"):
        assert live.client.get(path).status_code == 200, path


def test_every_answer_has_the_security_headers(live: LiveRun) -> None:
    for path in ("/", "/assets/main.js", "/status", "/nothing"):
        headers = live.client.get(path).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"], path
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(("method", "path"), [("POST", "/pause"), ("POST", "/resume"), ("POST", "/checkpoint")])
def test_actions_need_the_token_of_the_folder(live: LiveRun, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = live.client.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert "specrl pause" in answer.json()["detail"]
    assert live.client.get("/status").json()["isPaused"] is False


def test_steps_are_paginated_without_a_gap(live: LiveRun) -> None:
    live.until(lambda: live.trained() >= 6)
    found: list[int] = []
    while len(found) < 5:
        page = live.client.get("/steps", params={"after": found[-1] if found else 0, "limit": 2}).json()
        assert 0 < len(page) <= 2
        found += [report["step"] for report in page]
    assert found == list(range(1, len(found) + 1))


def test_spec_is_the_resolved_run_file(live: LiveRun) -> None:
    assert yaml.safe_load(live.client.get("/spec").text)["schedule"]["maxPolicyLag"] == 1


def test_rollouts_of_a_run_that_opted_in_are_shown_newest_first(live: LiveRun) -> None:
    refused = live.client.get("/rollouts")
    assert (refused.status_code, refused.headers["connection"]) == (401, "close")
    found = live.client.get("/rollouts", headers=live.acting).json()
    assert 0 < len(found) <= 8
    assert {"prompt", "completion", "reward", "oldestVersion"} <= found[0].keys()
    assert found[0]["extracted"] == f"{len(found[0]['completion'].split())} words"
    assert found[0]["reason"] in {"odd", "even"}
    assert [it["id"] for it in found] == sorted((it["id"] for it in found), reverse=True) or len(found) > 1


def test_timeline_has_the_trainer_and_every_replica(live: LiveRun) -> None:
    found = live.client.get("/timeline", params={"steps": 3}).json()
    assert found["lanes"][0] == "trainer"
    assert {"gen-0", "gen-1"} <= set(found["lanes"])
    drawn = {found["names"][bar[1]] for bar in found["bars"]}
    assert {"collect", "train", "sync"} <= drawn


def test_a_paused_run_starts_nothing_and_stays_paused_over_a_restart(live: LiveRun) -> None:
    try:
        assert live.client.post("/pause", headers=live.acting).json()["isPaused"] is True
        live.until(lambda: live.client.get("/status").json()["trainer"] == "ready")
        live.until(lambda: not any(it["liveRollouts"] for it in live.client.get("/replicas").json()))
        trained = live.trained()
        live.restart_coordinator()
        live.until(lambda: len(live.client.get("/replicas").json()) == 2)
        live.until(lambda: live.client.get("/status").json()["phase"] == "training")
        status = live.client.get("/status").json()
        assert (status["isPaused"], status["detail"][:6]) == (True, "paused")
        assert not any(it["liveRollouts"] for it in status["replicas"])
        live.client.post("/checkpoint", headers=live.acting)
        live.until(lambda: live.client.get("/status").json()["checkpointStep"] == live.trained())
        assert live.trained() - trained <= 1, "the step in progress ends, and no other starts"
    finally:
        assert live.client.post("/resume", headers=live.acting).json()["isPaused"] is False
    live.until(lambda: live.trained() >= trained + 3)
    names = {event["name"] for event in live.client.get("/events").json()}
    assert {"run_resumed", "checkpoint_requested", "checkpoint_completed"} <= names


def test_scaling_changes_the_run_file_and_the_status(live: LiveRun) -> None:
    for wrong in (
        {"replicas": 0},
        {"replicas": 65},
        {"replicas": "2"},
        {"replicas": True},
        {},
        {"replicas": 1, "x": 1},
    ):
        assert live.client.put("/scale", json=wrong, headers=live.acting).status_code == 422, wrong
    answer = live.client.put("/scale", json={"replicas": 3}, headers=live.acting)
    assert (answer.status_code, answer.json()["replicasWanted"]) == (202, 3)
    assert yaml.safe_load((live.folder / "run.yaml").read_text())["generation"]["replicas"] == 3
    assert yaml.safe_load(live.client.get("/spec").text)["generation"]["replicas"] == 3


def test_replicas_that_the_launcher_starts_no_more_are_in_the_status(live: LiveRun) -> None:
    for wrong in ({}, {"reasons": {"x": "y"}}, {"reasons": {"gen-7": 1}}, {"reasons": {"gen-7": "x" * 5000}}):
        assert live.client.put("/given-up", json=wrong, headers=live.acting).status_code == 422, wrong
    answer = live.client.put("/given-up", json={"reasons": {"gen-7": "no memory"}}, headers=live.acting)
    assert (answer.status_code, answer.json()["replicasGivenUp"]) == (202, {"gen-7": "no memory"})
    assert {"id": "gen-7", "state": "givenUp", "reason": "no memory"}.items() <= answer.json()["replicas"][-1].items()
    answer = live.client.put("/given-up", json={"reasons": {}}, headers=live.acting)
    assert answer.json()["replicasGivenUp"] == {}


def test_the_stream_begins_with_the_status_and_resumes_after_an_event(live: LiveRun) -> None:
    blocks = read_stream(live, "", 6)
    beat = next(json.loads(block["data"]) for block in blocks if block["event"] == "beat")
    assert beat["status"]["run"] == "small"
    assert 0 <= beat["exposure"]["share"] <= 1
    ids = [block["id"] for block in blocks if "id" in block]
    assert all(it.startswith(f"{beat['boot']}.") for it in ids)
    later = [block["id"] for block in read_stream(live, ids[0], 4) if "id" in block]
    assert later[0] == f"{beat['boot']}.{int(ids[0].partition('.')[2]) + 1}"
    other = [block["id"] for block in read_stream(live, "of-another-start.999999", 4) if "id" in block]
    assert other[0] == ids[0], "event ids of another start are ignored"


def read_stream(live: LiveRun, last_event_id: str, count: int) -> list[dict[str, str]]:
    headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
    found: list[dict[str, str]] = []
    with live.client.stream("GET", "/stream", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        block: dict[str, str] = {}
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                block[name] = value
            elif block:
                found.append(block)
                block = {}
            if len(found) >= count:
                return found
    raise AssertionError("the stream ended")


# -- other runs --------------------------------------------------------------------------------------------------------


async def test_a_run_that_has_not_opted_in_shows_no_rollout_and_a_run_that_is_over_cannot_be_asked(
    tmp_path: Path,
) -> None:
    async with (
        Run(tmp_path, a_spec(tmp_path, steps=2)) as run,
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(make_app(run.context, run.observer, is_local=False)), base_url="http://run"
        ) as client,
    ):
        scaled = await client.put("/scale", json={"replicas": 3})
        assert scaled.status_code == 409
        assert "kubectl scale rljob/small --replicas 3" in scaled.json()["detail"]
        assert not (tmp_path / "run.yaml").exists()
        await run.finish()
        refused = await client.get("/rollouts")
        assert refused.status_code == 409
        assert "telemetry.rolloutsShown must be > 0" in refused.json()["detail"]
        assert run.observer.samples.list_newest(9) == []
        over = await client.post("/pause")
        assert over.status_code == 409
        assert "the run is over (phase finished)" in over.json()["detail"]


# -- fuzzing -----------------------------------------------------------------------------------------------------------


# The run's thread draws random span ids meanwhile, which Hypothesis attributes to a strategy.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
def test_every_answer_conforms_to_the_openapi_schema(live: LiveRun) -> None:
    """Sends valid and invalid requests to every operation, with the token, so that actions are reached."""
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    tried = []
    for operation in (found.ok() for found in schema.get_all_operations()):
        if operation.path == "/stream":  # it has no end; see above
            continue
        tried.append(f"{operation.method.upper()} {operation.path}")
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if operation.query or operation.body else ()
        for mode in modes or (GenerationMode.POSITIVE,):

            @settings(
                max_examples=12,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                case.call_and_validate(headers=live.acting)

            ask()
    assert {"PUT /scale", "POST /pause", "GET /steps", "GET /timeline", "GET /curves"} <= set(tried)
    live.client.post("/resume", headers=live.acting)
