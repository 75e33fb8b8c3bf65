"""`specrl checkpoint` on the folder of a run that has ended."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.checkpoint_sums import write_checksums
from tests.run_files import a_run_file
from tests.tiny_models import Shape, make_policy
from typer.testing import CliRunner, Result

from specrl.cli import app
from specrl.cli.runs import checkpoint as checkpoint_command
from specrl.formats.reports import Phase, StatusReport
from specrl.launcher import run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.records import StreamPlace
from specrl.rpc.run_token import write_token
from specrl.spec import load_spec
from specrl.trainer.checkpointing import checkpoints, checksums

STEPS = (2, 4, 6, 8, 10)


def specrl_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *arguments])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), shape=Shape(layers=2))


@pytest.fixture
def run(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of ten steps with a milestone every four. Its policy never changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    settings = {"everySteps": 2, "keep": 2, "milestoneEverySteps": 4}
    file = a_run_file(tmp_path, model={"path": str(policy), "dtype": "float32"}, checkpoint=settings)
    directory = run_directory.create_run(tmp_path / "runs", load_spec(file))
    for step in STEPS:
        a_checkpoint(directory.path, step, policy)
    return directory.path


def a_checkpoint(run: Path, step: int, policy: Path) -> None:
    folder = checkpoints.step_directory(run, step)
    weights = folder / checkpoints.POLICY / checkpoints.WEIGHTS
    weights.mkdir(parents=True)
    shutil.copy(policy / "model.safetensors", weights)
    place = (
        StreamPlace(70 * step, 64, "0f3a") if step > 2 else None
    )  # the first was written by a version without this field
    (folder / checkpoints.STATE).write_text(json.dumps({"stream": asdict(place)} if place is not None else {}))
    write_checksums(folder)


def steps_left(run: Path) -> list[int]:
    return [step for step, _ in checkpoints.list_complete(run)]


def test_list_shows_why_each_checkpoint_is_kept(run: Path) -> None:
    found = json.loads(specrl_command("list", "--json").stdout)
    assert [(item["step"], item["kept"]) for item in found] == [
        (2, "superseded"),
        (4, "milestone"),
        (6, "superseded"),
        (8, "milestone, one of the 2 newest"),
        (10, "one of the 2 newest"),
    ]
    assert all(item["sizeBytes"] > 0 for item in found)
    assert [(item["cursor"], item["problems"]) for item in found[:2]] == [(None, None), (280, 64)]
    table = specrl_command("list", str(run)).stdout
    assert "milestone, one of the 2 newest" in table
    assert "25 of 64, epoch 5" in table
    assert "not recorded" in table


def test_prune_keeps_the_newest_and_the_milestones_and_asks_for_confirmation(run: Path) -> None:
    unanswered = specrl_command("prune", str(run))
    assert unanswered.exit_code == 1
    assert "not confirmed, so nothing was deleted; answer y, or pass --yes" in unanswered.stderr
    assert steps_left(run) == list(STEPS)
    assert "2 of 5 checkpoints will be deleted: steps 2, 6" in specrl_command("prune", str(run), "--yes").stdout
    assert steps_left(run) == [4, 8, 10]
    specrl_command("prune", str(run), "--keep", "1", "--yes")
    assert steps_left(run) == [4, 8, 10], "both others are milestones"
    with run_directory.RunDirectory(run).lock():
        refused = specrl_command("prune", str(run), "--yes")
    assert refused.exit_code == 2
    assert "another launcher" in refused.stderr


def test_a_run_without_a_complete_checkpoint_is_not_intact(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    result = specrl_command("verify", str(run))
    assert result.exit_code == 2
    assert "must have a complete checkpoint, got none" in result.stderr


def test_verify_names_truncated_altered_and_missing_files(run: Path) -> None:
    assert specrl_command("verify").exit_code == 0
    of_step = {step: checkpoints.step_directory(run, step) for step in STEPS}
    weights = Path(checkpoints.POLICY, checkpoints.WEIGHTS, "model.safetensors")
    content = bytearray((of_step[4] / weights).read_bytes())
    (of_step[2] / weights).write_bytes(content[:-100])
    content[-1] ^= 1
    (of_step[4] / weights).write_bytes(content)
    (of_step[6] / checkpoints.STATE).write_text("{ }")
    (of_step[8] / checksums.FILE).unlink()
    (of_step[10] / weights).unlink()
    result = specrl_command("verify", "--json")
    assert result.exit_code == 1
    damages = {found["step"]: found["damages"] for found in json.loads(result.stdout)}
    assert damages[2] == [f"{weights} has {len(content) - 100} bytes instead of {len(content)}"]
    assert damages[4][0].startswith(f"{weights} does not have the checksum ")
    assert damages[6][0].startswith("state.json has 3 bytes instead of ")
    assert "could not read checksums.json" in damages[8][0]
    assert damages[10] == [f"{weights} cannot be read: No such file or directory"]
    assert "5 of 5 checkpoints" in specrl_command("verify", str(run)).stderr
    assert specrl_command("verify", "--step", "4").exit_code == 1
    wrong = specrl_command("verify", "--step", "3")
    assert (wrong.exit_code, "has those of steps 2, 4, 6, 8, 10" in wrong.stderr) == (2, True)


def test_export_is_a_hugging_face_folder_and_refuses_a_damaged_checkpoint(run: Path, policy: Path) -> None:
    out = run.parent / "exported"
    result = specrl_command("export", str(run), "--step", "4", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    found, expected = (load_file(folder / "model.safetensors") for folder in (out / "policy", policy))
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)
    assert (out / "policy" / "tokenizer.json").read_bytes() == (policy / "tokenizer.json").read_bytes()
    assert specrl_command("export", str(run), "--out", str(out)).exit_code == 2, "it exists"
    (checkpoints.step_directory(run, 10) / checkpoints.STATE).write_text("{ }")
    refused = specrl_command("export", str(run), "--out", str(run.parent / "other"))
    assert refused.exit_code == 2
    assert "is damaged: state.json has 3 bytes instead of" in refused.stderr
    assert not (run.parent / "other").exists()


def a_status(step: int, checkpoint_step: int, *, requested: bool, failures: int = 0) -> StatusReport:
    return StatusReport(
        run="a-run",
        phase=Phase.TRAINING,
        step=step,
        steps=20,
        checkpoint_step=checkpoint_step,
        is_checkpoint_requested=requested,
        counters={"checkpointsFailed": failures},
    )


ASKED = a_status(12, 10, requested=True, failures=1)


@pytest.mark.parametrize(
    ("answers", "code", "said"),
    [
        ([None, ASKED, a_status(13, 12, requested=False, failures=1)], 0, "checkpoint of step 12 is complete"),
        ([a_status(13, 10, requested=False, failures=2)], 1, "the checkpoint could not be written; see "),
        ([a_status(13, 10, requested=False, failures=1)], 1, "the checkpoint could not be written; see "),
        ([KeyboardInterrupt], 130, "no longer waiting; the request stays, and the run goes on"),
    ],
)
def test_save_waits_until_the_checkpoint_is_complete_or_has_failed(
    answers: list[StatusReport | type[KeyboardInterrupt] | None],
    code: int,
    said: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter(answers)

    class Answers:
        """A coordinator that gives these answers and no further one."""

        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Answers:
            return self

        def __exit__(self, *_: object) -> None: ...
        def fetch_status(self) -> StatusReport | None:
            answer = next(left)
            if answer is KeyboardInterrupt:
                raise KeyboardInterrupt
            assert not isinstance(answer, type)
            return answer

    monkeypatch.setattr(checkpoint_command, "CoordinatorReports", Answers)
    monkeypatch.setattr(checkpoint_command, "request_run_action", lambda *_: ASKED)
    monkeypatch.setattr(checkpoint_command, "POLL_S", 0)
    write_token(run)
    with RunDirectory(run).lock():
        found = specrl_command("save", str(run))
    assert found.exit_code == code
    assert "checkpoint requested; the newest is of step 10" in found.stdout
    assert said in found.output
    assert next(left, None) is None


def test_a_request_that_nobody_waits_for_returns_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_command, "request_run_action", lambda *_: ASKED)
    found = specrl_command("save", str(run), "--no-wait")
    assert found.exit_code == 0
    assert found.stdout.endswith("checkpoint requested; the newest is of step 10\n")
