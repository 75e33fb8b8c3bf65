"""Runs fake programs as `specrl run` would, in a process that a test can interrupt or kill.

    python drive.py RUN_DIRECTORY PORT [NAME=OPTIONS]...

The first program is the coordinator and stops first. Prints the result as `end | message`; without a message,
the coordinator's last words stand in its place.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from specrl.launcher.coordinator_client import CoordinatorReports
from specrl.launcher.local_run import LocalRun
from specrl.launcher.processes.supervisor import Program, Rank
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.terminal.view import PlainView
from specrl.rpc import run_token

FAKE = str(Path(__file__).with_name("fake_program.py"))


def ranks(directory: RunDirectory, name: str, options: str) -> list[Rank]:
    arguments = (sys.executable, FAKE, name, *shlex.split(options))
    return [Rank(arguments, dict(os.environ), directory.logs_folder / f"{name}.log")]


def main() -> None:
    directory = RunDirectory(Path(sys.argv[1]))
    port = sys.argv[2]
    named = [argument.split("=", 1) for argument in sys.argv[3:]]
    programs = [
        Program(
            name,
            partial(ranks, directory, name, options),
            int(number > 0),
            20.0,
            ends_run=number == 0,
            may_leave=name.startswith("gen-"),
        )
        for number, (name, options) in enumerate(named)
    ]
    # As a coordinator writes them at its start.
    directory.endpoints_file.write_text(json.dumps({"http": f"http://127.0.0.1:{port}"}))
    run_token.write_token(directory.path)
    with directory.lock(), CoordinatorReports(f"127.0.0.1:{port}") as reports:
        outcome = LocalRun(directory, programs, reports, PlainView(Console())).run_to_end()
    said = outcome.status.detail if outcome.status is not None else ""
    sys.stdout.write(f"{outcome.end} | {outcome.message or said}\n")


if __name__ == "__main__":
    main()
