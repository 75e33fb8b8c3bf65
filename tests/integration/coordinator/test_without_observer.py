"""A run does not need its observers: without `observe` it trains, survives a kill, and its reports are complete."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from specrl.coordinator.ledger import SqliteStore

ROOT = Path(__file__).parents[3]
TRAIN = """
import sys

sys.modules["specrl.coordinator.observe"] = None  # from here on, importing it or a module in it raises

import asyncio
from pathlib import Path

import structlog
from tests.integration.coordinator.small_run import Run, a_spec

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))

async def train(folder: Path) -> None:
    async with Run(folder, a_spec(folder), is_observed=False) as run:
        for step in range(1, 7):
            await run.until(lambda: run.context.ledger.last_trained_step >= step)
            print(step, flush=True)
        await run.finish()


asyncio.run(train(Path(sys.argv[1])))
"""


def start_run(folder: Path) -> subprocess.Popen[str]:
    """Run a coordinator, two replicas and a trainer in a process that cannot import `observe`. Prints each step."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    return subprocess.Popen([sys.executable, "-c", TRAIN, folder], text=True, stdout=subprocess.PIPE, env=environment)


def test_a_run_without_an_observer_trains_is_killed_and_resumes(tmp_path: Path) -> None:
    with start_run(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "1\n"
        assert first.stdout.readline() == "2\n"
        first.kill()
    with start_run(tmp_path) as second:
        printed, _ = second.communicate()
    assert (second.returncode, printed.split()) == (0, ["1", "2", "3", "4", "5", "6"])
    with closing(SqliteStore(tmp_path / "store.db", is_reader=True)) as store:
        reports = store.read_reports()
        facts = store.read_facts()
    assert [report["step"] for report in reports] == [1, 2, 3, 4, 5, 6]
    assert all(report["checksum"] for report in reports[2:]), "each was completed when its version was served"
    assert [validation["policyVersion"] for validation in facts["validations"]] == [0, 3, 6]
    assert not (tmp_path / "status.json").exists(), "there was no observer"
