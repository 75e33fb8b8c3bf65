"""`specrl rewards grade`, with the pool that a run uses, prints a verdict or a reason for every line, in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import structlog
from tests.run_files import a_model_folder, a_run, a_run_file
from tests.store_crashes import read_contents
from typer.testing import CliRunner, Result

from specrl.cli import app
from specrl.cli.rewards.command import EPILOG
from specrl.coordinator.ledger import Store, StoredRollout, make_claim, open_store, open_store_reader
from specrl.coordinator.rollouts.checked_prompts import load_checked_prompts
from specrl.launcher import run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.prompts import load_prompts
from specrl.records import (
    Batch,
    FinishReason,
    GradedRollout,
    Reward,
    Rollout,
    StreamPlace,
    TrainRollout,
    VersionSpan,
    wire,
)
from specrl.spec import load_spec, parse_spec
from specrl.spec.data import Rewards
from specrl.trainer.checkpointing import checkpoints

PATIENCE_S = 300  # a busy machine is slow, not wrong
SAMPLES = {
    "math": ("1/2", r"It is \boxed{0.5}.", r"\boxed{0.4}"),
    "exact": ("18", "#### 18", "#### 19"),
    "regex": ("[0-9]+", "#### 18", "#### x"),
    "jsonSchema": ('{"type": "integer"}', "18", '"18"'),
    "code": ("assert double(2) == 4", "```python\ndef double(x): return 2 * x\n```", "```python\ndouble = 1\n```"),
    "tags": ("any", "<think>a</think><answer>18</answer>", "18"),
    "validJson": ("any", '{"a": 1}', "{"),
    "python": ("right", "right", "wrong"),
}
"""For each verifier: a reference, a right answer and a wrong one."""
MODULE = """
import os, subprocess, sys, time
from pathlib import Path

def equal(reference, completion):
    return float(completion == reference)

def loud(reference, completion):
    print("noise of the verifier", flush=True)
    subprocess.run(["echo", "noise of its child"], check=True)
    return 1.0

def waits(reference, completion):
    flag = Path(reference)
    if completion == "set":
        flag.touch()
    elif completion == "hang":
        time.sleep(600)
    while completion == "wait" and not flag.exists():
        time.sleep(0.01)
    return 1.0
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in its own folder, which has a module of verifiers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "verifiers_of_mine.py").write_text(MODULE)
    return tmp_path


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Restore logging: the command configures it for the whole process, which it shares with all tests here."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)


def grade(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["rewards", "grade", *arguments])


def a_file(*lines: Any, name: str = "answers.jsonl") -> str:
    """Write lines as JSON; lines that are bytes are written as they are."""
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    Path(name).write_bytes(b"".join(text + b"\n" for text in texts))
    return name


def answer(reference: Any, completion: str, **others: Any) -> dict[str, Any]:
    return {"reference": reference, "completion": completion, **others}


def verdicts(result: Result) -> list[dict[str, Any]]:
    """Parse stdout, which must have nothing but verdicts."""
    return [json.loads(line) for line in result.stdout.splitlines()]


def by_function(name: str) -> Sequence[str]:
    return ("--verifier", "python", "--function", f"verifiers_of_mine:{name}", "--folder", ".")


def test_every_verifier_of_the_union_grades_without_further_settings() -> None:
    only_in_run_files = {"pattern", "sum"}
    assert set(SAMPLES) == {field.alias for field in Rewards.model_fields.values()} - only_in_run_files
    for name, (reference, right, wrong) in SAMPLES.items():
        file = a_file(answer(reference, right, id=1), answer(reference, wrong, id=2))
        options = by_function("equal") if name == "python" else ("--verifier", name)
        result = grade(*options, "--completions", file, "--jsonl")
        assert result.exit_code == 0, (name, result.stderr)
        found = verdicts(result)
        assert [(line["id"], line["reward"]) for line in found] == [(1, 1.0), (2, 0.0)], (name, found)
        assert all(line.keys() == {"id", "reward", "extracted", "reason", "seconds"} for line in found)
        assert all(line["seconds"] > 0 for line in found)


