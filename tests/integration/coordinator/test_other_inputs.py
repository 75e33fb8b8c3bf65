"""A coordinator that is started again compares what the run is made from. A pod has no launcher that did so before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from tests.run_files import a_model_folder, a_run

from specrl.coordinator.ledger import make_claim
from specrl.coordinator.ledger.ledger import DurableFacts
from specrl.coordinator.ledger.run_inputs import collect_inputs
from specrl.coordinator.ledger.sqlite_store import SqliteStore
from specrl.launcher import run_directory
from specrl.prompts import SourceIdentity
from specrl.spec import parse_spec

PATIENCE_S = 120.0  # generous, because the machine may be busy


def test_a_coordinator_with_other_data_refuses_to_run(tmp_path: Path) -> None:
    """A resumed run went on with other questions behind the same path, without a word."""
    a_model_folder(tmp_path / "model")
    spec = parse_spec(a_run(tmp_path))
    directory = run_directory.create_run(tmp_path / "runs", spec)
    before = collect_inputs(spec, [SourceIdentity("main", 1, "", 9, "0" * 32)], [])
    with closing(SqliteStore(directory.path / "store.db", make_claim(directory.path))) as store:
        store.set_fact("inputs", DurableFacts(inputs=before).model_dump(by_alias=True)["inputs"])
    command = [sys.executable, "-m", "specrl.coordinator.main", "--run-directory", str(directory.path)]
    process = subprocess.Popen(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + PATIENCE_S
    try:
        while process.poll() is None and not directory.endpoints_file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.kill()
        output, _ = process.communicate()
    assert process.returncode == 2, output
    assert "the data must be as they were when the run began" in output
    assert "prompts source main: 8 problems" in output
