"""A reward function that breaks during a run fails the run with the reason. Once it is fixed, the run can be resumed.

Coordinator, launcher, CLI and the pool of verifiers are real; replica and trainer are stand-ins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_model_folder, a_run_file
from typer.testing import CliRunner, Result

from specrl.cli import app

BREAKING = """
import pathlib

HERE = pathlib.Path(__file__).parent

def grade(reference, completion):
    is_step_reported = any(file.stat().st_size for file in HERE.glob("runs/*/metrics.jsonl"))
    if is_step_reported and not (HERE / "repaired").exists():
        return {"reward": 1.0}["score"]
    return float(len(completion) % 2)
"""
STEPS = 6
"""Of four rollouts each. The function breaks once step 1 is reported, so in step 2 or 3."""


def run_specrl(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments, "--plain"])


def reports(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("stand_ins")
def test_a_run_whose_reward_function_breaks_fails_with_the_reason_and_resumes_after_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run used to train on nothing until its last step, and ended "finished" with exit code 0."""
    monkeypatch.chdir(tmp_path)
    a_model_folder(tmp_path / "model")
    (tmp_path / "breaking.py").write_text(BREAKING)
    file = a_run_file(
        tmp_path,
        rewards={"python": {"function": "breaking:grade", "folder": str(tmp_path)}},
        schedule={"steps": STEPS, "promptsPerStep": 2, "groupSize": 2, "maxPolicyLag": 0},
        checkpoint={"everySteps": 1000},
    )
    ended = run_specrl("-f", str(file))
    text = ended.output
    (directory,) = (tmp_path / "runs").iterdir()
    last = reports(tmp_path)[-1]["step"]
    assert 1 <= last < STEPS
    assert ended.exit_code == 2, text
    assert "grading failed: KeyError at breaking.py:9" in text
    assert f"specrl: step {last + 1} must have a graded rollout to learn from, got none: 4 rollouts" in text
    assert f"resume with `specrl run --resume {directory}`" in text
    assert (directory / "checkpoints" / f"step-{last:06d}" / "state.json").exists()

    (tmp_path / "repaired").touch()
    resumed = run_specrl("--resume", str(directory))
    assert resumed.exit_code == 0, resumed.output
    found = reports(tmp_path)
    assert [report["step"] for report in found] == list(range(1, STEPS + 1))
    assert not any(report["verifierErrors"] for report in found[last:]), "asked again, and now judged"
