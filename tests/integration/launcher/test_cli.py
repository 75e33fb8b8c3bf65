"""The command line: every bad input is one message with exit code 2, and leaves no run behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from tests.checkpoint_sums import write_checksums
from tests.run_files import a_model_folder, a_run, a_run_file
from tests.unit.report.runs import a_step
from typer.testing import CliRunner, Result

import specrl
from specrl.cli import app, demo, drafter
from specrl.cli.command_exit import describe_stop
from specrl.cli.drafter import copy_atomically
from specrl.coordinator.ledger import SqliteStore
from specrl.coordinator.ledger.continuation import place_of_checkpoint
from specrl.coordinator.ledger.run_inputs import collect_inputs
from specrl.drafting.registry import find_kind
from specrl.errors import RunFailed, RunInterrupted, RunInvalid, RunRefused, SpecInvalid, SpecrlError
from specrl.formats.reports import StatusReport
from specrl.launcher import launch, run_directory
from specrl.launcher.processes.supervisor import Program, Rank
from specrl.launcher.run_directory import RunDirectory
from specrl.prompts import load_prompts
from specrl.spec import RunSpec, dump_spec, load_spec, parse_spec
from specrl.spec.generation import Eagle3
from specrl.version import describe_version

FAKE = str(Path(__file__).with_name("fake_program.py"))
SUMMARY: dict[str, Any] = {
    "steps": 2,
    "firstValidationReward": 0.25,
    "lastValidationReward": 0.5,
    "firstReward": 0.2,
    "lastReward": 0.4,
    "firstAcceptanceLength": None,
    "lastAcceptanceLength": None,
    "policyLagMax": 1,
    "rolloutsTrained": 8,
    "promptsTrained": 4,
    "unaccountedRollouts": 0,
    "exposedGenerationShare": 0.5,
    "policyPath": "/p",
    "drafterPath": "",
    "checkpointPath": "/c",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a folder of its own, on a machine with enough memory and without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30))
    return tmp_path


def specrl_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def assert_refused(result: Result, *parts: str) -> None:
    """One message on stderr, exit code 2, nothing on stdout, no run directory."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("specrl: ")
    assert result.stderr.count("specrl: ") == 1
    assert result.stdout == ""
    for part in parts:
        assert part in result.stderr
    assert list(Path("runs").iterdir()) == [] if Path("runs").exists() else True


def test_the_version_is_printed() -> None:
    """There was no `--version`."""
    result = specrl_command("--version")
    assert (result.exit_code, result.stdout) == (0, f"specrl {describe_version()}\n")


