"""tools/recorded_tests.py: what the recorded results depend on."""

from __future__ import annotations

import re
from pathlib import Path

from tools.recorded_tests import ROOT, deep_inputs


def test_deep_record_depends_on_what_the_deep_tests_are_of() -> None:
    """Deep tests train layouts and build the control image, and a change of either left their record valid."""
    found = {name for name, _ in deep_inputs()}
    assert found >= {
        "services/specrl/trainer/megatron_backend/backend.py",
        "services/specrl/weights/stream.py",
        "deploy/docker/Dockerfile",
        "tests/integration/trainer/worker.py",
    }


def test_deep_record_depends_on_the_helpers_that_deep_tests_of_the_trainer_import() -> None:
    found = {name for name, _ in deep_inputs()}
    folder = Path("tests/integration/trainer")
    deep = [ROOT / name for name in found if Path(name).parent == folder and Path(name).name.startswith("test_")]
    assert deep
    helpers = {
        name
        for file in deep
        for line in re.findall(r"from tests\.integration\.trainer(?: import (\w+)|\.(\w+) import)", file.read_text())
        for name in line
        if name
    }
    assert {str(folder / f"{name}.py") for name in helpers} <= found
