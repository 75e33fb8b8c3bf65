"""Invariants of simulated runs of any shape."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.drain import drain_s
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.simulator.scenarios import a_scenario, a_trace

from specrl.simulator.pipeline import PHASES
from specrl.simulator.simulate import batch_s, prepare_scenario, simulate_events, simulate_scenario

SHAPES = st.fixed_dictionaries(
    {
        "lag": st.integers(0, 3),
        "prompts": st.integers(1, 9),
        "group": st.integers(1, 6),
        "gpus": st.integers(1, 8),
        "seats": st.integers(1, 40),
        "seed": st.integers(0, 5),
        "kill": st.sampled_from([None, 0.0, 3.0, 20.0]),
    }
)


@given(shape=SHAPES)
@settings(max_examples=40, deadline=None)
def test_every_rollout_is_trained_once_within_the_lag_bound_and_phases_partition_time(shape: dict[str, int]) -> None:
    kill = shape["kill"]
    trace = a_trace(
        f"schedule.maxPolicyLag={shape['lag']}",
        f"schedule.promptsPerStep={shape['prompts']}",
        f"schedule.groupSize={shape['group']}",
        f"layout.generationGpus={shape['gpus']}",
        f"engine.maxLiveRollouts={shape['seats']}",
        f"schedule.seed={shape['seed']}",
        failures=[] if kill is None else [{"replica": 0, "atS": kill, "backAfterS": 5}],
    )
    size = shape["prompts"] * shape["group"]
    assert [step.rollouts for step in trace.steps] == [size] * 6
    assert trace.graded == trace.trained + trace.held == 6 * size
    assert all(step.policy_lag_max <= shape["lag"] for step in trace.steps)
    ends = [step.began_s + step.wall_s for step in trace.steps]
    assert [step.began_s for step in trace.steps] == pytest.approx([0, *ends[:-1]])
    assert all(set(step.phases) == set(PHASES) and min(step.phases.values()) >= 0 for step in trace.steps)


def test_events_agree_with_the_integral_for_a_synchronous_batch() -> None:
    scenario = a_scenario("schedule.maxPolicyLag=0", "schedule.promptsPerStep=24", "schedule.groupSize=8")
    prepared = prepare_scenario(scenario)
    lengths = prepared.lengths.draw_lengths(24 * 6, 8, np.random.default_rng(0))
    steps = simulate_events(prepared).steps
    for place, step in enumerate(steps):
        integral = drain_s(lengths[24 * place : 24 * (place + 1)], 8, prepared.pace_table, 200)
        assert step.phases["generation"] == pytest.approx(integral, rel=0.01)  # the rest is reading prompts


def test_bundling_rollouts_changes_a_large_run_little(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = a_scenario("schedule.promptsPerStep=64", "schedule.groupSize=8", "schedule.steps=8")
    one_by_one = simulate_scenario(scenario).speculative.step_s
    monkeypatch.setattr("specrl.simulator.pipeline.MAX_UNBUNDLED_SLOTS", 10)
    assert simulate_scenario(scenario).speculative.step_s == pytest.approx(one_by_one, rel=0.05)


def test_equal_seeds_give_equal_results_and_different_seeds_different_ones() -> None:
    assert a_trace() == a_trace()
    assert a_trace().steps != a_trace("schedule.seed=1").steps


@given(low=st.floats(1.0, 4.0), more=st.floats(0.0, 2.0))
@settings(max_examples=20, deadline=None)
def test_more_acceptance_is_never_slower(low: float, more: float) -> None:
    seconds = [
        batch_s(prepare_scenario(a_scenario(f"speculation.acceptanceLength={value}")), 1)
        for value in (low, min(4.0, low + more))
    ]
    assert seconds[1] <= seconds[0] * (1 + 1e-9)


@given(k=st.integers(1, 8), chance=st.floats(0.0, 1.0))
@settings(max_examples=20, deadline=None)
def test_speculation_gains_at_most_k_plus_one(k: int, chance: float) -> None:
    scenario = a_scenario("schedule.maxPolicyLag=0", f"speculation={{mechanism: eagle3, k: {k}, chances: [{chance}]}}")
    outcome = simulate_scenario(scenario)
    assert outcome.rollout_speedup <= k + 1
    share = outcome.plain.phases_s["generation"] / outcome.plain.step_s
    assert outcome.step_speedup <= 1 / (share / (k + 1) + 1 - share) + 1e-9


def test_a_draft_length_chosen_by_batch_is_never_slower_than_a_fixed_one_or_none() -> None:
    scenario = a_scenario("schedule.maxPolicyLag=0", "speculation={mechanism: eagle3, k: 6, chances: [0.6]}")
    adaptive = batch_s(prepare_scenario(scenario.with_fields(speculation={"is_adaptive": True})), 1)
    fixed = [batch_s(prepare_scenario(scenario.with_fields(speculation={"k": k})), 1) for k in range(1, 7)]
    assert adaptive <= min(fixed)
    assert adaptive <= batch_s(prepare_scenario(a_scenario("schedule.maxPolicyLag=0", "speculation=none")), 1)


def test_more_lag_exposes_less_generation() -> None:
    exposed = [
        simulate_scenario(
            a_scenario(f"schedule.maxPolicyLag={lag}", "schedule.steps=12")
        ).speculative.exposed_generation_s
        for lag in (0, 1, 2)
    ]
    assert exposed[0] > exposed[1] >= exposed[2]


def test_replicas_that_die_for_good_slow_a_run_down() -> None:
    whole = a_trace("schedule.maxPolicyLag=0")
    broken = a_trace("schedule.maxPolicyLag=0", failures=[{"replica": place, "atS": 1} for place in range(1, 8)])
    assert broken.requeued > 0
    assert broken.steps[-1].wall_s > whole.steps[-1].wall_s
