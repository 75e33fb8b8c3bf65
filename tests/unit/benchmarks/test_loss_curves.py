"""Tables and the picture of the losses, from finished runs."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from benchmarks.demo_runs import RUN_FILE, overrides_of
from benchmarks.loss_curves import (
    CORRECTIONS,
    LAGS,
    LOSSES,
    NOTHING,
    RATIO,
    TRUNCATED,
    Kind,
    Outcome,
    average_problems,
    average_seeds,
    is_above_zero,
    kinds,
    last_with_interval,
    mean_with_interval,
    picture,
    table,
    worth,
)

from specrl.spec import load_spec
from specrl.spec.trainer import CorrectionMethod

RUN = Outcome(((0, 0.25), (4, 0.5), (8, 0.75)), 100, (0.2, 0.4), lag=3.5, effective=0.9, clipped=0.02)
WORSE = replace(RUN, accuracies=((0, 0.25), (4, 0.5), (8, 0.25)))


def test_every_loss_is_trained_at_every_lag_with_and_without_a_correction() -> None:
    found = kinds("wheels")
    assert len(found) == len({kind.name for kind in found}) == 28
    both = {(kind.loss, kind.lag, kind.correction) for kind in found if kind.correction != RATIO}
    assert both == {(loss, lag, way) for loss in LOSSES for lag in LAGS for way in (NOTHING, TRUNCATED)}


@pytest.mark.parametrize("kind", kinds("wheels"), ids=lambda kind: kind.name)
def test_what_a_kind_sets_is_a_run(kind: Kind) -> None:
    """Fields are set as by --set, so rules between fields are checked, too."""
    spec = load_spec(RUN_FILE, overrides_of(kind.fields()))
    assert spec.schedule.max_policy_lag == kind.lag
    is_corrected = spec.trainer.loss.correction.method is not CorrectionMethod.NONE
    assert is_corrected == (kind.correction == TRUNCATED)


def test_table_has_what_there_is_and_dashes_for_the_rest() -> None:
    found = {Kind("wheels", "GRPO", 4, NOTHING): [WORSE], Kind("wheels", "GRPO", 4, TRUNCATED): [RUN]}
    head, rule, *rows = table(found).splitlines()
    assert head.count("|") == rule.count("|") == rows[0].count("|")
    assert len(rows) == 2
    assert "| 0.25 (0.18-0.34) | - |" in rows[0]
    assert "| 0.75 (0.66-0.82) | - |" in rows[1]
    assert rows[1].endswith("| 3.50 | 0.90 | 0.02 |")


def test_worth_of_a_correction_is_paired_by_loss_and_seed() -> None:
    found = {
        Kind("wheels", loss, 4, way): [run]
        for loss in ("GRPO", "CISPO")
        for way, run in ((NOTHING, WORSE), (TRUNCATED, RUN))
    }
    (row,) = worth(found).splitlines()[2:]
    assert row == "| wheels | 4 | TIS | +0.50 (+0.50 to +0.50) | +0.25 (+0.25 to +0.25) | 2 x 2 |"


def test_interval_of_a_mean_is_students() -> None:
    assert mean_with_interval([0.1, 0.3]) == "+0.20 (-1.07 to +1.47)"  # 12.71 standard errors of 0.1
    assert mean_with_interval([0.1]) == "+0.10"


def test_problems_that_all_seeds_share_count_once() -> None:
    """128 problems of three seeds counted as 384 independent ones, so the interval was too narrow."""
    assert last_with_interval([RUN, RUN, RUN]) == last_with_interval([RUN]) == "0.75 (0.66-0.82)"
    assert average_problems([[1, 0, 0], [1, 1, 0]]) == [1, 0.5, 0]


def test_gain_over_steps_is_judged_by_the_means_of_seeds() -> None:
    """Twenty steps of two runs counted as independent. A difference between two runs shows in every step."""
    apart = average_seeds([[0.1] * 10, [0.3] * 9 + [math.nan]])
    assert apart == [pytest.approx(0.1), pytest.approx(0.3)]
    assert not is_above_zero(apart)
    assert is_above_zero([0.2, 0.21, 0.2])
    assert not is_above_zero([0.2])


def test_picture_stands_alone_with_a_chart_of_each_lag_and_correction() -> None:
    found = {Kind("wheels", loss, lag, way): [RUN, WORSE] for loss in LOSSES for lag in LAGS for way in CORRECTIONS}
    drawn = ET.fromstring(picture(found, "wheels"))  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"
    charts = drawn.findall(f"{space}svg")
    assert len(charts) == len(LAGS) * len(CORRECTIONS)
    assert all(len(chart.findall(f"{space}polyline")) == len(LOSSES) for chart in charts)
    places = {(chart.get("x"), chart.get("y")) for chart in charts}
    assert len(places) == len(charts), "none is drawn over another"
