"""docs/hub.md on clusters: the command of the Job that fetches a model to a claim, and the RLJob's volumes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from tests.integration.hub.test_hub import hub_environment
from tests.rljob_cases import a_job
from tests.run_files import a_model_folder
from tests.stand_ins.hub import Fault, serve_hub

from specrl.spec import parse_rljob

ROOT = Path(__file__).resolve().parents[3]


def read_block(words: str) -> dict[str, Any]:
    """Read the block of YAML of the page that has these words."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "hub.md").read_text(encoding="utf-8"), re.M | re.S)
    (found,) = (yaml.safe_load(block) for block in blocks if words in block)
    return dict(found)


def read_job() -> dict[str, Any]:
    """Read the Job of the page."""
    return read_block("kind: Job")


def test_the_volumes_of_the_page_are_those_of_an_rljob() -> None:
    spec = parse_rljob(a_job({"model": ..., **read_block("secretName: s3")}))
    assert [bool(it.uri) for it in spec.volumes] == [True, True, False]


def test_the_jobs_command_goes_on_after_an_interruption_and_prints_the_folder(tmp_path: Path) -> None:
    """H9: nobody said how weights get into a claim."""
    (container,) = read_job()["spec"]["template"]["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "specrl"
    place = arguments.index("--out") + 1
    out = tmp_path / Path(arguments[place]).relative_to(container["volumeMounts"][0]["mountPath"])
    arguments[place] = str(out)
    arguments = [it for it in arguments if not it.startswith("--attempts")]
    files = {path.name: path.read_bytes() for path in a_model_folder(tmp_path / "source").iterdir()}
    with serve_hub() as hub:
        hub.add_model(arguments[1].removeprefix("hf://"), files)

        def run() -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "specrl.cli", *arguments]
            environment = hub_environment(hub, tmp_path / "hf") | {"HOME": os.fspath(tmp_path)}
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

        hub.faults.append(Fault("/cdn/", cut_at=1000, times=6))
        interrupted = run()
        assert interrupted.returncode == 1, interrupted.stdout
        done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(out)
    assert (out / "model.safetensors").read_bytes() == files["model.safetensors"]
