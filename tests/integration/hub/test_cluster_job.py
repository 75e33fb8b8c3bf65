"""The Job of docs/hub.md that fetches a model to a claim: its command, run with its environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from tests.integration.hub.test_hub import hub_environment
from tests.run_files import a_model_folder
from tests.stand_ins.hub import Fault, serve_hub

ROOT = Path(__file__).resolve().parents[3]


def read_job() -> dict[str, Any]:
    """Read the Job of the page."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "hub.md").read_text(encoding="utf-8"), re.M | re.S)
    (job,) = (yaml.safe_load(block) for block in blocks if "kind: Job" in block)
    return dict(job)


def test_the_jobs_command_goes_on_after_an_interruption_and_prints_the_folder(tmp_path: Path) -> None:
    """H9: nobody said how weights get into a claim."""
    (container,) = read_job()["spec"]["template"]["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "specrl"
    name = next(it for it in arguments if "/" in it)
    mount = container["volumeMounts"][0]["mountPath"]
    home = tmp_path / Path(container["env"][0]["value"]).relative_to(mount)
    files = {path.name: path.read_bytes() for path in a_model_folder(tmp_path / "source").iterdir()}
    with serve_hub() as hub:
        commit = hub.add_model(name, files)

        def run() -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "specrl.cli", *arguments]
            environment = hub_environment(hub, home) | {"HOME": os.fspath(tmp_path)}
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

        hub.faults.append(Fault("/cdn/", cut_at=1000, times=6))
        interrupted = run()
        assert interrupted.returncode != 0, interrupted.stdout
        done = run()
    assert done.returncode == 0, done.stderr
    folder = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / commit
    assert str(folder) in done.stdout
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
