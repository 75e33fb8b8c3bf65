"""`specrl doctor` on this machine, and with a run file whose Redis does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from specrl.cli import app
from specrl.cli.doctor import WIDTH
from specrl.formats.doctor_report import DoctorReport, FindingState
from specrl.installation import EXAMPLES


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_doctor_examines_this_machine(tmp_path: Path) -> None:
    result = doctor("--json", "--runs", str(tmp_path))
    report = DoctorReport.model_validate_json(result.stdout)
    names = {finding.name for finding in report.findings}
    assert {"specrl", "torch", "vllm", "megatron-core", "driver", "shared memory", "ports", "sandbox", "store"} <= names
    assert not [it for it in report.findings if "could not be examined" in it.value]
    assert result.exit_code == (1 if report.problems else 0)


def test_text_says_the_same_in_two_columns(tmp_path: Path) -> None:
    result = doctor("--runs", str(tmp_path))
    lines = result.stdout.splitlines()
    assert lines[0].split()[0] == "specrl"
    # Only a path without a space may be longer than the column.
    assert not [line for line in lines if len(line) > WIDTH and len(line.split()) > 3]


@pytest.mark.parametrize("is_valid", [True, False])
def test_a_store_that_does_not_answer_is_a_problem(tmp_path: Path, is_valid: bool) -> None:
    content = yaml.safe_load((EXAMPLES / "demo" / "run.yaml").read_text(encoding="utf-8"))
    content["store"] = {"redis": {"addresses": ["127.0.0.1:1"]}} if is_valid else {"colour": "red"}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    result = doctor(str(file), "--json", "--runs", str(tmp_path))
    assert result.exit_code == 1
    report = DoctorReport.model_validate_json(result.stdout)
    states = {finding.name: finding.state for finding in report.findings}
    assert states["store" if is_valid else "run file"] is FindingState.PROBLEM