def test_references_may_be_numbers_and_objects_and_other_keys_are_copied() -> None:
    schema = {"type": "integer"}
    file = a_file(answer(18, "#### 18", unit="Äpfel", tags=["a"]), answer(18, "#### 19", half="\ud800"))
    first, second = verdicts(grade("--verifier", "exact", "--completions", file, "--jsonl"))
    assert (first["reward"], first["unit"], first["tags"], first["extracted"]) == (1.0, "Äpfel", ["a"], "18")
    assert (second["reward"], second["half"], second["reason"]) == (
        0.0,
        "\ud800",
        "the answer differs from the reference",
    )
    file = a_file(answer(schema, "18"))
    (only,) = verdicts(grade("--verifier", "jsonSchema", "--completions", file, "--jsonl"))
    assert only["reward"] == 1.0


def test_a_line_that_cannot_be_graded_has_its_reason_and_costs_the_others_nothing() -> None:
    """The reason has file, line and rule; every line keeps its place in the order."""
    file = a_file(
        answer("[0-9]", "#### 1", id=1),
        b"nonsense",
        b"",
        answer("[", "#### 1", id=4),
        b'{"reference": "1", "completion": "\xff"}',
        ["no", "object"],
        {"reference": "1", "id": 7},
        answer("1", 5, id=8),  # type: ignore[arg-type]
        answer(None, "#### 1", id=9),
        answer("", "#### 1", id=10),
        b"[" * 100_000,
        answer("[0-9]", "#### x", id=12),
    )
    result = grade("--verifier", "regex", "--completions", file, "--jsonl")
    found = verdicts(result)
    assert [line.get("id") for line in found] == [1, None, 4, None, None, 7, 8, 9, 10, None, 12]
    assert [line["reward"] for line in found] == [1.0, *[None] * 9, 0.0]
    for line, number, rule in zip(
        found[1:-1],
        (2, 4, 5, 6, 7, 8, 9, 10, 11),
        ("a JSON object", "RE2", "UTF-8", "a JSON object", "'completion'", "text", "'reference'", "empty", "a JSON"),
        strict=True,
    ):
        assert rule in line["reason"], line
        assert f"answers.jsonl:{number}: " in line["reason"] or number == 4, "the reference is sound JSON"
    assert result.exit_code == 0, "every line has a verdict or a reason"
    assert "9 of 11 lines have no verdict" in result.stderr
    assert "answers.jsonl:2: must be a JSON object on one line" in result.stderr
    assert "answers.jsonl:4: a regular expression must be one of RE2's" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "at least one line"),
        (b"\n\n", "at least one line"),
        (b"x\ny\n", "answers.jsonl:2:"),
    ],
)
def test_a_file_that_holds_no_line_to_grade_is_refused(content: bytes | None, said: str) -> None:
    if content is not None:
        Path("answers.jsonl").write_bytes(content)
    result = grade("--verifier", "exact", "--completions", "answers.jsonl", "--jsonl")
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("specrl: ") == 1
    assert all(line["reward"] is None for line in verdicts(result))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--verifier", "maths"), "must be one of math, exact"),
        (("--verifier", "pattern"), "must be one of math, exact"),
        (("--verifier", "python"), "--function MODULE:NAME"),
        (("--verifier", "code", "--answer-after", "A:"), "answerAfter"),
        (("--verifier", "math", "--function", "a:b"), "need each other"),
        (("--verifier", "math", "-f", "run.yaml"), "either --verifier NAME or -f FILE"),
        (("--verifier", "math", "--set", "rewards.math.answerAfter=A:"), "--set overrides a run file"),
        (("--verifier", "math", "--step", "3"), "--step N needs --run"),
        (("--verifier", "math", "--run", "demo-1"), "either --completions FILE or --run"),
        ((), "name the verifier"),
        (("--answer-after", "A:"), "need --verifier"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: Sequence[str], said: str) -> None:
    result = grade(*arguments, "--completions", a_file(answer("1", "1")))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--function", "no_such_module:grade"), "--function: must be importable, got ModuleNotFoundError"),
        (("--function", "verifiers_of_mine:equals", "--folder", "."), "--function: must be importable"),
        (("--function", "verifiers_of_mine:equal", "--folder", "none"), "--folder: must be a folder"),
    ],
)
def test_a_verifier_that_cannot_work_gives_one_message(options: Sequence[str], said: str) -> None:
    result = grade("--verifier", "python", *options, "--completions", a_file(answer("1", "1")), "--jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"specrl: {said}")
    assert "rewards.python" not in result.stderr, "there is no run file"


@pytest.mark.parametrize(("name", "remedy"), [("equals", "did you mean equal?"), ("q", "name one of its functions")])
def test_a_misspelt_function_is_not_blamed_on_the_folder(name: str, remedy: str) -> None:
    options = ("--function", f"verifiers_of_mine:{name}", "--folder", ".")
    result = grade("--verifier", "python", *options, "--completions", a_file(answer("1", "1")))
    assert result.stderr.strip().endswith(f"has no attribute '{name}'; {remedy}")


def test_a_narrow_table_keeps_line_numbers_and_whole_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Path("an-unusually-long-name.jsonl").write_text(json.dumps(answer("", "")), encoding="utf-8")
    result = grade("--verifier", "exact", "--completions", "an-unusually-long-name.jsonl")
    header, *rows = result.stdout.partition("\n\n")[0].splitlines()
    assert rows[0].startswith("...")
    assert rows[0].split()[0].endswith(".jsonl:1")
    assert len(rows) > 1
    assert max(map(len, [header, *rows])) <= 80


def test_each_of_several_rewards_is_shown(place: Path) -> None:
    terms = [
        {"name": "words", "column": "task", "verifier": {"exact": {}}},
        {"name": "form", "weight": 0.5, "verifier": {"pattern": {"expression": "####", "match": "Anywhere"}}},
    ]
    file = str(a_run_file(place, rewards={"sum": {"terms": terms}}))
    lines = [
        answer("18", "#### 18", task="words"),
        answer("18", "18", task="words"),
        answer("18", "####", task=None),
        answer("18", "18", task="maths"),
    ]
    completions = a_file(*lines)
    found = verdicts(grade("--completions", completions, "-f", file, "--jsonl"))
    assert [line["reward"] for line in found] == [1.5, 0.0, 0.5, None]
    assert [line.get("rewards") for line in found] == [
        {"words": 1.0, "form": 1.0},
        {"words": 0.0, "form": 0.0},
        {"form": 1.0},
        None,
    ]
    assert found[0]["reason"] == "words 1 (the answer equals the reference); form 1 (matches)"
    assert "must name rewards of rewards.sum.terms, which are words, got maths" in found[3]["reason"]
    table = grade("--completions", completions, "-f", file).stdout
    assert "reward words      mean 0.5 of 2 lines" in table
    assert "reward form       mean 0.6667 of 3 lines" in table


def test_a_run_files_verifier_keeps_its_settings(place: Path) -> None:
    file = str(a_run_file(place, rewards={"exact": {"answerAfter": "A:"}}, rewardPool={"workers": 2}))
    answers = a_file(answer("18", "A: 18"), answer("18", "B: 18"))
    rewards = [line["reward"] for line in verdicts(grade("-f", file, "--completions", answers, "--jsonl"))]
    assert rewards == [1.0, 0.0]
    changed = grade("-f", file, "--set", 'rewards.exact.answerAfter="B:"', "--completions", answers, "--jsonl")
    assert [line["reward"] for line in verdicts(changed)] == [0.0, 1.0]
    marked = grade("--verifier", "exact", "--answer-after", "B:", "--completions", answers, "--jsonl")
    assert [line["reward"] for line in verdicts(marked)] == [0.0, 1.0]
    refused = grade("-f", file, "--set", "rewards.exact.answerBefore=B:", "--completions", answers, "--jsonl")
    assert (refused.exit_code, "rewards.exact.answerBefore" in refused.stderr) == (2, True)


def test_the_run_files_time_limit_applies_and_the_pool_survives(place: Path) -> None:
    rewards = {"python": {"function": "verifiers_of_mine:waits", "folder": "."}}
    file = str(a_run_file(place, rewards=rewards, rewardPool={"timeoutS": 3}))
    answers = a_file(answer("flag", "hang"), answer("flag", "set"))
    hung, other = verdicts(grade("-f", file, "--completions", answers, "--jsonl"))
    assert hung["reward"] != 1.0
    assert "timeoutS=3" in hung["reason"]
    assert other["reward"] == 1.0


def test_completions_are_graded_in_parallel_and_shown_in_order() -> None:
    """The first verdict waits until the other process has graded the second completion."""
    answers = a_file(answer("flag", "wait", id=1), answer("flag", "set", id=2), answer("flag", "wait", id=3))
    result = grade(*by_function("waits"), "--workers", "2", "--completions", answers, "--jsonl")
    assert [(line["id"], line["reward"]) for line in verdicts(result)] == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_a_completion_of_10_mb_is_graded() -> None:
    answers = a_file(answer("18", "x " * 5_000_000 + "#### 18"), answer("18", "#### 18" + " " * 10_000_000))
    result = grade("--verifier", "exact", "--completions", answers, "--jsonl")
    assert [line["reward"] for line in verdicts(result)] == [1.0, 1.0]


def test_the_table_has_every_line_and_a_summary_and_moves_no_cursor() -> None:
    answers = a_file(
        answer("18", "#### 18"),
        answer("18", "#### \x1b[2J19"),
        answer("18", "no idea"),
        answer("", "#### 18"),
        answer("18", "#### " + "very long " * 100),
    )
    result = grade("--verifier", "exact", "--completions", answers)
    assert result.exit_code == 0
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["line", "reward", "seconds", "extracted", "reason"]
    first_lines = [row for row in rows if not row.startswith(" ")]  # without the rest of long reasons
    assert [row.split()[:2] for row in first_lines[:5]] == [
        ["answers.jsonl:1", "1"],
        ["answers.jsonl:2", "0"],
        ["answers.jsonl:3", "0"],
        ["answers.jsonl:4", "-"],
        ["answers.jsonl:5", "0"],
    ]
    assert max(map(len, [header, *rows])) <= 160
    assert "\x1b" not in result.stdout + result.stderr
    assert "graded            4 of 5 lines" in rows
    assert "mean reward       0.25" in rows
    assert "right             1 of 4 (25.0%)" in rows
    assert "no answer found   1 of 4 (25.0%)" in rows
    assert "ungraded          1: field 'reference' must not be empty" in rows


# -- as a process of its own -------------------------------------------------------------------------------------------


def started(*arguments: str, stdin: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specrl.cli", "rewards", "grade", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    with process:
        return process.communicate(timeout=PATIENCE_S)


def test_stdout_has_only_the_verdicts_whatever_a_verifier_prints() -> None:
    answers = a_file(*[answer("1", "1", id=number) for number in range(3)])
    process = started(*by_function("loud"), "--completions", answers, "--jsonl")
    out, err = end_of(process)
    assert process.returncode == 0, err
    assert [json.loads(line)["id"] for line in out.splitlines()] == [0, 1, 2]
    assert err.count("noise of the verifier") == err.count("noise of its child") == 3


def test_the_examples_of_the_help_and_the_docs_can_be_pasted() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    examples = [EPILOG, page.partition("## Trying a verifier")[2]]
    for example in examples:
        commands = [line.strip() for line in example.splitlines() if line.startswith(("  echo", "  specrl", "    "))][
            :2
        ]
        assert commands[0].startswith("echo ")
        assert commands[1].startswith("specrl rewards grade ")
        shell = f'specrl() {{ "{sys.executable}" -m specrl.cli "$@"; }}\n' + "\n".join(commands)
        done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "equal to the reference" in done.stdout


def test_lines_of_stdin_are_graded_as_they_come() -> None:
    with started("--verifier", "exact", "--completions", "-", "--jsonl", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in (18, 19):
            process.stdin.write(json.dumps(answer("18", f"#### {number}")) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["extracted"] == str(number), "before the next line is written"
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == 0


def without_progress(errors: str) -> list[str]:
    """The lines without those that a slow machine gets every ten seconds."""
    return [line for line in errors.splitlines() if not line.endswith("lines graded")]


@pytest.mark.parametrize("is_waiting_for_stdin", [False, True])
def test_ctrl_c_keeps_finished_verdicts_and_leaves_no_process(*, is_waiting_for_stdin: bool) -> None:
    """A command that waited for stdin used to end only after the next line."""
    if is_waiting_for_stdin:
        process = started("--verifier", "exact", "--completions", "-", "--jsonl", stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(json.dumps(answer("1", "#### 1")) + "\n")
        process.stdin.flush()
    else:
        answers = a_file(answer("flag", "set"), answer("flag", "hang"), answer("flag", "set"))
        process = started(*by_function("waits"), "--workers", "1", "--completions", answers, "--jsonl")
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["reward"] == 1.0
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        assert process.stdout.read() == ""
        assert without_progress(process.stderr.read()) == ["specrl: interrupted; all of its processes have ended"]
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_closed_stdout_ends_the_command_quietly() -> None:
    answers = a_file(*[answer("1", "#### 1")] * 5000)
    with started("--verifier", "exact", "--completions", answers, "--jsonl") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=PATIENCE_S) == 1
        assert without_progress(process.stderr.read()) == []


def test_a_full_disk_is_reported() -> None:
    answers = a_file(answer("1", "#### 1"))
    command = [sys.executable, "-m", "specrl.cli", "rewards", "grade", "--verifier", "exact"]
    with Path("/dev/full").open("wb") as full:
        command += ["--completions", answers, "--jsonl"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert (
        done.stderr == "specrl: stdout must be writable, got No space left on device; free space, or write elsewhere\n"
    )


# -- the rollouts of a run ---------------------------------------------------------------------------------------------


def a_rollout(name: str, text: str, reward: float) -> GradedRollout:
    rollout = Rollout(
        rollout_id=name,
        group_id=name[:12],
        sample_index=0,
        token_ids_T=np.asarray([1, 2], np.int32),
        sampler_logprobs_T=np.asarray([-0.5, -1.0], np.float32),
        versions=(VersionSpan(0, 0, 2),),
        finish_reason=FinishReason.STOP,
        replica_id="gen-0",
        text=text,
        seconds=0.5,
    )
    return GradedRollout(rollout, Reward(reward))


@pytest.fixture
def directory(place: Path) -> RunDirectory:
    """A run that has trained step 1, has no checkpoint since, and has sampled two rollouts of step 2.

    The references are those of the run's own stream. The second rollout of step 2 got reward 1 for a wrong answer.
    """
    a_model_folder(place / "model")
    made = run_directory.create_run(place / "runs", parse_spec(a_run(place)))
    answers = [load_prompts(load_spec(made.run_file)).prompt(position).answer for position in range(4)]
    with closing(opened(made)) as store:
        rollouts = {
            (1, 0): a_rollout("000001-00000-000-0", f"#### {answers[0]}", 1.0),
            (2, 0): a_rollout("000002-00000-000-0", f"#### {answers[2]}", 1.0),
            (2, 1): a_rollout("000002-00001-000-0", "#### wrong", 1.0),
        }
        store.put_rollouts(
            [StoredRollout(step, index, 0, 0, wire.graded_to_bytes(one)) for (step, index), one in rollouts.items()]
        )
        drafters = wire.graded_to_bytes(a_rollout("drafter-00000", "of no step", 0.0))
        store.put_rollouts([StoredRollout(-1, 0, 0, 0, drafters)])
        batch = Batch(1, (TrainRollout((5,), rollouts[1, 0].rollout, 0.5),))
        store.put_batch(1, wire.batch_to_outline(batch), [0])
        store.finish_step(1, {"step": 1})
    return made


def opened(directory: RunDirectory) -> Store:
    return open_store(load_spec(directory.run_file), directory.path, make_claim(directory.path))


def test_a_runs_rollouts_are_graded_with_its_verifier_and_not_changed(directory: RunDirectory) -> None:
    """Rollouts trained since the last checkpoint are graded, too, while the run's coordinator continues to write."""
    with closing(opened(directory)) as running:
        with closing(open_store_reader(load_spec(directory.run_file), directory.path)) as store:
            before = read_contents(store)
        found = verdicts(grade("--run", directory.name, "--jsonl"))
        assert [(line["step"], line["index"], line["sample"]) for line in found] == [(1, 0, 0), (2, 0, 0), (2, 1, 0)]
        assert [(line["reward"], line["rewardInRun"]) for line in found] == [(1.0, 1.0), (1.0, 1.0), (0.0, 1.0)]
        assert found[2]["completion"] == "#### wrong"
        assert found[0]["reference"] in found[0]["completion"]
        assert found[0]["prompt"]
        assert read_contents(running) == before
        running.set_fact("still", "mine")
    table = grade("--run", str(directory.path), "--step", "2")
    assert (table.exit_code, "\n000002-00001-000-0 " in table.stdout) == (0, True)
    assert "2 of 2 lines" in table.stdout
    other = verdicts(grade("--run", directory.name, "--step", "2", "--verifier", "regex", "--jsonl"))
    assert [line["reward"] for line in other] == [1.0, 0.0], "another verifier on the same rollouts"
    changed = grade("--run", directory.name, "--set", 'rewards.exact.answerAfter="A:"', "--jsonl")
    assert {line["reward"] for line in verdicts(changed)} == {0.0}


def test_a_run_without_rollouts_is_refused_with_a_message(directory: RunDirectory, place: Path) -> None:
    refused = grade("--run", directory.name, "--step", "9", "--jsonl")
    assert (refused.exit_code, "got 9; it holds 1, 2" in refused.stderr) == (2, True)
    with closing(opened(directory)) as store:
        store.finish_step(2, {"step": 2})
        store.forget_batches(2)
    refused = grade("--run", directory.name, "--jsonl")
    assert (refused.exit_code, "must still hold rollouts" in refused.stderr) == (2, True)
    fresh = run_directory.create_run(place / "others", parse_spec(a_run(place)))
    refused = grade("--run", str(fresh.path), "--jsonl")
    assert (refused.exit_code, "must have started" in refused.stderr) == (2, True)
    assert not (fresh.path / "store.db").exists()


def test_rollouts_are_not_graded_by_the_references_of_other_prompts(directory: RunDirectory) -> None:
    prompts = load_prompts(load_spec(directory.run_file))
    folder = checkpoints.step_directory(directory.path, 1)
    folder.mkdir(parents=True)
    for identity, exit_code in ((prompts.identity(), 0), ("0" * 32, 2)):
        place = StreamPlace(2, len(prompts), identity)
        (folder / checkpoints.STATE).write_text(json.dumps({"stream": asdict(place)}))
        result = grade("--run", directory.name, "--jsonl")
        assert result.exit_code == exit_code, result.stderr
    assert "prompts.source must have the 8 problems" in result.stderr
    assert result.stdout == ""


def test_rollouts_keep_their_references_in_a_run_that_left_out_others(place: Path) -> None:
    """Leaving out references used to shift all later problems of the stream, and was logged on stdout."""
    a_model_folder(place / "model")
    lines = [{"question": f"What is {number}?", "answer": str(number)} for number in range(8)]
    lines[0]["answer"] = lines[3]["answer"] = "####"
    source = {"jsonl": {"path": a_file(*lines, name="data.jsonl"), "onBadLine": "Skip"}}
    spec = load_spec(a_run_file(place, prompts={"source": source, "maxTokens": 80}))
    made = run_directory.create_run(place / "runs", spec)
    checked = asyncio.run(load_checked_prompts(spec, None, lambda *_: None, workers=1, tries_verifier=False))
    checked.decision.write_file(made.path)
    assert len(checked.stream) == 6
    with closing(opened(made)) as store:
        for index in range(2):
            answer_text = f"#### {checked.stream.prompt(2 + index).answer}"
            graded = a_rollout(f"000002-{index:05d}-000-0", answer_text, 1.0)
            store.put_rollouts([StoredRollout(2, index, 0, 0, wire.graded_to_bytes(graded))])
    assert [line["reward"] for line in verdicts(grade("--run", made.name, "--jsonl"))] == [1.0, 1.0]


def test_a_reference_is_read_as_in_the_data_of_a_run() -> None:
    """A number keeps its text, as in a run's data: 3.50 is not 3.5."""
    answers = a_file(b'{"reference": 3.50, "completion": "#### 3.50"}', b'{"reference": NaN, "completion": "#### 1"}')
    first, second = verdicts(grade("--verifier", "exact", "--completions", answers, "--jsonl"))
    assert first["reward"] == 1.0
    assert (second["reward"], "finite number" in second["reason"]) == (None, True)
