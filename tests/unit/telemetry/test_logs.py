"""The format of logs, the names of events, and a log that cannot be written."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

PROGRAM = """
import logging, threading, warnings
import structlog
from specrl.telemetry import logs
logs.configure_logging("info", "coordinator", "demo")
structlog.get_logger().warning("report_files_delayed", reason="full")
logging.getLogger("library").warning("the %s", "same")
def elsewhere():
    try:
        secret = "what the policy " + "was asked"
        raise ValueError("no")
    except ValueError as error:
        structlog.get_logger().error("call_failed", exc_info=error)
        logging.getLogger("library").error("failed", exc_info=error)
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
warnings.warn("old")
logging.getLogger("httpx2").info("GET /")
print("went on")
"""

PAST = (
    r"_?(\w+ed|begun|broken?|built|chosen|cut|drawn|found|gone|held|kept|left|lost|made|read|sent|set|shown|shut|taken|told"
    r"|won|written)"
)
"""Matches a verb in the past tense, or a participle."""


def run(errors: Path) -> str:
    with errors.open("w", encoding="utf-8") as file:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=file, text=True, check=False, timeout=300
        ).stdout


def test_every_line_in_a_file_is_json_with_its_process_and_run(tmp_path: Path) -> None:
    assert run(tmp_path / "log") == "went on\n"
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["event"].splitlines()[0].rpartition(": ")[2], line["level"]) for line in lines] == [
        ("report_files_delayed", "warning"),
        ("the same", "warning"),
        ("call_failed", "error"),
        ("failed", "error"),
        ("old", "warning"),
    ]
    assert {(line["process"], line["run"]) for line in lines} == {("coordinator", "demo")}, "from all threads"
    assert [line.get("logger") for line in lines] == [None, "library", None, "library", "py.warnings"]
    assert all("ValueError: no" in line["exception"] for line in lines[2:4])


def test_a_terminal_shows_text_without_local_variables() -> None:
    primary, secondary = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.DEVNULL, stderr=secondary) as process:
        os.close(secondary)
        shown = b""
        while block := _read(primary):
            shown += block
        assert process.wait(300) == 0
    os.close(primary)
    text = shown.decode()
    assert "report_files_delayed" in text
    assert "ValueError" in text
    assert not text.lstrip().startswith("{")
    assert "what the policy was asked" not in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # EIO: on Linux the other end is closed
        return b""


def test_a_log_on_a_full_disk_does_not_end_the_program() -> None:
    assert run(Path("/dev/full")) == "went on\n"


# -- names of events --------------------------------------------------------------------------------------------------


def test_log_events_are_in_the_past_tense_and_documented(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(REPOSITORY / "tools" / "events.py"), str(tmp_path / "logs.md")], check=True)
    page = (tmp_path / "logs.md").read_text()
    names = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert {"run_finished", "drafter_switched_off", "coordinator_lost", "leadership_won"} <= set(names)
    assert [name for name in names if re.fullmatch(r"[a-z]+(_[a-z]+)*", name) is None] == []
    assert [name for name in names if re.search(rf"(^|_){PAST}(_|$)", name) is None] == []
    assert page == (REPOSITORY / "docs" / "logs.md").read_text(), "run `make gen`; alerts and searches use these names"


# -- versions ---------------------------------------------------------------------------------------------------------


def test_the_first_line_of_a_role_names_version_and_commit(tmp_path: Path) -> None:
    """The operator's, which then ends since there is no cluster."""
    done = subprocess.run(
        [sys.executable, "-c", "from specrl_operator.main import main; main()"],
        env=os.environ | {"KUBECONFIG": str(tmp_path / "none")},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 2
    first = json.loads(done.stderr.splitlines()[0])
    assert (first["event"], first["process"]) == ("process_started", "operator")
    assert re.fullmatch(r"\S+( version)?( \(commit \w+(, modified)?\))?", first["version"])


@pytest.mark.parametrize("module", ["coordinator", "generation", "trainer"])
def test_other_roles_write_it_as_soon_as_they_have_a_log(module: str) -> None:
    text = (REPOSITORY / "services" / "specrl" / module / "main.py").read_text()
    assert re.search(r"\n +logs\.configure_logging\([^\n]+\)\n +logs\.log_process_start\(\)\n", text)
