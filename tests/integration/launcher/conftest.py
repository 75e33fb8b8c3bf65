"""Programs that the launcher's tests have started in place of engine and trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specrl.launcher import programs

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher starts stand-ins for engine and trainer; all else is the product's."""
    before = programs._script

    def script(process: str) -> str:
        if process == "coordinator":
            return before(process)
        file = tmp_path / f"stand-in-{process}"
        file.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m tests.stand_ins.process {process} "$@"\n')
        file.chmod(0o755)
        return str(file)

    monkeypatch.setattr(programs, "_script", script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
