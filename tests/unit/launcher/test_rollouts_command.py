"""`specrl rollouts` shows what a policy answered, and says why there is nothing to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_run
from typer.testing import CliRunner, Result

from specrl.cli import app
from specrl.formats.rollout_samples import RolloutSample
from specrl.launcher.run_directory import RunDirectory, create_run
from specrl.spec import parse_spec


def a_sample(step: int, sample: int, reward: float | None, **fields: Any) -> RolloutSample:
    known: dict[str, Any] = {
        "step": step,
        "id": f"{step:06d}-00000-{sample:03d}-0",
        "replica": "gen-0",
        "oldest_version": step - 1,
        "newest_version": step - 1,
        "tokens": 7,
        "seconds": 1.25,
        "finish_reason": "stop",
        "reward": reward,
        "rewards": {} if reward is None else {"exact": reward},
        "extracted": "7",
        "reason": "compared as text",
        "prompt": "What is 3+4?",
        "completion": f"Let me see.\nIt is {step}{sample}.",
    }
    return RolloutSample.model_validate(known | fields)


def a_folder(runs: Path, samples: list[RolloutSample], **sections: Any) -> RunDirectory:
    directory = create_run(runs, parse_spec(a_run(runs, **sections)))
    lines = [sample.model_dump_json(by_alias=True) for sample in samples]
    if lines:
        directory.rollouts_file.write_text("".join(f"{line}\n" for line in lines))
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return a_folder(tmp_path, [a_sample(1, 0, 0.0), a_sample(1, 1, 1.0), a_sample(2, 0, 0.5), a_sample(2, 1, None)])


def rollouts(directory: RunDirectory, *options: str) -> Result:
    return CliRunner().invoke(app, ["rollouts", str(directory.path), *options])


def shown_ids(directory: RunDirectory, *options: str) -> list[str]:
    result = rollouts(directory, "--json", *options)
    assert result.exit_code == 0, result.output
    return [f"{sample['step']}.{sample['id'].split('-')[2]}" for sample in json.loads(result.stdout)]


def test_rollouts_of_the_newest_step_are_shown_with_all_their_texts(directory: RunDirectory) -> None:
    result = rollouts(directory)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:9] == [
        "step 2: reward 0.5, policy version 1, 7 tokens in 1.2 s, finish stop, gen-0, 000002-00000-000-0",
        "  prompt",
        "    What is 3+4?",
        "  completion",
        "    Let me see.",
        "    It is 20.",
        "  answer found",
        "    7",
        "  verdict",
    ]
    assert "step 2: not graded" in result.stdout
    assert "step 1" not in result.stdout


def test_a_step_or_the_best_or_the_worst_can_be_chosen(directory: RunDirectory) -> None:
    assert shown_ids(directory) == ["2.000", "2.001"]
    assert shown_ids(directory, "--step", "1") == ["1.000", "1.001"]
    assert shown_ids(directory, "--best") == ["1.001", "2.000", "1.000", "2.001"]
    assert shown_ids(directory, "--worst", "-n", "2") == ["1.000", "2.000"]
    assert shown_ids(directory, "--step", "2", "--worst") == ["2.000", "2.001"], "one that is not graded comes last"


def test_several_rewards_are_named(tmp_path: Path) -> None:
    found = a_sample(1, 0, 0.75, rewards={"correct": 1.0, "format": 0.5})
    assert "reward 0.75 (correct 1, format 0.5)" in rollouts(a_folder(tmp_path, [found])).stdout


def test_a_completion_cannot_move_the_cursor(tmp_path: Path) -> None:
    found = a_sample(1, 0, 0.0, completion="\x1b[2J[bold]wiped", reason="\x1b[31m")
    shown = rollouts(a_folder(tmp_path, [found])).stdout
    assert "\x1b" not in shown
    assert "[bold]wiped" in shown, "it is no markup either"


def test_a_run_without_rollouts_is_refused_with_the_reason(tmp_path: Path) -> None:
    for sections, said in (({}, "served"), ({"telemetry": {"rollouts": 0}}, "its telemetry.rollouts is 0")):
        result = rollouts(a_folder(tmp_path, [], **sections))
        assert result.exit_code == 2
        assert "RUN must have written rollouts, got none" in result.stderr
        assert said in result.stderr


def test_a_step_without_rollouts_is_refused(directory: RunDirectory) -> None:
    result = rollouts(directory, "--step", "9")
    assert result.exit_code == 2
    assert "--step must be a step with rollouts, got 9; there are steps 1 to 2" in result.stderr
