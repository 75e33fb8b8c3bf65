"""`specrl store` inspects, exports and resets the state of a run, in SQLite and in Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.redis_servers import RedisProcess, needs_redis
from tests.run_files import a_model_folder, a_run, a_run_file
from tests.store_crashes import read_contents
from typer.testing import CliRunner, Result

from specrl.cli import app
from specrl.coordinator.ledger import Store, StoredRollout, make_claim, open_store, open_store_reader
from specrl.errors import StoreFailed, StoreInvalid
from specrl.launcher import run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.records import Batch, FinishReason, GradedRollout, Reward, Rollout, TrainRollout, VersionSpan, wire
from specrl.spec import load_spec, parse_spec

VERDICT = Reward(1.0, extracted="18", reason="equal to the reference")


def specrl_command(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=answer)


def a_rollout(text: str) -> Rollout:
    return Rollout(
        rollout_id="r",
        group_id="g",
        sample_index=0,
        token_ids_T=np.asarray([1, 2], np.int32),
        sampler_logprobs_T=np.asarray([-0.5, -1.0], np.float32),
        versions=(VersionSpan(0, 0, 2),),
        finish_reason=FinishReason.STOP,
        replica_id="gen-0",
        text=text,
        seconds=0.5,
    )


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs_redis)])
def directory(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunDirectory]:
    """Make a run's folder with the state of two steps, in SQLite or in Redis."""
    monkeypatch.chdir(tmp_path)
    where: dict[str, Any] = {"sqlite": {}}
    server = None
    if request.param == "redis":
        server = RedisProcess(tmp_path / "redis")
        where = {"redis": {"addresses": [server.address]}}
    made = run_directory.create_run(tmp_path / "runs", parse_spec(a_run(tmp_path, store=where)))
    with closing(opened(made)) as store:
        batch = Batch(1, (TrainRollout((5,), a_rollout("trained"), 0.5),))
        trained = wire.graded_to_bytes(GradedRollout(a_rollout("trained"), VERDICT))
        store.put_rollouts([StoredRollout(1, 0, 0, 0, trained)])
        store.put_batch(1, wire.batch_to_outline(batch), [0])
        store.finish_step(1, {"step": 1, "reward": 0.5, "failed": {"000001-00002": "the verifier hung"}})
        graded = wire.graded_to_bytes(GradedRollout(a_rollout("die Lösung ist 18"), VERDICT))
        store.put_rollouts([StoredRollout(2, 1, 0, 3, graded), StoredRollout(2, 1, 1, 0, graded)])
        store.set_fact("failedPrompts", {"000001-00001": "the verifier crashed"})
    yield made
    if server is not None:
        server.kill()


def opened(directory: RunDirectory) -> Store:
    return open_store(load_spec(directory.run_file), directory.path, make_claim(directory.path))


def held(directory: RunDirectory) -> dict[str, Any]:
    with closing(open_store_reader(load_spec(directory.run_file), directory.path)) as store:
        return read_contents(store)


def test_inspect_shows_the_content_and_changes_nothing(directory: RunDirectory) -> None:
    before = held(directory)
    shown = specrl_command("store", "inspect", directory.name)
    assert shown.exit_code == 0, shown.output
    for part in ("trained", "2 of step 2", "failedPrompts"):
        assert part in shown.stdout
    found = json.loads(specrl_command("store", "inspect", str(directory.path), "--json").stdout)
    assert (found["trained"], found["rollouts"], found["batches"], found["reports"]) == (1, {"2": 2}, [1], 1)
    assert found["failedPrompts"] == 2
    assert held(directory) == before


def test_a_store_can_be_inspected_while_its_coordinator_writes(directory: RunDirectory) -> None:
    with closing(opened(directory)) as running:
        assert specrl_command("store", "inspect", directory.name).exit_code == 0
        assert specrl_command("store", "export", directory.name, "--out", "copy").exit_code == 0
        running.finish_step(2, {"step": 2})
        assert running.read_last_trained_step() == 2


def test_export_can_be_read_without_specrl_and_replayed_with_it(directory: RunDirectory, tmp_path: Path) -> None:
    result = specrl_command("store", "export", directory.name, "--out", "copy/here")
    assert result.exit_code == 0, result.output
    assert "2 rollouts, 1 batches written to copy/here" in result.stdout
    out = tmp_path / "copy" / "here"
    rollouts = [json.loads(line) for line in (out / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["step"], row["index"], row["sample"], row["attempt"]) for row in rollouts] == [
        (2, 1, 0, 3),
        (2, 1, 1, 0),
    ]
    assert rollouts[0]["rollout"]["text"] == "die Lösung ist 18"
    assert rollouts[0]["rollout"]["tokenIds"] == [1, 2]
    assert rollouts[0]["reward"] == {"value": 1.0, "extracted": "18", "reason": "equal to the reference"}
    assert [json.loads(line) for line in (out / "reports.jsonl").read_text().splitlines()] == [
        {"step": 1, "reward": 0.5, "failed": {"000001-00002": "the verifier hung"}}
    ]
    assert json.loads((out / "facts.json").read_text())["failedPrompts"] == {"000001-00001": "the verifier crashed"}
    assert wire.batch_from_bytes((out / "batches" / "000001.pb").read_bytes()).rollouts[0].rollout.text == "trained"
    again = specrl_command("store", "export", directory.name, "--out", "copy/here")
    assert (again.exit_code, "name another" in again.stderr) == (2, True)


def test_reset_asks_and_then_deletes_everything(directory: RunDirectory) -> None:
    before = held(directory)
    refused = specrl_command("store", "reset", directory.name, answer="n\n")
    assert refused.exit_code != 0
    assert "2 of step 2 rollouts, 1 batches" in refused.stdout
    assert held(directory) == before
    running = opened(directory)
    assert specrl_command("store", "reset", directory.name, answer="y\n").exit_code == 0
    with pytest.raises((StoreInvalid, StoreFailed)):
        running.set_fact("late", 1)
    running.close()
    with closing(opened(directory)) as store:
        assert read_contents(store) == {"facts": {}, "rollouts": [], "batches": {}, "reports": [], "trained": 0}


def test_reset_is_refused_while_the_run_is_driven(directory: RunDirectory) -> None:
    with directory.lock():
        result = specrl_command("store", "reset", directory.name, "--yes")
    assert (result.exit_code, "another launcher is running" in result.stderr) == (2, True)
    assert held(directory)["trained"] == 1


def test_a_run_that_never_began_has_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = run_directory.create_run(tmp_path / "runs", parse_spec(a_run(tmp_path)))
    result = specrl_command("store", "inspect", made.name)
    assert (result.exit_code, "must have started" in result.stderr) == (2, True)
    assert not (made.path / "store.db").exists()


def test_a_run_whose_store_cannot_be_reached_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a_model_folder(tmp_path / "model")
    file = a_run_file(tmp_path, store={"redis": {"addresses": ["127.0.0.1:1"], "timeoutS": 1}})
    result = specrl_command("run", "-f", str(file))
    assert result.exit_code == 2
    assert "no address of store.redis is a usable primary: 127.0.0.1:1" in result.stderr
    assert not Path("runs").exists()
