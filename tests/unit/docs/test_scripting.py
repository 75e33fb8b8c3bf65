"""docs/scripting.md has the fields of every model, the exit codes of every command, and an example that runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from tests.unit.docs.commands import specrl_commands
from tests.unit.report.runs import a_folder
from tools import scripting_page

import specrl
from specrl.errors import RunFailed, RunInterrupted, SpecrlError
from specrl.formats import checkpoint_rows, doctor_report, reports, rollout_samples, run_report
from specrl.formats.reports import ReportModel

PAGE = Path(__file__).parents[3] / "docs" / "scripting.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_generated_from_the_models() -> None:
    assert scripting_page.replace_tables(TEXT) == TEXT, "run `make gen`"


def test_every_model_that_is_printed_or_written_has_a_table() -> None:
    """StatusReport is in RunState."""
    modules = (reports, rollout_samples, run_report, checkpoint_rows, doctor_report)
    found = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, ReportModel)
    }
    assert found - {ReportModel, reports.StatusReport} == set(scripting_page.MODELS)


def test_every_key_is_in_camel_case() -> None:
    keys = [key for model in scripting_page.MODELS for key, _, _ in scripting_page.list_fields(model)]
    assert len(keys) > 150
    assert [key for key in keys if not re.fullmatch(r"[a-z]+([A-Z][a-z0-9]*)*", key)] == []


def test_a_field_without_a_meaning_is_found() -> None:
    class Bare(BaseModel):
        named: int
        """It has one."""
        unnamed: int

    with pytest.raises(ValueError, match=r"Bare\.unnamed must have a docstring below it"):
        list(scripting_page.list_fields(Bare))


def test_every_command_has_its_exit_codes() -> None:
    table = TEXT.partition("| command | 0 | 1 | 2 |")[2].partition("\n\n")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = {name for cell in first_cells for name in re.findall(r"`specrl ([a-z ]+?)(?: --dry-run)?`", cell)}
    assert listed == set(specrl_commands())


def example() -> dict[str, Any]:
    """The names that the page's example defines."""
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - the page's own code
    return names


def test_the_example_prints_the_results_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/integration/launcher/test_cli.py runs `specrl.run` itself."""
    directory = a_folder(tmp_path / "runs")
    finished = SimpleNamespace(path=directory.path, summary=SimpleNamespace(policy_path="/export/policy"))
    called: list[Any] = []
    monkeypatch.setattr(specrl, "run", lambda *given, **named: called.append((given, named)) or finished, raising=False)
    example()["train"]("run.yaml")
    assert called == [(("run.yaml",), {"overrides": {"schedule.steps": 50}, "quiet": True})]
    assert capsys.readouterr().out == "/export/policy 0.5 8.0\n"


@pytest.mark.parametrize("error", [RunInterrupted("it"), RunFailed("it"), SpecrlError("it")])
def test_the_example_handles_every_end(
    error: SpecrlError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(specrl, "run", fail, raising=False)
    example()["train"]("run.yaml")
    assert capsys.readouterr().out
