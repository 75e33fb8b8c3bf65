"""Figures for readers have no digits that are rounding errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.report.runs import a_step

from specrl.coordinator.observe.run_status import RunStatus
from specrl.formats.reports import RunSummary, ValidationReport
from specrl.formats.statistics.rounding import round_figure


@pytest.mark.parametrize(
    ("value", "shown"),
    [(float(np.float32(0.2)), 0.2), (0.49999999999999967, 0.5), (1.5e-9, 1.5e-9), (123456.78, 123456.8), (0.0, 0.0)],
)
def test_a_figure_has_seven_significant_digits(value: float, shown: float) -> None:
    assert round_figure(value) == shown
    assert round_figure(None) is None


def test_a_summary_has_short_numbers() -> None:
    """The last validation was 0.49999999999999967 in `specrl status --json`."""
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(schedule=SimpleNamespace(group_size=4)),
        ledger=SimpleNamespace(facts=SimpleNamespace(drafter_start=None, best_version=None)),
    )
    loop: Any = SimpleNamespace(rollouts=SimpleNamespace(unaccounted_rollouts=0))
    status = RunStatus(context, loop, [])
    steps = [a_step(n, reward=float(np.float32(0.2)), acceptance_length=2 / 3) for n in (1, 2)]
    validations = [
        ValidationReport(policy_version=n, reward=0.49999999999999967, problems=3, seconds=1) for n in (0, 2)
    ]
    status.summarise_steps(steps, validations, ("", "", ""))
    found = status._summary
    assert isinstance(found, RunSummary)
    assert (found.first_reward, found.last_reward) == (0.2, 0.2)
    assert (found.first_validation_reward, found.last_validation_reward) == (0.5, 0.5)
    assert found.last_acceptance_length == 0.6666667
