"""A training figure needs one line in the table and one where it is computed; everything else is derived."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specrl.telemetry.training_figures import TrainingFigures

ROOT = Path(__file__).parents[3]
TABLE = "telemetry/training_figures.py"
LINE = (
    "    novelty: float = _declare_figure("
    '"share of tokens", "Tokens never seen.", "specrl_trainer_novelty", is_drawn=True)\n'
)
SHOW = """
from prometheus_client import REGISTRY
from tests.unit.report.runs import a_step
from tools import metrics_page

from specrl.coordinator.observe.curves import StepCurves
from specrl.records import TrainMetrics, wire
from specrl.report.sections import training_table
from specrl.trainer.step_metrics import export_step

computed = TrainMetrics(tokens=3, logprob_seconds=0.0, train_seconds=0.0, novelty=0.25)
message = wire.train_metrics_to_wire(computed)
received = wire.train_metrics_from_wire(type(message).FromString(message.SerializeToString()))
assert received.novelty == 0.25
export_step(1, received)
assert REGISTRY.get_sample_value("specrl_trainer_novelty") == 0.25
report = a_step(1, novelty=received.novelty)
assert report.model_dump(by_alias=True)["novelty"] == 0.25
curves = StepCurves([report]).downsample_steps(1, None, 10)
assert curves.numbers["novelty"] == [0.25]
assert curves.figures["novelty"] == "Tokens never seen. Unit: share of tokens."
assert ("novelty", "share of tokens", "-", "0.25", "Tokens never seen.") in training_table([report]).rows
assert "| `novelty` | share of tokens | Tokens never seen. | `specrl_trainer_novelty` |" in metrics_page.render_table()
"""


def test_a_figure_is_added_by_one_line_of_the_table_and_its_value(tmp_path: Path) -> None:
    services = tmp_path / "services"
    shutil.copytree(ROOT / "services", services, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    table = services / "specrl" / TABLE
    lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if line.startswith("    loss: float"))
    table.write_text("".join([*lines[:place], LINE, *lines[place:]]), encoding="utf-8")
    paths = [str(services), str(ROOT / "operators"), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", SHOW], env=environment, check=True)


@pytest.mark.parametrize(("tokens", "is_known"), [(0, False), (5, True)])
def test_a_figure_averaged_over_nothing_is_unknown(tokens: int, is_known: bool) -> None:
    found = TrainingFigures(mismatch_kl=0.5, mismatch_tokens=tokens).known_values()
    assert ("mismatch_kl" in found) is is_known
    assert "reference_kl" not in found, "no reference"
