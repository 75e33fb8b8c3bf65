"""Stand-ins that the launcher starts in place of the engine and the trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specrl.launcher.processes import programs

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launcher start stand-ins for engine and trainer. Coordinator, launcher and CLI are the real ones."""
    before = programs._console_script

    def script(process: str) -> str:
        if process == "coordinator":
            return before(process)
        file = tmp_path / f"stand-in-{process}"
        file.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m tests.stand_ins.process {process} "$@"\n')
        file.chmod(0o755)
        return str(file)

    monkeypatch.setattr(programs, "_console_script", script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
