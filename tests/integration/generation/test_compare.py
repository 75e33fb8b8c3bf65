"""The demo's last part: engines with and without speculation are compared. What it measures is a benchmark's to say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests import engine_fork
from tests.vllm_cases import EAGLE3, NONE, Models, a_spec, speculation

from specrl.generation import compare
from specrl.spec import dump_spec


def test_engines_are_compared_side_by_side(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = models.first
    run = tmp_path / "run.yaml"
    result = tmp_path / "comparison.json"
    prompts = {"source": {"generated": {"family": "addition", "count": 8}}, "maxTokens": 256}
    run.write_text(dump_spec(a_spec(version.policy, speculation(EAGLE3, version), prompts=prompts)))
    command = ["--spec", run, "--policy", version.policy, "--drafter", version.drafter, "--mechanism", NONE]
    command += ["--mechanism", f"{EAGLE3}:3", "--batches", "2", "--turns", "1", "--json", result]
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, command)])
    engine_fork.install_engine_context()
    compare.main()
    none, eagle3 = json.loads(result.read_text())
    assert (none["mechanism"], none["speed"], none["acceptanceLength"]) == ("none", 1.0, None)
    assert (eagle3["mechanism"], eagle3["batch"]) == ("eagle3:3", 2)
    assert eagle3["speed"] > 0
    assert eagle3["acceptanceLength"] is None or eagle3["acceptanceLength"] >= 1
