"""Runs that benchmarks start: which are kept. A script stands in for `specrl`."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import demo_runs

# Called with `run -f FILE --runs RUNS ...`. Its run finishes at once, and its run file is not that which was asked for.
FINISHES = """#!/bin/sh
mkdir -p "$5/demo-1/export" && echo x >> "$5/../starts"
cp "$3" "$5/demo-1/run.yaml" && echo '# hf://... was replaced by a folder' >> "$5/demo-1/run.yaml"
sed -i 's/count: 512/count: 511/' "$5/demo-1/run.yaml"
echo '{"phase": "finished"}' > "$5/demo-1/status.json"
"""


def install_program(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Let a shell script stand in for `specrl`."""
    program = folder / "specrl"
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(demo_runs, "SPECRL", program)


def count_starts(folder: Path) -> int:
    return len((folder / "starts").read_text(encoding="utf-8").splitlines())


def test_a_run_whose_file_was_resolved_is_kept_under_the_settings_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`specrl run` replaces a data set's name by the files that it fetched. Such runs were trained and thrown away."""
    install_program(monkeypatch, tmp_path, FINISHES)
    for _ in range(2):
        assert demo_runs.run({"schedule.steps": "3"}, tmp_path / "runs") == tmp_path / "runs" / "demo-1"
    assert count_starts(tmp_path) == 1
    assert not (tmp_path / "runs" / "demo-1" / "export").exists()
    demo_runs.run({"schedule.steps": "4"}, tmp_path / "runs")
    assert count_starts(tmp_path) == 2
