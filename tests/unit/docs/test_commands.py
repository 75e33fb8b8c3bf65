"""Every `specrl` and `make` command of README, docs and examples can be run as it stands, and the files exist.

docs/commands.md says for each command which test runs it whole.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.docs.commands import (
    ROOT,
    Command,
    find_commands,
    find_commands_of_comments,
    find_problem,
    make_targets,
    name_command,
    specrl_commands,
)

PAGES = sorted(
    {*ROOT.glob("*.md"), *(page for name in ("docs", "deploy", "examples") for page in (ROOT / name).rglob("*.md"))}
)
TABLE = ROOT / "docs" / "commands.md"
CI = ROOT / ".ci" / "run"
ROW = re.compile(r"^\| `((?:specrl|make) [a-z0-9 -]+)` \| (.*?) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def commands_of_documents() -> list[Command]:
    found: list[Command] = []
    for page in PAGES:
        found += find_commands(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    for example in sorted((ROOT / "examples").rglob("*.*")):
        if example.suffix in {".yaml", ".py"}:
            text = example.read_text(encoding="utf-8")
            found += find_commands_of_comments(text, str(example.relative_to(ROOT)))
    return found


def test_every_command_can_be_run_as_it_stands() -> None:
    commands = commands_of_documents()
    assert len([command for command in commands if not command.is_mention]) > 40
    wrong = [f"{command}: {problem}" for command in commands if (problem := find_problem(command))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("specrl run -f run.yaml --set schedule.steps=5", ""),
        (".venv/bin/specrl checkpoint verify [RUN] [--step N] [--json]   # compare", ""),
        ("specrl crd | kubectl apply -f -", ""),
        ("specrl simulate paper-8b-zero-sync --set speculation.k=5 \\\n      --json", ""),
        ("specrl runn -f run.yaml", "specrl has no such command"),
        ("specrl run --fiel run.yaml", "No such option: --fiel"),
        ("specrl checkpoint export RUN", "Missing option"),
        ("specrl scale RUN --replicas many", "valid integer"),
        ("specrl drafter export drafter/ --format gguf --out head/", "is not one of"),
        ("specrl spec check examples/missing.yaml", "examples/missing.yaml does not exist"),
        ("specrl run -f my.yaml --set schedule.stepz=5", "a run file has no field schedule.stepz"),
        ("specrl run -f examples/demo/run.yaml --set schedule.steps=none", "schedule.steps"),
        ("specrl plan paper-9b", "there is no scenario paper-9b"),
        ("make test ARGS=\"-m 'not slow'\"   run the tests", ""),
        ("make chaos SEED=7 MINUTES=120 the faults of that seed", ""),
        ("make tset", "the Makefile has no target tset"),
        ("make test ARG=x", "the Makefile has no variable ARG"),
    ],
)
def test_a_wrong_command_is_found(line: str, problem: str) -> None:
    (command,) = find_commands(f"Text.\n\n    {line}\n", "page")
    found = find_problem(command)
    assert problem in found
    assert bool(found) == bool(problem)


def test_a_sentence_may_leave_arguments_out_but_not_invent_any() -> None:
    text = "With `specrl checkpoint\nexport` or `make test`, not `specrl export` or `specrl scale --up`."
    problems = [find_problem(command) for command in find_commands(text, "page")]
    assert problems[:2] == ["", ""]
    assert "no such command" in problems[2]
    assert "No such option" in problems[3]


def read_table() -> dict[str, str]:
    return dict(ROW.findall(TABLE.read_text(encoding="utf-8")))


def test_the_table_has_every_command() -> None:
    assert set(read_table()) == {f"specrl {name}" for name in specrl_commands()} | {f"make {n}" for n in make_targets()}
    named = {name_command(command) for command in commands_of_documents() if not command.is_mention}
    assert named - {"specrl"} <= set(read_table())


@pytest.mark.parametrize(("command", "shown"), sorted(read_table().items()))
def test_a_command_names_the_test_that_runs_it_or_is_marked_as_not_run(command: str, shown: str) -> None:
    tests = TEST.findall(shown)
    is_run_by_ci = shown.startswith("`.ci/run`")
    if shown.startswith("not run"):
        return
    assert tests or is_run_by_ci, "name a test, or say `not run` and why"
    if is_run_by_ci:
        assert command in CI.read_text(encoding="utf-8") or shown.endswith("by `make check`")
    last_word = command.rsplit(maxsplit=1)[-1]
    for path, name in tests:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text
        assert f'"{last_word}"' in text, "the test gives the command's last word to the command line"


def test_pages_are_found() -> None:
    assert {Path("README.md"), Path("docs/sft.md")} <= {page.relative_to(ROOT) for page in PAGES}