def test_every_command_has_help() -> None:
    commands = (
        "",
        "run",
        "status",
        "pause",
        "resume",
        "checkpoint",
        "checkpoint save",
        "checkpoint list",
        "checkpoint verify",
        "checkpoint export",
        "checkpoint prune",
        "scale",
        "rollouts",
        "report",
        "sft",
        "drafter",
        "drafter init",
        "drafter import",
        "drafter export",
        "store",
        "store inspect",
        "store export",
        "store reset",
        "rewards",
        "rewards grade",
        "families",
        "spec",
        "spec check",
        "spec show",
        "demo",
        "engines",
        "doctor",
    )
    for command in commands:
        result = specrl_command(*command.split(), "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout


# -- refused before anything is written --------------------------------------------------------------------------------


def test_a_wrong_run_file_lists_every_problem(place: Path) -> None:
    file = a_run_file(place, schedule={"steps": -1, "promptsPerStep": 2, "groupSize": 1}, colour="red")
    assert_refused(
        specrl_command("run", "-f", str(file)), "3 problems", "schedule.steps", "schedule.groupSize", "colour"
    )


def test_a_missing_run_file_is_refused(place: Path) -> None:
    assert_refused(specrl_command("run", "-f", "none.yaml"), "none.yaml: must be a readable file")


def test_a_missing_model_is_refused(place: Path) -> None:
    assert_refused(specrl_command("run", "-f", str(a_run_file(place))), "model.path must be a Hugging Face folder")


def test_an_unreachable_sink_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names its package or its server, whichever is missing first."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    a_model_folder(place / "model")
    file = a_run_file(place, telemetry={"sinks": {"mlflow": {}}})
    assert_refused(specrl_command("run", "-f", str(file)), "telemetry.sinks.mlflow.trackingUri: must be set here")


def test_a_run_from_a_checkpoint_copies_it_and_refuses_an_unusable_one(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    file = a_run_file(place)
    source = place / "other" / "checkpoints" / "step-000001"
    source.mkdir(parents=True)
    refused = specrl_command("run", "-f", str(file), "--checkpoint", str(source))
    assert_refused(refused, "must be a complete folder step-NNNNNN", "specrl checkpoint list")
    (source / "state.json").write_text('{"step": 1}')
    write_checksums(source)
    steps = load_spec(file).schedule.steps
    refused = specrl_command("run", "-f", str(file), "--checkpoint", str(source), "--set", "schedule.steps=1")
    assert_refused(refused, "schedule.steps must be greater than the checkpoint's step 1, got 1")
    fakes("finished", summary=SUMMARY)
    (source / "unreadable").symlink_to(place / "nowhere")
    refused = specrl_command("run", "-f", str(file), "--checkpoint", str(source))
    assert_refused(refused, "must take the files of a new run", "make room, name another folder, or repair")
    assert list((place / "runs").iterdir()) == [], "a run without its checkpoint would begin at step 1"
    (source / "unreadable").unlink()
    result = specrl_command("run", "-f", str(file), "--checkpoint", str(source), "--set", f"schedule.steps={steps + 1}")
    assert result.exit_code == 0, result.output
    copy = place / "runs/tiny-1/checkpoints/step-000001/state.json"
    assert copy.read_text() == '{"step": 1}'
    (source / "state.json").write_text('{"step": 9}')
    refused = specrl_command("run", "-f", str(file), "--checkpoint", str(source), "--runs", "others")
    assert refused.exit_code == 2
    assert "state.json does not have the checksum" in refused.stderr


def test_a_checkpoint_of_other_steps_is_refused_before_anything_is_written(
    place: Path, fakes: Callable[..., Path]
) -> None:
    """Only the coordinator compared them, so that a run folder was left behind."""
    fakes("finished", summary=SUMMARY)
    a_model_folder(place / "model")
    file = a_run_file(place)
    spec = load_spec(file)
    per_step = spec.schedule.prompts_per_step
    source = place / "other-1" / "checkpoints" / "step-000001"
    source.mkdir(parents=True)
    stream = asdict(place_of_checkpoint(1, spec, load_prompts(spec)))
    (source / "state.json").write_text(json.dumps({"step": 1, "stream": stream}))
    write_checksums(source)
    command = ["run", "-f", str(file), "--checkpoint", str(source), "--set", "schedule.steps=3"]
    more = ["--set", f"schedule.promptsPerStep={2 * per_step}"]
    for options in ([], ["--dry-run"]):
        assert_refused(
            specrl_command(*command, *more, *options), f"start again with schedule.promptsPerStep={per_step}"
        )
    for options in (["--dry-run"], ["--plain"]):
        result = specrl_command(*command, *options)
        assert result.exit_code == 0, result.output
        assert "starting from the checkpoint of step 1 of other-1; the next step is 2" in result.stdout


def test_an_unreadable_dataset_is_refused(place: Path) -> None:
    a_model_folder(place / "model")
    file = a_run_file(place, prompts={"source": {"jsonl": {"path": "none.jsonl"}}})
    assert_refused(
        specrl_command("run", "-f", str(file), "--set", "model.maxLength=600"), "model.maxLength: must be <= 512"
    )
    assert_refused(
        specrl_command("run", "-f", str(file), "--set", "prompts.maxTokens=80"), "none.jsonl: must be a readable file"
    )


def test_a_malformed_line_is_refused(place: Path) -> None:
    a_model_folder(place / "model")
    (place / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\nnonsense\n')
    file = a_run_file(place, prompts={"source": {"jsonl": {"path": "train.jsonl"}}, "maxTokens": 80})
    assert_refused(specrl_command("run", "-f", str(file)), "train.jsonl:2: must be a JSON object")


def test_a_prompt_longer_than_allowed_is_refused(place: Path) -> None:
    a_model_folder(place / "model")
    file = a_run_file(place, prompts={"source": {"generated": {"family": "ledger", "count": 8}}, "maxTokens": 3})
    refused = specrl_command("run", "-f", str(file))
    assert_refused(refused, "every problem must be valid", "must have 1 to 3 tokens (prompts.maxTokens)")


def test_a_drafter_with_another_tokenizer_is_refused(place: Path) -> None:
    a_model_folder(place / "model")
    a_model_folder(place / "drafter", vocab_size=300)
    speculation = {"eagle3": {"path": "drafter"}}
    file = a_run_file(place, generation={"sampling": {"maxTokens": 16}, "speculation": speculation})
    assert_refused(specrl_command("run", "-f", str(file)), "vocab_size=300", "264")


def test_a_taken_port_is_refused(place: Path) -> None:
    a_model_folder(place / "model")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        result = specrl_command("run", "-f", str(a_run_file(place)), "--set", f"telemetry.grpcPort={port}")
    assert_refused(result, f"telemetry.grpcPort must be a free port, got telemetry.grpcPort={port}")


def test_too_little_memory_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_model_folder(place / "model")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    assert_refused(specrl_command("run", "-f", str(a_run_file(place))), "available memory must be >=", "got 1.0 GiB")


def test_error_messages_reach_the_terminal_without_control_characters(place: Path) -> None:
    file = a_run_file(place, **{"evil\x1b[2J": 1})
    result = specrl_command("run", "-f", str(file))
    assert result.exit_code == 2
    assert "\x1b" not in result.output


# -- without a start ---------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_what_a_run_would_begin_with_and_starts_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "build_programs", None)  # called, it would raise
    a_model_folder(place / "model")
    (place / "train.jsonl").write_text(
        "".join(json.dumps({"question": f"What is {n}+1?", "answer": str(n + 1)}) + "\n" for n in range(4))
    )
    file = a_run_file(
        place,
        prompts={"source": {"jsonl": {"path": "train.jsonl"}}, "maxTokens": 80, "template": "Answer: {question}"},
        rewards={"exact": {"answerAfter": "####"}},
    )
    before = {path.name for path in place.iterdir()}
    result = specrl_command("run", str(file), "--dry-run", "--set", "schedule.steps=3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    resolved, _, shown = result.stdout.partition("run: tiny, digest ")
    assert yaml.safe_load(resolved)["schedule"]["steps"] == 3
    assert yaml.safe_load(resolved)["model"]["path"] == str(place / "model"), "paths are absolute"
    assert "data: 4 problems; 3 steps take 6 prompts, 1.5 epochs" in lines
    prompt = next(line for line in lines if line.startswith("first prompt, as the policy reads it: "))
    text = lines[lines.index(prompt) + 1]
    assert re.fullmatch(r"    Answer: What is \d\+1\?", text)
    assert prompt.endswith(f": {len(text.strip())} tokens of 80"), "this tokenizer has a token per letter"
    reference = lines[lines.index("its reference:") + 1].strip()
    assert reference == str(int(text.split()[-1].split("+")[0]) + 1)
    assert any(line.startswith("    the reference itself: reward 0") for line in lines)
    assert any(line.startswith("    #### and the reference: reward 1") for line in lines)
    assert re.search(r"memory: about \d.* GiB: coordinator .*, replicas 1 x .*, trainer .*; 64.0 GiB available", shown)
    assert re.search(r"disk: about \d.* GiB in runs: 1 x .* of checkpoints, .* for the export; .* GiB free", shown)
    assert "time: not known; no run in runs has trained with these settings" in shown
    assert {path.name for path in place.iterdir()} == before


def test_a_dry_run_estimates_its_time_from_a_run_of_the_same_work_alone(place: Path) -> None:
    a_model_folder(place / "model")
    file = a_run_file(place)
    earlier = run_directory.create_run(place / "runs", load_spec(file))
    earlier.metrics_file.write_text("".join(a_step(n).model_dump_json(by_alias=True) + "\n" for n in (1, 2)))
    same = specrl_command("run", str(file), "--dry-run", "--set", "schedule.steps=60", "--set", "name=other")
    assert "time: about 10 minutes without the start, at 10.0 s a step, the median of 2 steps of tiny-1" in same.stdout
    other = specrl_command("run", str(file), "--dry-run", "--set", "generation.sampling.maxTokens=8")
    assert "time: not known" in other.stdout


@pytest.mark.parametrize("option", ["--dry-run", "--plain"])
def test_a_full_disk_is_refused_before_anything_is_written(
    place: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """The disk was found full by the checkpoint that had no room, hours later."""
    a_model_folder(place / "model")
    usage = shutil.disk_usage(place)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert_refused(specrl_command("run", str(a_run_file(place)), option), "--runs: must be on a disk with ")


def test_a_dry_run_lists_every_problem_and_exits_with_2(place: Path) -> None:
    a_model_folder(place / "model", vocab_size=200)
    data = {"source": {"jsonl": {"path": "none.jsonl"}}, "maxTokens": 80}
    file = str(a_run_file(place, prompts=data))
    refused = specrl_command("run", file, "--dry-run", "--checkpoint", "nowhere")
    assert_refused(refused, "3 problems", "vocab_size=200", "none.jsonl", "must be a complete folder step-NNNNNN")
    assert specrl_command("run", "--resume", "tiny-1", "--dry-run").exit_code == 2


@pytest.mark.parametrize("arguments", [[], ["-f", "run.yaml", "--resume", "tiny-1"]])
def test_run_needs_exactly_one_of_file_and_resume(arguments: list[str]) -> None:
    result = specrl_command("run", *arguments)
    assert result.exit_code == 2
    assert "give either FILE for a new run, or --resume RUN" in result.stderr


@pytest.mark.parametrize("arguments", [["-m", "specrl.cli"], ["-c", "from specrl.cli import main; main()"]])
def test_the_installed_command_refuses_bad_input_without_a_traceback(place: Path, arguments: list[str]) -> None:
    """In a separate process, as a shell runs it."""
    file = a_run_file(place)
    command = [sys.executable, *arguments, "run", "-f", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("specrl: model.path must be")
    assert not (place / "runs").exists()


# -- runs of fake programs ---------------------------------------------------------------------------------------------


@pytest.fixture
def fakes(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Make `specrl run` start fake programs: a coordinator that answers with this status, and a replica."""
    events = place / "events"
    status = place / "status"
    events.touch()
    environment = dict(os.environ) | {"FAKE_EVENTS": str(events), "FAKE_STATUS": str(status)}

    def use(phase: str, replica: str = "", **fields: Any) -> Path:
        status.write_text(json.dumps({"run": "tiny", "phase": phase} | fields))

        def programs(spec: RunSpec, directory: RunDirectory, grpc_port: int, http_port: int) -> Sequence[Program]:
            def a_program(name: str, options: str, stop_order: int) -> Program:
                arguments = (sys.executable, FAKE, name, *shlex.split(options))
                rank = Rank(arguments, environment, directory.logs_folder / f"{name}.log")
                return Program(name, lambda: [rank], stop_order, ends_run=stop_order == 0)

            return [a_program("coordinator", f"--serve {http_port}", 0), a_program("gen-0", replica, 1)]

        monkeypatch.setattr(launch, "build_programs", programs)
        return events

    yield use
    pids = [int(line.split()[2]) for line in events.read_text().splitlines() if " started " in line]
    assert not any(map(psutil.pid_exists, pids))


def test_finished_run_prints_its_summary(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    fakes("finished", summary=SUMMARY, step=2, steps=2)
    result = specrl_command("run", "-f", str(a_run_file(place)), "--plain")
    assert result.exit_code == 0, result.output
    assert "validation reward: 0.250 -> 0.500 (+0.250)" in result.stdout
    assert "policy: /p" in result.stdout
    assert f"logs: {place}/runs/tiny-1/logs" in result.stdout
    assert result.stderr == ""
    assert load_spec(place / "runs/tiny-1/run.yaml") == load_spec(place / "run.yaml")
    assert (place / "runs/tiny-1/logs/coordinator.log").exists()


def test_a_failed_run_exits_with_1_its_error_and_the_command_that_resumes_it(
    place: Path, fakes: Callable[..., Path]
) -> None:
    a_model_folder(place / "model")
    fakes("failed", error="the trainer ran out of luck")
    result = specrl_command("run", "-f", str(a_run_file(place)), "--plain")
    assert result.exit_code == 1
    assert "specrl: the trainer ran out of luck" in result.stderr
    assert f"specrl run --resume {place}/runs/tiny-1" in result.stderr
    (place / "runs/tiny-1/status.json").write_text(json.dumps({"run": "tiny", "phase": "stopped"}))
    status = json.loads(specrl_command("status", "--json").stdout)
    assert (status["running"], status["exitCode"], status["error"]) == (False, 1, "the trainer ran out of luck")
    assert status["phase"] == "failed", "the coordinator was stopped because a program failed, which is not a Ctrl-C"


def test_a_run_that_needs_its_user_exits_with_2_the_reason_and_the_command_that_resumes_it(
    place: Path, fakes: Callable[..., Path]
) -> None:
    """Every failure of the coordinator used to be exit code 1, which suggests that a restart may help."""
    a_model_folder(place / "model")
    fakes("failed", error="step 1 must have a graded rollout to learn from", needsUser=True)
    result = specrl_command("run", "-f", str(a_run_file(place)), "--plain")
    assert result.exit_code == 2
    assert result.stderr.startswith("specrl: step 1 must have a graded rollout to learn from\n")
    assert f"after fixing that, resume with `specrl run --resume {place}/runs/tiny-1`" in result.stderr


def test_a_process_that_refuses_to_run_exits_with_2_and_one_message(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    fakes("waiting", replica="--say 'specrl-generation: the model must fit' --exit 2")
    result = specrl_command("run", "-f", str(a_run_file(place)), "--plain")
    assert result.exit_code == 2
    assert result.stderr == "specrl: the model must fit\n"


def test_a_stopped_run_exits_with_130_what_is_saved_and_the_command_that_resumes_it(
    place: Path, fakes: Callable[..., Path]
) -> None:
    a_model_folder(place / "model")
    fakes("stopped", detail="stopped; step 12 is saved")
    result = specrl_command("run", "-f", str(a_run_file(place)), "--plain")
    assert result.exit_code == 130
    command = f"specrl run --resume {place}/runs/tiny-1"
    assert result.stderr == f"specrl: stopped; step 12 is saved; resume with `{command}`\n"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (None, "stopped before the run had begun"),
        (
            {"step": 12, "checkpointStep": 10},
            "stopped; step 12 is not saved: a resumed run trains again from the checkpoint of step 10",
        ),
        (
            {"step": 3},
            "stopped; step 3 is not saved: there is no checkpoint, so a resumed run trains all steps again",
        ),
        ({"step": 0}, "stopped; no step was trained, so there is nothing to save"),
    ],
)
def test_a_run_that_is_killed_says_that_it_was_not_saved(fields: dict[str, Any] | None, said: str) -> None:
    """It said that the run was being saved, and then resumed from ten steps before."""
    status = None if fields is None else StatusReport.model_validate({"run": "tiny", "phase": "training"} | fields)
    assert describe_stop(status) == said


# -- from Python -------------------------------------------------------------------------------------------------------


SMILE = "{question} \U0001f600"  # a character that JSON escapes as two


def test_python_runs_a_file_or_its_content_and_returns_the_summary(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    fakes("finished", summary=SUMMARY, step=2, steps=2)
    content = a_run(place) | {"model": {"path": "model", "dtype": "float32", "maxLength": 128}}
    before = json.dumps(content)
    for number, file in enumerate((a_run_file(place), str(place / "run.yaml"), content), 1):
        overrides = {"schedule.steps": 7, "trainer.optimizer.learningRate": 1e-5, "prompts.template": SMILE}
        finished = specrl.run(file, overrides=overrides, quiet=True)
        assert finished.path == place / "runs" / f"tiny-{number}"
        assert (finished.summary.policy_path, finished.summary.last_reward) == ("/p", 0.4)
        spec = load_spec(finished.path / "run.yaml")
        assert (spec.schedule.steps, spec.trainer.optimizer.learning_rate) == (7, Decimal("1e-5"))
        assert spec.model.path == str(place / "model")
        assert spec.prompts.template == SMILE
    assert json.dumps(content) == before, "the caller's dictionary is not changed"


@pytest.mark.parametrize(
    ("phase", "fields", "error"),
    [
        ("failed", {"error": "the trainer ran out of luck"}, RunFailed),
        ("failed", {"error": "no verdict", "needsUser": True}, RunRefused),
        ("stopped", {}, RunInterrupted),
    ],
)
def test_python_gets_every_other_end_as_an_exception(
    place: Path, fakes: Callable[..., Path], phase: str, fields: dict[str, Any], error: type[SpecrlError]
) -> None:
    a_model_folder(place / "model")
    fakes(phase, **fields)
    with pytest.raises(error, match=r"specrl\.run\(resume='.*/runs/tiny-1'\)") as raised:
        specrl.run(a_run_file(place), quiet=True)
    assert fields.get("error", "was stopped") in str(raised.value)


def test_python_resumes_a_run_and_reads_its_figures(directory: RunDirectory, fakes: Callable[..., Path]) -> None:
    fakes("finished", summary=SUMMARY)
    assert specrl.run(resume="tiny-1", quiet=True).path == directory.path
    directory.metrics_file.write_text(a_step(1, reward=0.25).model_dump_json(by_alias=True) + "\n")
    report = specrl.load_report("tiny-1")
    assert (report.run, report.steps, report.last_reward) == ("tiny-1", 1, 0.25)


def test_python_is_told_what_the_command_is_told(place: Path) -> None:
    with pytest.raises(SpecInvalid, match=r"schedule\.steps"):
        specrl.run(a_run(place), overrides=["schedule.steps=-1"])
    with pytest.raises(SpecrlError, match=r"model\.path must be a Hugging Face folder"):
        specrl.run(a_run(place), quiet=True)
    with pytest.raises(RunInvalid, match="either `file` or `resume`"):
        specrl.run()
    with pytest.raises(RunInvalid, match="`checkpoint` needs `file`"):
        specrl.run(resume="tiny-1", checkpoint="step-000001")
    with pytest.raises(RunInvalid, match=r"got the text 'schedule\.steps=1'"):
        specrl.run(a_run(place), overrides="schedule.steps=1")
    with pytest.raises(RunInvalid, match="RUN must be a run's folder"):
        specrl.load_report("none")
    assert not (place / "runs").exists()


def test_a_script_without_a_main_guard_is_run_once(place: Path) -> None:
    """Checking a verifier spawns a process, which would run the script again, and with it `specrl.run`."""
    (place / "my_rewards.py").write_text("def grade(reference, completion):\n    return 1.0\n")
    file = a_run_file(place, rewards={"python": {"function": "my_rewards:grade", "folder": "."}})
    (place / "script.py").write_text(
        f"open('seen', 'a').write('x')\nimport specrl\nspecrl.run({str(file)!r}, quiet=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=place, capture_output=True, text=True, timeout=300, check=False
    )
    assert "specrl.errors.SpecInvalid: model.path must be a Hugging Face folder" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1
    assert (place / "seen").read_text() == "x"


def test_python_refuses_to_run_where_it_could_not_work(place: Path) -> None:
    """Only the main thread receives Ctrl-C, and a notebook's event loop is busy with the cell."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(RunInvalid, match="in the main thread"):
        pool.submit(specrl.run, a_run(place)).result()

    async def call() -> None:
        specrl.run(a_run(place))

    with pytest.raises(RunInvalid, match="in a running event loop, such as a notebook's"):
        asyncio.run(call())


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(place: Path) -> RunDirectory:
    """A run that was started earlier."""
    a_model_folder(place / "model")
    return run_directory.create_run(place / "runs", parse_spec(a_run(place)))


def test_resume_continues_in_the_same_directory(directory: RunDirectory, fakes: Callable[..., Path]) -> None:
    fakes("finished", summary=SUMMARY)
    before = directory.run_file.read_bytes()
    assert specrl_command("run", "--resume", "tiny-1").exit_code == 0
    assert directory.run_file.read_bytes() == before
    assert [path.name for path in Path("runs").iterdir()] == ["tiny-1"]


def test_resume_says_from_where_it_goes_on_and_what_is_lost(
    directory: RunDirectory, fakes: Callable[..., Path]
) -> None:
    """After SIGKILL of the launcher it showed the earlier steps, not what became of those after the checkpoint."""
    fakes("finished", summary=SUMMARY)
    checkpoint = directory.path / "checkpoints" / "step-000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    directory.metrics_file.write_text("".join(a_step(n).model_dump_json(by_alias=True) + "\n" for n in range(1, 8)))
    said = specrl_command("run", "--resume", "tiny-1", "--plain").stdout
    assert "resuming from the checkpoint of step 5; the store is gone, so that steps 6 to 7 cannot be" in said


@pytest.mark.parametrize(
    ("reported", "saved", "has_store", "said"),
    [
        (4, 4, True, "the checkpoint of step 4; no step is lost"),
        (3, 4, True, "the checkpoint of step 4; no step is lost"),
        (6, 5, True, "the checkpoint of step 5; nothing is lost: step 6 will be trained again from stored rollouts"),
        (2, 0, True, "no checkpoint yet; nothing is lost: steps 1 to 2 will be trained again from stored rollouts"),
        (6, 5, False, "the checkpoint of step 5; the store is gone, so that step 6 cannot be trained again"),
        (0, 0, False, "the policy as it came, since there is no checkpoint yet; no step is lost"),
    ],
)
def test_a_resumption_is_described(reported: int, saved: int, has_store: bool, said: str) -> None:
    assert launch.describe_resumption(reported, saved, has_store=has_store).endswith(said)


def test_resume_may_change_the_number_of_replicas(directory: RunDirectory, fakes: Callable[..., Path]) -> None:
    fakes("finished", summary=SUMMARY)
    result = specrl_command("run", "--resume", str(directory.path), "--set", "generation.replicas=2")
    assert result.exit_code == 0, result.output
    assert load_spec(directory.run_file).generation.replicas == 2


def test_resume_refuses_any_other_change(directory: RunDirectory) -> None:
    before = directory.run_file.read_bytes()
    result = specrl_command("run", "--resume", "tiny-1", "--set", "schedule.steps=9")
    assert result.exit_code == 2
    assert (
        "--set must change nothing but generation.replicas and kvCacheMib with --resume, got --set schedule.steps=9"
        in result.stderr
    )
    assert directory.run_file.read_bytes() == before


def test_the_refusal_names_the_command_for_more_steps(directory: RunDirectory) -> None:
    """It named a new run from step 0."""
    checkpoint = directory.path / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    result = specrl_command("run", "--resume", "tiny-1", "--set", "schedule.steps=9")
    command = f"`specrl run {directory.run_file} --set ... --checkpoint {checkpoint}`"
    assert command in result.stderr


def test_resume_of_a_finished_run_starts_nothing(directory: RunDirectory, fakes: Callable[..., Path]) -> None:
    """It started all processes for a minute, to finish again."""
    fakes("failed", error="it was started")
    exported = directory.path / "export"
    exported.mkdir()
    status = {"run": "tiny", "phase": "finished", "step": 2, "summary": {**SUMMARY, "policyPath": str(exported)}}
    directory.status_file.write_text(json.dumps(status))
    result = specrl_command("run", "--resume", "tiny-1")
    assert result.exit_code == 0, result.output
    assert "run tiny-1 finished at step 2, so there is nothing to resume" in result.stdout
    assert not list(directory.logs_folder.iterdir())


def test_resume_of_a_finished_run_refuses_an_edited_run_file(
    directory: RunDirectory, fakes: Callable[..., Path]
) -> None:
    """It said that there is nothing to resume, and ignored that its user had asked for more steps."""
    exported = directory.path / "export"
    exported.mkdir()
    status = {"run": "tiny", "phase": "finished", "step": 2, "summary": {**SUMMARY, "policyPath": str(exported)}}
    directory.status_file.write_text(json.dumps(status))
    checkpoint = directory.path / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    spec = load_spec(directory.run_file)
    inputs = collect_inputs(spec, [], [])
    store = SqliteStore(directory.path / "store.db")
    store.set_fact("inputs", inputs.model_dump(mode="json", by_alias=True))
    store.close()
    assert specrl_command("run", "--resume", "tiny-1").exit_code == 0

    schedule = spec.schedule.model_copy(update={"steps": 12})
    directory.run_file.write_text(dump_spec(spec.model_copy(update={"schedule": schedule})))
    result = specrl_command("run", "--resume", "tiny-1")
    assert result.exit_code == 2
    assert f"schedule.steps: 12, was {spec.schedule.steps}" in result.stderr
    assert f"`specrl run {directory.run_file} --checkpoint {checkpoint}`" in result.stderr


def test_resume_of_a_running_run_is_refused(directory: RunDirectory) -> None:
    with directory.lock():
        result = specrl_command("run", "--resume", "tiny-1")
    assert result.exit_code == 2
    assert "RUN must not be active" in result.stderr


def test_resume_of_an_unknown_run_names_the_known_runs(directory: RunDirectory) -> None:
    result = specrl_command("run", "--resume", "tony-1")
    assert result.exit_code == 2
    assert "runs there: tiny-1" in result.stderr


# -- status ------------------------------------------------------------------------------------------------------------


def test_status_of_a_finished_run_is_read_from_its_folder(directory: RunDirectory) -> None:
    directory.status_file.write_text(json.dumps({"run": "tiny", "phase": "finished", "summary": SUMMARY}))
    result = specrl_command("status")
    assert result.exit_code == 0, result.output
    assert "0.250 -> 0.500 (+0.250)" in result.stdout
    assert "--resume" not in result.stdout


def test_status_of_a_run_whose_launcher_died_shows_the_command_that_resumes_it(directory: RunDirectory) -> None:
    directory.status_file.write_text(json.dumps({"run": "tiny", "phase": "training", "step": 1, "steps": 2}))
    directory.endpoints_file.write_text(json.dumps({"http": "http://127.0.0.1:1"}))
    result = specrl_command("status", "tiny-1")
    assert result.exit_code == 0, result.output
    assert f"not running; resume with `specrl run --resume {directory.path}`" in result.stdout


def test_status_describes_failures_and_steps_without_a_training_signal(directory: RunDirectory) -> None:
    """The status used to say `ungraded 36, failedPrompts 2`, which looked harmless, and nothing about equal rewards."""
    error = "KeyError at my_rewards.py:12"
    counters = {"ungraded": 36, "failedPrompts": 2}
    status = {"run": "tiny", "phase": "training", "counters": counters, "givenUp": {error: 2}}
    directory.status_file.write_text(json.dumps(status))
    step = a_step(1, groups=4, groups_without_signal=4, failed={"000001-00000": error})
    directory.metrics_file.write_text(step.model_dump_json(by_alias=True) + "\n")
    shown = specrl_command("status").stdout
    assert "rollouts that could not be graded and were sampled again: 36" in shown
    assert f"prompts given up, by reason: {error} (2)" in shown
    assert f"step 1: 1 prompt given up: {error} (1)" in shown
    assert "step 1: 4 of 4 groups have no training signal: the rewards within each group are equal" in shown


def test_status_as_json_is_true_of_a_run_whose_launcher_was_killed(directory: RunDirectory) -> None:
    """Its phase was the last that was written, which looked like a run that goes on, with replicas that serve."""
    replica = {"id": "gen-0", "state": "serving", "policyVersion": 1, "liveRollouts": 4}
    status = {"run": "tiny", "phase": "training", "step": 1, "steps": 2, "replicas": [replica], "trainer": "training"}
    directory.status_file.write_text(json.dumps(status))
    found = read_state()
    assert (found["phase"], found["running"], found["exitCode"]) == ("stopped", False, None)
    assert (found["replicas"], found["trainer"], found["step"]) == ([], "absent", 1)


def test_status_as_json_is_true_of_a_run_that_starts_again(directory: RunDirectory) -> None:
    """Until its coordinator answers, the folder has the status of the launch before."""
    failed = {"run": "tiny", "phase": "failed", "step": 1, "steps": 2, "error": "the disk was full"}
    directory.status_file.write_text(json.dumps(failed))
    directory.outcome_file.write_text(json.dumps({"exitCode": 1, "error": "the disk was full"}))
    assert (read_state()["phase"], read_state()["error"]) == ("failed", "the disk was full")
    with directory.lock():
        directory.outcome_file.unlink()  # as a launch does
        found = read_state()
        assert (found["phase"], found["running"], found["error"], found["step"]) == ("waiting", True, None, 1)
    found = read_state()  # that launch was killed before its coordinator wrote a status
    assert (found["phase"], found["running"], found["error"]) == ("stopped", False, None)


def test_status_as_json_exists_before_the_coordinator_has_written_one(directory: RunDirectory) -> None:
    """A script that polls from the first second on got exit code 2 and no JSON."""
    with directory.lock():
        found = read_state()
    assert (found["phase"], found["running"], found["step"], found["steps"]) == ("waiting", True, 0, 2)


def read_state() -> dict[str, Any]:
    result = specrl_command("status", "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_status_as_json_is_what_the_coordinator_wrote(directory: RunDirectory) -> None:
    with directory.lock():
        directory.status_file.write_text(json.dumps({"run": "tiny", "phase": "training", "step": 1}))
        status = read_state()
    assert (status["phase"], status["step"]) == ("training", 1)


def test_status_before_the_first_phase_is_refused(directory: RunDirectory) -> None:
    result = specrl_command("status")
    assert result.exit_code == 2
    assert "never started" in result.stderr


def test_status_of_a_run_that_failed_before_its_first_phase_says_why(directory: RunDirectory) -> None:
    """It said that the run never started, though --json had the reason."""
    directory.outcome_file.write_text(json.dumps({"exitCode": 2, "error": "the port is taken"}))
    result = specrl_command("status")
    assert result.exit_code == 0, result.output
    assert "the port is taken" in result.stdout


def test_ctrl_c_ends_the_watching_and_not_the_run(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that all processes have ended. A run that starts was not watched at all."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with directory.lock():
        monkeypatch.setattr(time, "sleep", interrupt)
        result = specrl_command("status", "--watch")
    assert result.exit_code == 130
    assert "no longer watching; the run goes on" in result.stderr
    assert "give either --watch or --json" in specrl_command("status", "--watch", "--json").stderr


def test_a_place_that_cannot_be_written_to_is_refused(place: Path) -> None:
    """Each ended with a traceback."""
    (place / "file").touch()
    (place / "data.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    a_model_folder(place / "model")
    commands = [
        ("init", "--model", "model", "--data", "data.jsonl", "--out", "/proc/run.yaml"),
        ("simulate", "paper-8b-zero-sync", "--out", "file"),
        ("plan", "paper-8b-zero-sync", "--out", "file"),
    ]
    for command in commands:
        result = specrl_command(*command)
        assert result.exit_code == 2, result.output
        assert "--out must be a place that can be written to, got " in result.stderr
    with pytest.raises(RunInvalid, match="the run keeps it in model"):
        copy_atomically(Path("model"), Path("file/drafter"), None)


def test_status_without_runs_is_refused() -> None:
    assert_refused(specrl_command("status"), "--runs must be a folder with a run, got none in runs")


# -- drafter, spec, families, demo -------------------------------------------------------------------------------------


def test_drafter_init_copies_the_exported_drafter(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    a_model_folder(place / "export")
    fakes("finished", summary=SUMMARY | {"policyPath": "", "drafterPath": str(place / "export")})
    file = a_run_file(place, generation={"sampling": {"maxTokens": 16}, "speculation": {"eagle3": {}}})
    result = specrl_command("drafter", "init", "-f", str(file), "--out", "out/drafter")
    assert result.exit_code == 0, result.output
    # It ends with how the drafter is used. A run without steps has no report, and its policy is not its own.
    *_, last = result.stdout.splitlines()
    assert last == (
        "drafter written to out/drafter; use it in a run with --set generation.speculation.eagle3.path=out/drafter"
    )
    assert "specrl report" not in result.stdout
    assert "vllm serve" not in result.stdout
    assert (place / "out/drafter/config.json").is_file()
    assert [path.name for path in (place / "out").iterdir()] == ["drafter"]
    assert load_spec(place / "runs/tiny-1/run.yaml").schedule.steps == 0
    assert_refused_without_a_second_run(specrl_command("drafter", "init", "-f", str(file), "--out", "out/drafter"))


def assert_refused_without_a_second_run(result: Result) -> None:
    assert result.exit_code == 2
    assert "--out must not exist, got the folder " in result.stderr
    assert [path.name for path in Path("runs").iterdir()] == ["tiny-1"]


START = {
    "rollouts": 144,
    "lossPerEpoch": [2.0, 1.0],
    "heldOutLengthPerEpoch": [1.5, 2.05],
    "trainedAcceptedPerPosition": [0.8, 0.4],
    "trainedAcceptanceLength": 2.2,
    "heldOutPrompts": 16,
    "heldOutAcceptedPerPosition": [0.7, 0.35],
    "heldOutAcceptanceLength": 2.05,
    "heldOutError": 0.1,
    "points": [{"rollouts": 144, "epochs": 2, "heldOutAcceptanceLength": 2.05}],
    "stopReason": "epochsSpent",
    "expectedGain": None,
    "expectedGainLow": None,
    "expectedGainHigh": None,
    "conclusion": "the drafter reached acceptance length 2.05 +- 0.10 on 16 held-out prompts",
}


def test_drafter_init_resumes_an_interrupted_initialisation_and_reports_acceptance(
    place: Path, fakes: Callable[..., Path]
) -> None:
    a_model_folder(place / "model")
    a_model_folder(place / "export")
    file = a_run_file(place, generation={"sampling": {"maxTokens": 16}, "speculation": {"eagle3": {}}})
    fakes("failed", error="the machine burnt down")
    begun = specrl_command("drafter", "init", "-f", str(file), "--out", "out")
    assert begun.exit_code == 1
    run = place / "runs" / "tiny-1"
    assert f"resume with `specrl drafter init --resume {run} --out out`" in begun.stderr
    assert not (place / "out").exists()
    fakes("finished", summary=SUMMARY | {"drafterPath": str(place / "export"), "drafterStart": START})
    resumed = specrl_command("drafter", "init", "--resume", "tiny-1", "--out", "out")
    assert resumed.exit_code == 0, resumed.output
    said = "acceptance length 2.05 +- 0.10 on 16 held-out prompts; drafts accepted by position: 0.70, 0.35"
    assert said in resumed.stdout
    assert json.loads((place / "out" / "acceptance.json").read_text()) == START
    assert [path.name for path in (place / "runs").iterdir()] == ["tiny-1"]


def test_drafter_init_refuses_to_resume_any_other_run(directory: RunDirectory) -> None:
    result = specrl_command("drafter", "init", "--resume", str(directory.path), "--out", "out")
    assert result.exit_code == 2
    assert f"resume that one with `specrl run --resume {directory.path}`" in result.stderr
    for wrong in ([], ["-f", "run.yaml", "--resume", "tiny-1"]):
        assert specrl_command("drafter", "init", "--out", "out", *wrong).exit_code == 2


def test_an_exported_drafter_can_be_imported_again(place: Path) -> None:
    from tests.tiny_models import make_policy  # needs torch, which the command line itself does not

    from specrl.drafting.eagle3.head import write_untrained_head

    policy = make_policy(place / "policy")
    write_untrained_head(place / "ours", policy, Eagle3(), seed=1)
    to = ("--policy", "policy", "--out")
    out = specrl_command("drafter", "export", "ours", "--format", "speculators", *to, "out/theirs")
    assert out.exit_code == 0, out.output
    back = specrl_command("drafter", "import", "out/theirs", *to, "back")
    assert back.exit_code == 0, back.output
    assert "drafts 264 of 264 vocabulary tokens, reads the policy's layers 2, 3, 4" in back.stdout
    assert (place / "back" / "model.safetensors").read_bytes() == (place / "ours" / "model.safetensors").read_bytes()
    refused = specrl_command("drafter", "import", "policy", *to, "other")
    assert_refused(refused, "architectures must be LlamaForCausalLMEagle3")
    taken = specrl_command("drafter", "export", "ours", "--format", "eagle3", "--out", "out")
    assert_refused(taken, "--out must not exist")


def test_drafter_init_needs_a_fresh_eagle3(place: Path) -> None:
    assert_refused(
        specrl_command("drafter", "init", "-f", str(a_run_file(place)), "--out", "out"),
        "generation.speculation.eagle3: must be given to train a drafter, got none",
    )
    speculation = {"eagle3": {"path": "old"}}
    spec = parse_spec(a_run(place, generation={"sampling": {"maxTokens": 16}, "speculation": speculation}))
    with pytest.raises(SpecInvalid, match="must be null for a fresh drafter"):
        drafter.keep_only_initialisation(spec)


def test_drafter_init_trains_the_heads_that_a_policy_ships(place: Path) -> None:
    """A run with steps takes them as they are."""
    spec = parse_spec(a_run(place, generation={"sampling": {"maxTokens": 16}, "speculation": {"mtp": {}}}))
    kind = find_kind(spec)
    assert kind is not None
    assert not kind.is_fresh(spec)
    assert kind.is_fresh(drafter.keep_only_initialisation(spec))
    assert drafter.choose_path_field(spec) == "model.path"


def test_spec_check_and_show_accept_the_output_of_show(place: Path) -> None:
    file = a_run_file(place)
    checked = specrl_command("spec", "check", str(file))
    assert checked.exit_code == 0
    assert "run tiny is valid" in checked.stdout
    shown = specrl_command("spec", "show", str(file), "--set", "schedule.steps=7")
    assert yaml.safe_load(shown.stdout)["schedule"]["steps"] == 7
    (place / "again.yaml").write_text(shown.stdout)
    assert specrl_command("spec", "show", "again.yaml").stdout == shown.stdout


def test_spec_check_of_a_wrong_file_is_refused(place: Path) -> None:
    assert_refused(specrl_command("spec", "check", str(a_run_file(place, name="UPPER"))), "name: must match pattern")


def test_spec_check_names_all_malformed_fields_first_then_all_broken_rules_and_failed_checks(place: Path) -> None:
    a_model_folder(place / "model", vocab_size=200)
    data = {"source": {"jsonl": {"path": "none.jsonl"}}, "maxTokens": 80, "template": "no question"}
    file = str(a_run_file(place, prompts=data, telemetry={"httpPort": 7777, "grpcPort": 7777}))
    malformed = ("--set", "schedule.steps=-1", "--set", "colour=red")
    for options in ((), ("--preflight",)):
        fields = specrl_command("spec", "check", file, *options, *malformed)
        assert_refused(fields, "2 problems", "schedule.steps", "colour")
    assert_refused(specrl_command("spec", "check", file), "prompts.template: must contain {question}")
    expected = (
        "4 problems",
        "prompts.template: must contain {question}",
        "got 256 tokens for vocab_size=200",
        "none.jsonl: must be a readable file",
        "telemetry.grpcPort must differ",
    )
    assert_refused(specrl_command("spec", "check", "--preflight", file), *expected)
    assert_refused(specrl_command("run", "-f", file), *expected)


def test_families_are_listed_with_an_example() -> None:
    result = specrl_command("families")
    assert result.exit_code == 0
    for name in ("addition", "ledger", "wordProblem"):
        assert name in result.stdout


@pytest.fixture
def examples(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A demo folder with a run file, and a policy script that records its arguments."""
    folder = place / "examples/demo"
    folder.mkdir(parents=True)
    a_run_file(folder)
    (folder / "make_policy.py").write_text(
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "from tests.run_files import a_model_folder\n"
        "a_model_folder(pathlib.Path(sys.argv[2]))\n"
        f"open({str(place / 'made')!r}, 'a').write(' '.join(sys.argv[3:]) + '\\n')\n"
    )
    monkeypatch.setattr(demo, "DEMO", folder)
    return folder


def test_demo_makes_a_policy_and_runs_with_it(place: Path, examples: Path, fakes: Callable[..., Path]) -> None:
    fakes("finished", summary=SUMMARY)
    result = specrl_command("demo", "--steps", "5", "--seed", "3", "--out", "out", "--plain", "--no-compare")
    assert result.exit_code == 0, result.output
    spec = load_spec(place / "out/tiny-1/run.yaml")
    assert (spec.schedule.steps, spec.schedule.seed) == (5, 3)
    assert spec.model.path == str(place / "out/demo-policy-3")
    assert (place / "made").read_text() == "--seed 3 --plain\n"
    assert "validation reward: 0.250 -> 0.500" in result.stdout
    assert "with and without speculation" not in result.stdout


def test_demo_makes_a_new_policy_unless_keep_policy_is_given(
    place: Path, examples: Path, fakes: Callable[..., Path]
) -> None:
    fakes("finished", summary=SUMMARY)
    for arguments, made in ((["--keep-policy"], 1), (["--keep-policy"], 1), ([], 2)):
        assert specrl_command("demo", "--no-compare", *arguments).exit_code == 0
        assert len((place / "made").read_text().splitlines()) == made
    assert sorted(path.name for path in Path("runs").iterdir()) == ["demo-policy", "tiny-1", "tiny-2", "tiny-3"]


def test_demo_starts_no_run_when_making_the_policy_fails(place: Path, examples: Path) -> None:
    (examples / "make_policy.py").write_text("raise SystemExit(3)")
    assert_refused(specrl_command("demo"), "making the demo's policy failed with exit code 3")


def test_a_failed_comparison_is_reported_and_does_not_fail_the_run(
    place: Path, examples: Path, fakes: Callable[..., Path]
) -> None:
    fakes("finished", summary=SUMMARY)
    result = specrl_command("demo", "--out", "out", "--plain")
    assert result.exit_code == 0, "the policy of the fake run cannot be loaded, and the run is done all the same"
    assert "the comparison failed with exit code" in result.stdout
    assert "error: " in (place / "out/tiny-1/logs/comparison.log").read_text()


def test_a_comparison_says_what_it_does_meanwhile(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It printed nothing for seven minutes, so that its user could not tell whether anything happened."""
    monkeypatch.setattr(demo, "QUIET_S", 0.05)
    log, progress = place / "comparison.log", place / "progress"
    script = (
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).write_text('measuring none with 8 live rollouts, 2 of 42 done')\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.02)\n"
    )
    shown: list[str] = []

    def echo(line: str) -> None:
        shown.append(line)
        if "measuring none" in line:
            (place / "enough").touch()

    monkeypatch.setattr(demo.typer, "echo", echo)
    command = [sys.executable, "-c", script, str(progress), str(place / "enough")]
    assert demo.run_with_progress(command, log, progress) == 0
    assert any(line.startswith("  comparison: measuring none with 8 live rollouts, 2 of 42 done (") for line in shown)


def test_ctrl_c_during_the_comparison_keeps_the_finished_run(
    place: Path, examples: Path, fakes: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_arguments: object) -> int:
        raise KeyboardInterrupt

    fakes("finished", summary=SUMMARY)
    monkeypatch.setattr(demo, "run_with_progress", interrupt)
    result = specrl_command("demo", "--out", "out", "--plain")
    assert result.exit_code == 0
    assert "Ctrl-C ends the comparison and loses nothing of the run" in result.stdout
    assert "the comparison was stopped; the run itself is finished" in result.stdout
