"""What is logged, and what becomes of a program that cannot write its log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging
import structlog
from specrl.telemetry import logs
logs.configure("info", "coordinator", "demo")
structlog.get_logger().warning("report_files_delayed", reason="full")
logging.getLogger("library").warning("the same")
print("went on")
"""


def run(errors: Path) -> str:
    with errors.open("w") as file:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=file, text=True, check=False, timeout=300
        ).stdout


def test_a_line_carries_its_process_and_run(tmp_path: Path) -> None:
    assert run(tmp_path / "log") == "went on\n"
    line = json.loads((tmp_path / "log").read_text().splitlines()[0])
    assert (line["event"], line["process"], line["run"]) == ("report_files_delayed", "coordinator", "demo")


def test_a_log_on_a_full_disk_ends_no_program() -> None:
    assert run(Path("/dev/full")) == "went on\n"
