"""`specrl plan` recommends what the user allows, and what a run can be."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from tests.run_files import a_model_folder, a_run_file
from tests.unit.simulator.scenarios import a_scenario
from typer.testing import CliRunner

from specrl.cli import app
from specrl.simulator.search import find_best_layout

# Training needs 8 GPUs.
ONE_SPLIT = ("model.name=qwen3-30b-a3b", "cluster.gpus=9", "layout.generationGpus=1", "layout.trainingGpus=8")
SHORT = ("workload.medianTokens=100", "workload.maxTokens=400")


def test_a_plan_has_no_more_lag_than_the_user_allows() -> None:
    """Today's layout was a candidate with today's lag, and won."""
    scenario = a_scenario(*SHORT, *ONE_SPLIT, "schedule.maxPolicyLag=3", "schedule.steps=12")
    for max_lag in (1, 0):
        best = find_best_layout(scenario, max_lag=max_lag, can_colocate=False).best.scenario
        assert best.schedule.max_policy_lag == max_lag


def test_a_plan_without_lag_may_split_the_gpus() -> None:
    """Only layouts whose GPUs do both were tried at lag 0, which specrl cannot run."""
    scenario = a_scenario(*SHORT, "layout.generationGpus=2", "layout.trainingGpus=14")
    best = find_best_layout(scenario, max_lag=0, can_colocate=False).best.scenario
    assert best.schedule.max_policy_lag == 0
    assert not best.layout.colocated
    assert best.layout.generation_gpus > 2


def test_a_plan_of_a_run_file_keeps_generation_and_training_apart(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    file = a_run_file(tmp_path, schedule={"steps": 2, "promptsPerStep": 8, "groupSize": 8, "maxPolicyLag": 0})
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"gpu": "H100", "gpus": 4}))
    lengths = ("--set", "workload.medianTokens=8", "--set", "workload.sigma=0.5")
    result = CliRunner().invoke(
        app, ["plan", str(file), "--cluster", str(tmp_path / "cluster.yaml"), *lengths, "--json"]
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["colocated"], found["maxPolicyLag"]) == (False, 0)


def test_a_plan_for_gpus_without_room_for_longer_drafts_is_todays_layout() -> None:
    scenario = a_scenario(
        *SHORT,
        *ONE_SPLIT,
        "engine.maxLiveRollouts=1024",
        "schedule.promptsPerStep=64",
        "schedule.groupSize=16",
        "schedule.maxPolicyLag=0",
        "speculation.k=1",
        "speculation.acceptanceLength=1.8",
    )
    advice = find_best_layout(scenario, can_colocate=False)
    assert advice.best == advice.today
    assert advice.layouts_impossible == advice.layouts_tried
