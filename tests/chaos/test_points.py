"""Every named point is a method of the product, and an armed point strikes its own process once."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tests.chaos.field import POINTS_FOLDER
from tests.chaos.points.sitecustomize import POINTS

WRITES = """
import sys
from pathlib import Path
from specrl.coordinator.ledger.sqlite_store import SqliteStore
store = SqliteStore(Path(sys.argv[1]) / "store.db")
for step in (1, 2, 3):
    store.put_batch(step, b"batch")
"""


def run(folder: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(POINTS_FOLDER), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env=os.environ | {"PYTHONPATH": path, "SPECRL_CHAOS": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def arm(folder: Path, name: str, calls: int) -> Path:
    """Arm a point. Returns the file that will contain the id of the struck process."""
    for part in ("armed", "struck", "ledger"):
        (folder / part).mkdir()
    (folder / "armed" / name).write_text(json.dumps({"signal": int(signal.SIGKILL), "calls": calls}))
    return folder / "struck" / name


@pytest.mark.parametrize(("moment", "durable"), [("before", [1]), ("after", [1, 2])])
def test_a_process_is_struck_before_or_after_the_durable_write_that_was_named(
    tmp_path: Path, moment: str, durable: list[int]
) -> None:
    struck = arm(tmp_path, f"store.put_batch.{moment}", calls=2)
    assert run(tmp_path, WRITES).returncode == -signal.SIGKILL
    assert int(struck.read_text()) > 0
    assert not list((tmp_path / "armed").iterdir())
    with sqlite3.connect(tmp_path / "store.db") as store:
        assert [row[0] for row in store.execute("select step from batches order by step")] == durable
    store.close()
    again = run(tmp_path, WRITES)
    assert again.returncode == 0, f"a strike happens once: {again.stderr}"


def test_a_point_that_is_not_armed_does_nothing(tmp_path: Path) -> None:
    arm(tmp_path, "store.finish_step.before", calls=1)
    finished = run(tmp_path, WRITES)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_every_named_point_is_a_method_of_the_product(tmp_path: Path) -> None:
    modules = sorted({point.module for points in POINTS.values() for point in points})
    methods = [f"{point.module}:{point.method}" for points in POINTS.values() for point in points]
    program = f"""
import functools, importlib
for module in {modules}:
    importlib.import_module(module)
for name in {methods}:
    module, path = name.split(":")
    assert hasattr(functools.reduce(getattr, path.split("."), importlib.import_module(module)), "__wrapped__"), name
"""
    found = run(tmp_path, program, RANK="0", TORCHDYNAMO_DISABLE="1")
    assert found.returncode == 0, found.stderr[-3000:]


def test_the_documents_table_is_that_of_the_points() -> None:
    text = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text()
    rows = re.findall(r"^\| `([a-z._]+)` \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(name, points[0].process, points[0].meaning) for name, points in POINTS.items()]
