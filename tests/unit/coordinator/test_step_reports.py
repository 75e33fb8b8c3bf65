"""A step's report says null, and never 0, for what was not measured. It has the rewards of each source."""

from __future__ import annotations

import pytest

from specrl.coordinator.observe.curves import StepCurves
from specrl.coordinator.observe.sinks.contract import flatten_step
from specrl.coordinator.reports import TrainedStep, build_trained_report
from specrl.coordinator.stopwatch import Lap
from specrl.formats.reports import PhaseSeconds
from specrl.launcher.terminal.rows import format_step
from specrl.records import Batch, Group, Prompt, Reward, TrainMetrics


@pytest.mark.parametrize(("tokens", "mismatch"), [(0, None), (10, 0.0)])
def test_a_mismatch_over_no_tokens_is_null(tokens: int, mismatch: float | None) -> None:
    """Every step of a run with a policy lag had a mismatch of 0.0, which reads as perfect agreement."""
    metrics = TrainMetrics(tokens=3, logprob_seconds=0.0, train_seconds=0.0, mismatch_tokens=tokens)
    report = build_trained_report(TrainedStep(Batch(2, ()), [], metrics), Lap(PhaseSeconds()), {})
    assert (report.mismatch_mean_abs, report.mismatch_max_abs, report.mismatch_kl) == (mismatch,) * 3
    assert report.mismatch_tokens == tokens
    assert (report.loss, report.reference_kl) == (0.0, None)


def a_group(place: int, source: str, *rewards: float) -> Group:
    prompt = Prompt(f"p{place}", place, (2,), "", "", source=source)
    return Group(f"g{place}", prompt, 1, (), tuple(Reward(value) for value in rewards))


def test_a_step_of_several_sources_has_the_rewards_of_each() -> None:
    """Only validations had them: a mean of two tasks hides that one of them is not learned."""
    groups = [a_group(0, "math", 0.0, 1.0), a_group(1, "code", 0.0, 0.0), a_group(2, "math", 1.0, 1.0)]
    step = TrainedStep(Batch(1, ()), groups, TrainMetrics(tokens=3, logprob_seconds=0.0, train_seconds=0.0))
    report = build_trained_report(step, Lap(PhaseSeconds()), {}, ("math", "code", "tools"))
    assert {name: part.model_dump() for name, part in report.sources.items()} == {
        "math": {"reward": 0.75, "groups": 2, "groups_without_signal": 1},
        "code": {"reward": 0.0, "groups": 1, "groups_without_signal": 1},
    }
    assert flatten_step(report)["sources/math/reward"] == 0.75
    assert "by source math 0.750, code 0.000" in format_step(report)
    assert build_trained_report(step, Lap(PhaseSeconds()), {}).sources == {}, "of a run with one source"
    curves = StepCurves([report], ("exact",), ("math", "code", "tools")).downsample_steps(1, None, 5)
    assert curves.source_rewards == {"math": [0.75], "code": [0.0], "tools": [None]}
