"""The demo as a user runs it, with a SIGKILL of every kind of process on the way: it learns, and keeps its promises.

Thresholds are the product's own claims; the demo's problems, seeds and schedule are fixed, the machine's speed is not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.runs import start

pytestmark = pytest.mark.slow

START_S, STEPS_S = 600.0, 1500.0


@pytest.mark.timeout(3000)
def test_the_demo_learns_and_survives_the_loss_of_any_process(tmp_path: Path) -> None:
    run = start(tmp_path, "demo", "--plain")
    try:
        run.until(lambda: len(run.reports()) >= 3, START_S)
        run.kill_program("specrl-generation", "gen-1")
        run.until(lambda: len(run.reports()) >= 8, STEPS_S)
        run.kill_program("specrl-trainer")
        run.until(lambda: len(run.reports()) >= 13, STEPS_S)
        run.kill_program("specrl-coordinator")
        text = run.finish(STEPS_S)
    finally:
        run.stop()

    reports = run.reports()
    status = json.loads((run.directory / "status.json").read_text())
    summary = status["summary"]
    steps = status["steps"]
    assert [report["step"] for report in reports] == list(range(1, steps + 1)), "every step once, in order"
    assert summary["promptsTrained"] == steps * 16
    assert summary["discardedForAge"] == 0
    assert status["counters"]["failedPrompts"] == 0
    assert summary["policyLagMax"] <= 1
    assert max(report["policyLagMax"] for report in reports) == 1, "generation did run ahead"
    assert all(report["checksum"] for report in reports), "every version was verified at every replica"
    compared = [report for report in reports if report["mismatchTokens"] > 0]
    assert compared
    assert max(report["mismatchMeanAbs"] for report in compared) < 1e-3
    assert max(report["mismatchMaxAbs"] for report in compared) < 1e-2
    for report in reports:
        assert report["canaryTokens"] > 0, f"step {report['step']}: no replica was held against the trainer"
        assert report["canaryMeanAbs"] < 1e-3
        assert report["canaryMaxAbs"] < 1e-2
    assert status["counters"]["canariesDisagreed"] == 0
    assert summary["lastAccuracy"] - summary["firstAccuracy"] >= 0.20
    assert summary["lastAcceptanceLength"] > 1.8
    assert summary["lastAcceptanceLength"] >= summary["firstAcceptanceLength"]
    for path in (summary["policyPath"], summary["drafterPath"], summary["checkpointPath"]):
        assert Path(path).is_dir()
        assert path in text
    rows = json.loads((run.directory / "comparison.json").read_text())
    assert {row["mechanism"] for row in rows} == {"none", "eagle3:3", "eagle3"}
