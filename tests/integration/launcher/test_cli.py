"""The command line: every bad input is one message and exit code 2, and leaves no run behind."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from tests.run_files import a_model_folder, a_run, a_run_file
from tests.unit.report.runs import a_step
from typer.testing import CliRunner, Result

from specrl.cli import app, demo, drafter
from specrl.errors import SpecInvalid
from specrl.launcher import launch, run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.supervisor import Program, Rank
from specrl.spec import RunSpec, load_spec, parse_spec
from specrl.spec.generation import Eagle3
from specrl.trainer import checksums

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
    "discardedForAge": 0,
    "exposedGenerationShare": 0.5,
    "policyPath": "/p",
    "drafterPath": "",
    "checkpointPath": "/c",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder of its own, on a machine with memory and without GPUs."""
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


def test_every_command_explains_itself() -> None:
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
    )
    for command in commands:
        result = specrl_command(*command.split(), "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout


# -- refused before anything is written --------------------------------------------------------------------------------


def test_wrong_spec_lists_every_problem(place: Path) -> None:
    file = a_run_file(place, schedule={"steps": -1, "promptsPerStep": 2, "groupSize": 1}, colour="red")
    assert_refused(
        specrl_command("run", "-f", str(file)), "3 problems", "schedule.steps", "schedule.groupSize", "colour"
    )


def test_missing_run_file(place: Path) -> None:
    assert_refused(specrl_command("run", "-f", "none.yaml"), "none.yaml: must be a readable file")


def test_missing_model(place: Path) -> None:
    assert_refused(specrl_command("run", "-f", str(a_run_file(place))), "model.path must be a Hugging Face folder")


def test_a_sink_that_cannot_be_reached_from_here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package or its server, whichever is missing first."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    a_model_folder(place / "model")
    file = a_run_file(place, telemetry={"sinks": {"mlflow": {}}})
    assert_refused(specrl_command("run", "-f", str(file)), "telemetry.sinks.mlflow.trackingUri: must be given")


def test_run_from_a_checkpoint_has_a_copy_and_refuses_what_is_none(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    file = a_run_file(place)
    source = place / "other" / "checkpoints" / "step-000001"
    source.mkdir(parents=True)
    refused = specrl_command("run", "-f", str(file), "--checkpoint", str(source))
    assert_refused(refused, "must be a complete folder step-NNNNNN", "specrl checkpoint list")
    (source / "state.json").write_text('{"step": 1}')
    checksums.write(source, checksums.of_folder(source))
    steps = load_spec(file).schedule.steps
    refused = specrl_command("run", "-f", str(file), "--checkpoint", str(source), "--set", "schedule.steps=1")
    assert_refused(refused, "schedule.steps must be more than the step of the checkpoint, 1, got 1")
    fakes("finished", summary=SUMMARY)
    result = specrl_command("run", "-f", str(file), "--checkpoint", str(source), "--set", f"schedule.steps={steps + 1}")
    assert result.exit_code == 0, result.output
    copy = place / "runs/tiny-1/checkpoints/step-000001/state.json"
    assert copy.read_text() == '{"step": 1}'
    (source / "state.json").write_text('{"step": 9}')
    refused = specrl_command("run", "-f", str(file), "--checkpoint", str(source), "--runs", "others")
    assert refused.exit_code == 2
    assert "must be as it was written, got state.json must have the checksum" in refused.stderr


def test_unreadable_dataset(place: Path) -> None:
    a_model_folder(place / "model")
    file = a_run_file(place, prompts={"source": {"jsonl": {"path": "none.jsonl"}}})
    assert_refused(specrl_command("run", "-f", str(file), "--set", "model.maxLength=600"), "maxLength must be <= 512")
    assert_refused(
        specrl_command("run", "-f", str(file), "--set", "prompts.maxTokens=80"), "none.jsonl: must be a readable file"
    )


def test_malformed_line(place: Path) -> None:
    a_model_folder(place / "model")
    (place / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\nnonsense\n')
    file = a_run_file(place, prompts={"source": {"jsonl": {"path": "train.jsonl"}}, "maxTokens": 80})
    assert_refused(specrl_command("run", "-f", str(file)), "train.jsonl:2: must be a JSON object")


def test_prompt_longer_than_allowed(place: Path) -> None:
    a_model_folder(place / "model")
    file = a_run_file(place, prompts={"source": {"generated": {"family": "ledger", "count": 8}}, "maxTokens": 3})
    assert_refused(
        specrl_command("run", "-f", str(file)), "every problem must fit", "must be 1 to 3 (prompts.maxTokens)"
    )


def test_tokenizer_mismatch(place: Path) -> None:
    a_model_folder(place / "model")
    a_model_folder(place / "drafter", vocab_size=300)
    speculation = {"eagle3": {"path": "drafter"}}
    file = a_run_file(place, generation={"sampling": {"maxTokens": 16}, "speculation": speculation})
    assert_refused(specrl_command("run", "-f", str(file)), "vocab_size=300", "264")


def test_port_taken(place: Path) -> None:
    a_model_folder(place / "model")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        result = specrl_command("run", "-f", str(a_run_file(place)), "--set", f"telemetry.grpcPort={port}")
    assert_refused(result, f"telemetry.grpcPort must be a free port, got telemetry.grpcPort={port}")


def test_too_little_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_model_folder(place / "model")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    assert_refused(specrl_command("run", "-f", str(a_run_file(place))), "available memory must be >=", "got 1.0 GiB")


def test_message_reaches_the_terminal_without_its_control_characters(place: Path) -> None:
    file = a_run_file(place, **{"evil\x1b[2J": 1})
    result = specrl_command("run", "-f", str(file))
    assert result.exit_code == 2
    assert "\x1b" not in result.output


@pytest.mark.parametrize("arguments", [[], ["-f", "run.yaml", "--resume", "tiny-1"]])
def test_run_needs_exactly_one_of_file_and_resume(arguments: list[str]) -> None:
    result = specrl_command("run", *arguments)
    assert result.exit_code == 2
    assert "give either -f FILE for a new run, or --resume RUN" in result.stderr


@pytest.mark.parametrize("arguments", [["-m", "specrl.cli"], ["-c", "from specrl.cli import main; main()"]])
def test_installed_command_refuses_without_a_traceback(place: Path, arguments: list[str]) -> None:
    """The same through a process of its own: what the shell sees."""
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
    events, status = place / "events", place / "status"
    events.touch()
    environment = dict(os.environ) | {"FAKE_EVENTS": str(events), "FAKE_STATUS": str(status)}

    def use(phase: str, replica: str = "", **fields: Any) -> Path:
        status.write_text(json.dumps({"run": "tiny", "phase": phase} | fields))

        def programs(spec: RunSpec, directory: RunDirectory, grpc_port: int, http_port: int) -> Sequence[Program]:
            def a_program(name: str, options: str, stop_order: int) -> Program:
                arguments = (sys.executable, FAKE, name, *shlex.split(options))
                rank = Rank(arguments, environment, directory.logs / f"{name}.log")
                return Program(name, lambda: [rank], stop_order, ends_run=stop_order == 0)

            return [a_program("coordinator", f"--serve {http_port}", 0), a_program("gen-0", replica, 1)]

        monkeypatch.setattr(launch, "programs_of", programs)
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


def test_failed_run_is_exit_one_with_its_error_and_how_to_go_on(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    fakes("failed", error="the trainer ran out of luck")
    result = specrl_command("run", "-f", str(a_run_file(place)), "--plain")
    assert result.exit_code == 1
    assert "specrl: the trainer ran out of luck" in result.stderr
    assert f"specrl run --resume {place}/runs/tiny-1" in result.stderr


def test_a_run_that_its_user_must_repair_is_exit_two_with_the_reason_and_how_to_go_on(
    place: Path, fakes: Callable[..., Path]
) -> None:
    """Whatever ended the coordinator's run was exit code 1, which says that a restart may help."""
    a_model_folder(place / "model")
    fakes("failed", error="step 1 must have a graded rollout to learn from", needsUser=True)
    result = specrl_command("run", "-f", str(a_run_file(place)), "--plain")
    assert result.exit_code == 2
    assert result.stderr.startswith("specrl: step 1 must have a graded rollout to learn from\n")
    assert f"once that is repaired, go on with `specrl run --resume {place}/runs/tiny-1`" in result.stderr


def test_process_that_refuses_is_exit_two_with_its_one_message(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    fakes("waiting", replica="--say 'specrl-generation: the model must fit' --exit 2")
    result = specrl_command("run", "-f", str(a_run_file(place)), "--plain")
    assert result.exit_code == 2
    assert result.stderr == "specrl: the model must fit\n"


def test_stopped_run_is_exit_130_and_says_how_to_go_on(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    fakes("stopped")
    result = specrl_command("run", "-f", str(a_run_file(place)), "--plain")
    assert result.exit_code == 130
    assert result.stderr == f"specrl: stopped; go on with `specrl run --resume {place}/runs/tiny-1`\n"


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(place: Path) -> RunDirectory:
    """A run that was begun before."""
    a_model_folder(place / "model")
    return run_directory.create(place / "runs", parse_spec(a_run(place)))


def test_resume_goes_on_in_the_same_directory(directory: RunDirectory, fakes: Callable[..., Path]) -> None:
    fakes("finished", summary=SUMMARY)
    before = directory.run_file.read_bytes()
    assert specrl_command("run", "--resume", "tiny-1").exit_code == 0
    assert directory.run_file.read_bytes() == before
    assert [path.name for path in Path("runs").iterdir()] == ["tiny-1"]


def test_resume_may_change_the_number_of_replicas(directory: RunDirectory, fakes: Callable[..., Path]) -> None:
    fakes("finished", summary=SUMMARY)
    result = specrl_command("run", "--resume", str(directory.path), "--set", "generation.replicas=2")
    assert result.exit_code == 0, result.output
    assert load_spec(directory.run_file).generation.replicas == 2


def test_resume_refuses_any_other_change(directory: RunDirectory) -> None:
    before = directory.run_file.read_bytes()
    result = specrl_command("run", "--resume", "tiny-1", "--set", "schedule.steps=9")
    assert result.exit_code == 2
    assert "must keep its run file but for generation.replicas, got --set schedule.steps=9" in result.stderr
    assert directory.run_file.read_bytes() == before


def test_resume_of_a_run_that_is_driven_is_refused(directory: RunDirectory) -> None:
    with directory.lock():
        result = specrl_command("run", "--resume", "tiny-1")
    assert result.exit_code == 2
    assert "a run must be driven by one launcher" in result.stderr


def test_resume_of_an_unknown_run_names_those_there_are(directory: RunDirectory) -> None:
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


def test_status_of_a_run_whose_launcher_died_says_how_to_go_on(directory: RunDirectory) -> None:
    directory.status_file.write_text(json.dumps({"run": "tiny", "phase": "training", "step": 1, "steps": 2}))
    directory.endpoints_file.write_text(json.dumps({"http": "http://127.0.0.1:1"}))
    result = specrl_command("status", "tiny-1")
    assert result.exit_code == 0, result.output
    assert f"not running; go on with `specrl run --resume {directory.path}`" in result.stdout


def test_status_says_what_went_wrong_in_words_and_which_steps_teach_nothing(directory: RunDirectory) -> None:
    """`ungraded 36, failedPrompts 2` looked harmless, and a step of equal rewards like any other."""
    error = "KeyError at my_rewards.py:12"
    counters = {"ungraded": 36, "failedPrompts": 2}
    status = {"run": "tiny", "phase": "training", "counters": counters, "givenUp": {error: 2}}
    directory.status_file.write_text(json.dumps(status))
    step = a_step(1, groups=4, groups_without_signal=4, failed={"000001-00000": error})
    directory.metrics_file.write_text(step.model_dump_json(by_alias=True) + "\n")
    shown = specrl_command("status").stdout
    assert "rollouts without a verdict, through no fault of an answer; sampled again: 36" in shown
    assert f"prompts given up by reason: {error} (2)" in shown
    assert f"step 1: 1 prompt given up: {error} (1)" in shown
    assert "step 1: 4 of 4 groups teach nothing: all rewards are equal within each" in shown


def test_status_as_json_is_the_coordinators_own(directory: RunDirectory) -> None:
    directory.status_file.write_text(json.dumps({"run": "tiny", "phase": "training", "step": 1}))
    status = json.loads(specrl_command("status", "--json").stdout)
    assert (status["phase"], status["step"]) == ("training", 1)


def test_status_before_the_first_phase_is_refused(directory: RunDirectory) -> None:
    result = specrl_command("status")
    assert result.exit_code == 2
    assert "never came to its first phase" in result.stderr


def test_status_without_runs_is_refused() -> None:
    assert_refused(specrl_command("status"), "there must be a run in runs")


# -- drafter, spec, families, demo -------------------------------------------------------------------------------------


def test_drafter_init_copies_the_exported_drafter(place: Path, fakes: Callable[..., Path]) -> None:
    a_model_folder(place / "model")
    a_model_folder(place / "export")
    fakes("finished", summary=SUMMARY | {"drafterPath": str(place / "export")})
    file = a_run_file(place, generation={"sampling": {"maxTokens": 16}, "speculation": {"eagle3": {}}})
    result = specrl_command("drafter", "init", "-f", str(file), "--out", "out/drafter")
    assert result.exit_code == 0, result.output
    assert (place / "out/drafter/config.json").is_file()
    assert [path.name for path in (place / "out").iterdir()] == ["drafter"]
    assert load_spec(place / "runs/tiny-1/run.yaml").schedule.steps == 0
    assert_refused_without_a_second_run(specrl_command("drafter", "init", "-f", str(file), "--out", "out/drafter"))


def assert_refused_without_a_second_run(result: Result) -> None:
    assert result.exit_code == 2
    assert "--out must not exist" in result.stderr
    assert [path.name for path in Path("runs").iterdir()] == ["tiny-1"]


START = {
    "rollouts": 144,
    "lossPerEpoch": [2.0, 1.0],
    "trainedAcceptance": [0.8, 0.5],
    "trainedAcceptanceLength": 2.2,
    "heldOutPrompts": 16,
    "heldOutAcceptance": [0.7, 0.5],
    "heldOutAcceptanceLength": 2.05,
}


def test_drafter_init_goes_on_with_an_interrupted_one_and_reports_acceptance(
    place: Path, fakes: Callable[..., Path]
) -> None:
    a_model_folder(place / "model")
    a_model_folder(place / "export")
    file = a_run_file(place, generation={"sampling": {"maxTokens": 16}, "speculation": {"eagle3": {}}})
    fakes("failed", error="the machine burnt down")
    begun = specrl_command("drafter", "init", "-f", str(file), "--out", "out")
    assert begun.exit_code == 1
    run = place / "runs" / "tiny-1"
    assert f"go on with `specrl drafter init --resume {run} --out out`" in begun.stderr
    assert not (place / "out").exists()
    fakes("finished", summary=SUMMARY | {"drafterPath": str(place / "export"), "drafterStart": START})
    resumed = specrl_command("drafter", "init", "--resume", "tiny-1", "--out", "out")
    assert resumed.exit_code == 0, resumed.output
    assert "acceptance length 2.05 on 16 held-out prompts (by position 0.70, 0.50)" in resumed.stdout
    assert json.loads((place / "out" / "acceptance.json").read_text()) == START
    assert [path.name for path in (place / "runs").iterdir()] == ["tiny-1"]


def test_drafter_init_resumes_nothing_else(directory: RunDirectory) -> None:
    result = specrl_command("drafter", "init", "--resume", str(directory.path), "--out", "out")
    assert result.exit_code == 2
    assert f"go on with that one by `specrl run --resume {directory.path}`" in result.stderr
    for wrong in ([], ["-f", "run.yaml", "--resume", "tiny-1"]):
        assert specrl_command("drafter", "init", "--out", "out", *wrong).exit_code == 2


def test_drafter_travels_out_and_in(place: Path) -> None:
    from tests.tiny_models import make_policy  # torch: the command line itself does without

    from specrl.drafting.head import write_untrained

    policy = make_policy(place / "policy")
    write_untrained(place / "ours", policy, Eagle3(), seed=1)
    to = ("--policy", "policy", "--out")
    out = specrl_command("drafter", "export", "ours", "--format", "speculators", *to, "out/theirs")
    assert out.exit_code == 0, out.output
    back = specrl_command("drafter", "import", "out/theirs", *to, "back")
    assert back.exit_code == 0, back.output
    assert "drafts 264 of 264 tokens from the policy's layers 2, 3, 4" in back.stdout
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
        drafter.initialisation_only(spec)


def test_spec_check_and_show_read_what_they_wrote(place: Path) -> None:
    file = a_run_file(place)
    checked = specrl_command("spec", "check", str(file))
    assert checked.exit_code == 0
    assert "run tiny is valid" in checked.stdout
    shown = specrl_command("spec", "show", str(file), "--set", "schedule.steps=7")
    assert yaml.safe_load(shown.stdout)["schedule"]["steps"] == 7
    (place / "again.yaml").write_text(shown.stdout)
    assert specrl_command("spec", "show", "again.yaml").stdout == shown.stdout


def test_spec_check_of_a_wrong_file_is_refused(place: Path) -> None:
    assert_refused(specrl_command("spec", "check", str(a_run_file(place, name="UPPER"))), "1 problem", "name")


def test_families_are_listed_with_an_example() -> None:
    result = specrl_command("families")
    assert result.exit_code == 0
    for name in ("addition", "ledger", "wordProblem"):
        assert name in result.stdout


@pytest.fixture
def examples(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A demo folder with a run file, and a policy script that writes down how it was called."""
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
    assert "speculation against none" not in result.stdout


def test_demo_makes_the_policy_again_unless_told_to_keep_it(
    place: Path, examples: Path, fakes: Callable[..., Path]
) -> None:
    fakes("finished", summary=SUMMARY)
    for arguments, made in ((["--keep-policy"], 1), (["--keep-policy"], 1), ([], 2)):
        assert specrl_command("demo", "--no-compare", *arguments).exit_code == 0
        assert len((place / "made").read_text().splitlines()) == made
    assert sorted(path.name for path in Path("runs").iterdir()) == ["demo-policy", "tiny-1", "tiny-2", "tiny-3"]


def test_demo_whose_policy_fails_starts_no_run(place: Path, examples: Path) -> None:
    (examples / "make_policy.py").write_text("raise SystemExit(3)")
    assert_refused(specrl_command("demo"), "the demo's policy must be made, got exit code 3")


def test_comparison_that_fails_says_so_and_leaves_the_run_alone(
    place: Path, examples: Path, fakes: Callable[..., Path]
) -> None:
    fakes("finished", summary=SUMMARY)
    result = specrl_command("demo", "--out", "out", "--plain")
    assert result.exit_code == 0, "the policy of the fake run cannot be loaded, and the run is done all the same"
    assert "the comparison could not be measured" in result.stdout
    assert "error: " in (place / "out/tiny-1/logs/comparison.log").read_text()
