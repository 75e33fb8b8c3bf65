"""The draft length controller on a simulated engine with known costs and known acceptance."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.generation.simulated_engine import (
    GPU,
    LENGTHS,
    PROPORTIONAL,
    SMALL_POLICY,
    SimulatedEngine,
    expected_speed,
    find_best_length,
    linear_cost,
    make_engine,
)

from specrl.generation.draft_lengths.controller import EARLY_STEPS, TRY_EVERY, DraftingState, DraftLengthController
from specrl.generation.draft_lengths.decoding_step import OFF, Step

LIVE = (1, 4, 8, 16, 64)
COSTS = {"small policy": SMALL_POLICY, "GPU": GPU, "proportional": PROPORTIONAL}


def relative_speed(engine: SimulatedEngine, batch: int, k: int) -> float:
    """The engine's speed over that of a fixed length."""
    return engine.speed / expected_speed(engine.chance, batch, k, engine.cost)


@pytest.mark.parametrize("batch", LIVE)
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("chance", [0.5, 0.8])
def test_the_speed_is_near_that_of_the_best_fixed_length(name: str, batch: int, chance: float) -> None:
    """On a machine with other load, and without any costs at first: the lengths are found in the first steps."""
    speeds = []
    for seed in range(3):
        engine = make_engine(chance, cost=COSTS[name], seed=seed)
        engine.run(batch, 600)
        engine.forget()
        engine.run(batch, 1500)
        speeds.append(relative_speed(engine, batch, find_best_length(chance, batch, engine.cost)))
    assert sum(speeds) / 3 > 0.95
    assert min(speeds) > 0.92


@pytest.mark.parametrize("batch", LIVE)
@pytest.mark.parametrize(("name", "chance"), [*itertools.product(COSTS, (0.0, 0.5)), ("proportional", 0.8)])
def test_it_is_never_slower_than_without_drafts(name: str, batch: int, chance: float) -> None:
    """The former controller reached 0.84 of the speed without drafts with 16 live rollouts of a real model."""
    engine = make_engine(chance, cost=COSTS[name])
    engine.run(batch, 600)
    assert relative_speed(engine, batch, OFF) > 0.75, "not even while it learns"
    engine.forget()
    engine.run(batch, 3000)
    assert relative_speed(engine, batch, OFF) > 0.97


def test_drafts_that_do_not_pay_are_found_in_the_first_steps() -> None:
    engine = make_engine(0.8, cost=PROPORTIONAL)
    used = engine.run(16, 60)
    assert used.index(OFF) < 20
    assert sum(k != OFF for k in engine.run(16, 200)[100:]) < 20


@pytest.mark.parametrize("prompt", [20, 60])
def test_lengths_are_compared_although_every_step_reads_prompts(prompt: int) -> None:
    """With 64 live requests of 40 tokens, some begin at every step."""
    engine = make_engine(0.8, prompt=prompt, reading_s=2e-5)
    engine.run(64, 600)
    engine.forget()
    engine.run(64, 1000)
    fixed = make_engine(0.8, prompt=prompt, reading_s=2e-5)
    fixed.drafting.fix_length(find_best_length(0.8, 64))
    fixed.run(64, 1000)
    assert engine.speed > 0.95 * fixed.speed


def test_larger_batches_get_shorter_drafts() -> None:
    engine = make_engine(0.8)
    engine.run(64, 600)
    engine.run(1, 600)
    table = engine.drafting.table[1:]
    assert table[0] > table[-1]
    assert all(earlier >= later for earlier, later in itertools.pairwise(table))


@pytest.mark.parametrize("batch", LIVE)
def test_tries_take_a_bounded_share_of_the_steps(batch: int) -> None:
    engine = make_engine(0.7, load=0.0)
    engine.run(batch, 10)
    early = sum(engine.drafting.is_trying for _ in range(2 * EARLY_STEPS) if engine.run(batch, 1))
    assert early < EARLY_STEPS
    late = sum(engine.drafting.is_trying for _ in range(100 * TRY_EVERY) if engine.run(batch, 1))
    assert late < 100 * TRY_EVERY / 8


def test_a_length_that_is_much_slower_is_tried_rarely() -> None:
    engine = make_engine(0.9, cost=GPU)
    engine.run(1, 1000)
    assert sum(k == OFF for k in engine.run(1, 8000)) < 8000 * 0.005


# -- other load, clocks, and costs of other runs ---------------------------------------------------------------------


@pytest.mark.parametrize("slower", [0.3, 5.0])
def test_a_machine_that_becomes_slower_or_faster_changes_no_length(slower: float) -> None:
    """Lengths that are not in use must not look cheap when everything slows down, nor dear when it recovers."""
    engine = make_engine(0.7, load=0.0)
    engine.run(4, 1500)
    before = engine.drafting.costs.list_costs(2)
    for turn in range(20):
        engine.disturb = (lambda seconds: slower * seconds) if turn % 2 else (lambda seconds: seconds)
        engine.run(4, 60)
    after = engine.drafting.costs.list_costs(2)
    assert {k: after[k] / after[OFF] for k in after} == {
        k: pytest.approx(before[k] / before[OFF], rel=0.1) for k in before
    }


def sometimes(share: float, value: float) -> Any:
    source = random.Random(3)  # noqa: S311 - no secret
    return lambda seconds: value if source.random() < share else seconds


@pytest.mark.parametrize("value", [0.0, -3.0, 1e9, math.inf, math.nan, 10.0, 1e-9])
@pytest.mark.parametrize(("batch", "chance"), [(1, 0.8), (16, 0.0)])
def test_a_clock_that_jumps_and_steps_that_stall_change_little(value: float, batch: int, chance: float) -> None:
    engine = make_engine(chance, disturb=sometimes(0.03, value))
    engine.run(batch, 800)
    engine.forget()
    engine.run(batch, 1500)
    assert relative_speed(engine, batch, find_best_length(chance, batch)) > 0.93
    json.dumps(engine.drafting.build_report(), allow_nan=False)


def make_table(factor: dict[int, float]) -> dict[str, Any]:
    nodes = DraftLengthController(64, LENGTHS).costs.nodes
    rows = {str(k): [SMALL_POLICY(live, k, k) * factor.get(k, 1.0) for live in nodes] for k in LENGTHS}
    return {"nodes": list(nodes), "seconds": rows}


@pytest.mark.parametrize("chance", [0.0, 0.7])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    "factor", [{OFF: 100.0}, {5: 0.001}, {OFF: 1e-6}, dict.fromkeys(range(1, 6), 1e250), {2: 0.5, 4: 2.0}]
)
def test_costs_of_another_machine_are_found_out(factor: dict[int, float], batch: int, chance: float) -> None:
    engine = make_engine(chance)
    assert engine.drafting.costs.load_json(make_table(factor))
    engine.drafting.revise_table()
    engine.run(batch, 500)
    assert relative_speed(engine, batch, OFF) > 0.8, "not even while it learns"
    engine.forget()
    engine.run(batch, 1500)
    assert relative_speed(engine, batch, find_best_length(chance, batch)) > 0.93
    contradicted = [
        event for event in engine.drafting.build_report()["events"] if event["kind"] == "costs_contradicted"
    ]
    assert 1 <= len(contradicted) <= 2


def test_costs_of_the_same_machine_are_used_from_the_first_step() -> None:
    engine = make_engine(0.8)
    assert engine.drafting.costs.load_json(make_table({}))
    engine.drafting.revise_table()
    assert engine.drafting.table[1] > engine.drafting.table[64] > 0
    engine.run(1, 300)
    assert relative_speed(engine, 1, find_best_length(0.8, 1)) > 0.9
    assert engine.drafting.build_report()["events"] == []


# -- switching off and on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_a_useless_drafter_is_switched_off_and_rarely_tried_again(batch: int) -> None:
    engine = make_engine(0.0)
    engine.run(batch, 400)
    assert engine.drafting.state is DraftingState.OFF
    used = engine.run(batch, 20_000)
    assert sum(k != OFF for k in used) / len(used) < 0.04
    moves = {(event["before"], event["after"]) for event in engine.drafting.events}
    assert {("drafting", "off"), ("off", "trial"), ("trial", "off")} >= moves


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_drafter_that_recovers_is_switched_on(batch: int) -> None:
    engine = make_engine(0.0)
    engine.run(batch, 500)
    assert engine.drafting.state is DraftingState.OFF
    engine.chance = 0.8
    engine.drafting.handle_new_weights()
    engine.run(batch, 14_000)
    assert engine.drafting.state is DraftingState.DRAFTING
    assert expected_speed(0.8, batch, engine.drafting.table[batch]) > 0.95 * expected_speed(
        0.8, batch, find_best_length(0.8, batch)
    )


def rest(engine: SimulatedEngine) -> None:
    """Let the engine decode, with requests that never end, until a trial is due at the next request."""
    engine.live.clear()
    engine.tokens_each = 1e9
    engine.run(16, 14_000)
    engine.chance = 0.9


def a_resting_engine() -> SimulatedEngine:
    engine = make_engine(0.0)
    engine.run(16, 500)
    rest(engine)
    return engine


def test_a_trial_waits_for_a_new_request() -> None:
    engine = a_resting_engine()
    engine.run(16, 500)  # no request begins, and the drafter has read none of these
    assert engine.drafting.state is DraftingState.OFF
    engine.live.clear()
    engine.run(16, 100)
    assert engine.drafting.state is DraftingState.DRAFTING


def test_a_trial_counts_only_requests_that_the_drafter_has_read() -> None:
    engine = a_resting_engine()
    engine.live.pop()  # the drafter can draft for its successor, and not for the fifteen others
    engine.run(16, 40)
    assert engine.drafting.state is DraftingState.TRIAL
    assert max(engine.drafting.acceptance.prefix_probabilities()) > 0.7


def test_a_trial_with_too_few_drafts_keeps_the_old_estimate() -> None:
    engine = a_resting_engine()
    known = engine.drafting.acceptance.prefix_probabilities()
    engine.drafting.record_request()
    assert engine.drafting.state is DraftingState.TRIAL
    engine.run(16, 300)
    assert engine.drafting.state is DraftingState.OFF
    assert engine.drafting.acceptance.prefix_probabilities() == known


def test_an_initialised_drafter_is_used_after_a_useless_untrained_one() -> None:
    engine = make_engine(0.0)
    engine.run(16, 500)
    engine.chance = 0.8
    engine.drafting.reset_drafter()
    engine.live.clear()
    engine.run(16, 600)
    assert engine.drafting.state is DraftingState.DRAFTING
    best = expected_speed(0.8, 16, find_best_length(0.8, 16))
    assert expected_speed(0.8, 16, engine.drafting.table[16]) > 0.95 * best


def test_falling_acceptance_shortens_drafts() -> None:
    engine = make_engine(0.95)
    engine.run(4, 1000)
    before = engine.drafting.table[4]
    engine.chance = 0.4
    engine.run(4, 4000)
    assert engine.drafting.table[4] < before


def test_each_batch_size_has_its_own_decision() -> None:
    """Drafts pay with one live request and not with 64."""
    engine = make_engine(0.35)
    engine.run(1, 3000)
    assert engine.drafting.table[1] > 0
    engine.run(64, 300)
    assert sum(k != OFF for k in engine.run(64, 2000)) < 200
    assert sum(k > 0 for k in engine.run(1, 200)) > 150


def test_the_draft_rate_of_a_lookup_is_estimated() -> None:
    """Look-up finds a draft in one step of ten. A step costs what it then costs on average."""
    drafting = DraftLengthController(16, LENGTHS)
    recent: list[Step] = []
    for number in range(4000):
        k = drafting.next_table()[8]
        found = number % 10 == 0 and k > 0
        for _ in range(8 if found else 0):
            drafting.record_verified_draft(k, k, True)
        recent = [*recent[-2:], Step(0.0, 8, k, 0)]
        drafting.record_step(recent, 8 + (8 * k if found else 0), GPU(8, k if found else OFF, OFF))
    assert drafting.acceptance.emitted_by_length()[1] == pytest.approx(1.1, abs=0.04)
    assert drafting.table[8] > 0


# -- catch-ups -------------------------------------------------------------------------------------------------------

LONG_TAILED = [20 * 1.08**place for place in range(64)]
"""Tokens of each request of a batch of 64: half of them end within 9 % of the longest one's time."""

SHORT_TAIL = [100.0] * 60 + [112.0] * 4

COSTLY = linear_cost(0.010, 0.0004, 0.001, 0.00004)
"""A drafter that pays below about ten live requests, and costs much with 64."""


def run_drains(
    chance: float, reading_s: float = 0.0, tokens: Sequence[float] = LONG_TAILED, *, is_limited: bool = False
) -> tuple[SimulatedEngine, list[tuple[int, int]], float]:
    """Run twenty versions; returns the engine, its last batch, and its speed relative to decoding without drafts.

    The first eight versions, in which the controller learns, do not count in the speed.
    """
    engine = make_engine(chance, cost=COSTLY, reading_s=reading_s, is_limited=is_limited)
    used: list[tuple[int, int]] = []
    for version in range(20):
        if version == 8:
            engine.forget()
            engine.catch_ups = 0
        used = engine.drain(tokens)
    without = make_engine(0.0, cost=COSTLY, reading_s=reading_s)
    without.drafting.fix_length(OFF)
    without.drain(tokens)
    return engine, used, engine.speed / without.speed


def test_a_batch_is_decoded_without_drafts_while_full_and_with_drafts_at_its_end() -> None:
    engine, used, speed = run_drains(0.6, reading_s=1e-5)
    assert engine.drafting.state is DraftingState.DRAFTING
    assert engine.drafting.table[64] == OFF
    assert sum(k > 0 for batch, k in used if batch <= 4) > 0.7 * sum(batch <= 4 for batch, _ in used)
    assert engine.catch_ups >= 8, "about once a batch"
    assert speed > 1.05


def test_there_is_no_catch_up_if_it_costs_more_than_drafts_save() -> None:
    engine, _, speed = run_drains(0.8, reading_s=0.01)
    assert engine.catch_ups <= 3
    assert speed > 0.95


def test_repeated_useless_catch_ups_end() -> None:
    """What catch-ups cost counts against drafts, so after some of them drafting is switched off."""
    *_, speed = run_drains(0.8, reading_s=3e-4, tokens=SHORT_TAIL)
    assert speed > 0.97


def test_there_is_no_catch_up_for_a_few_remaining_tokens() -> None:
    engine, *_ = run_drains(0.8, reading_s=3e-4, tokens=SHORT_TAIL, is_limited=True)
    assert engine.catch_ups == 0


DRAINS = ((0.0, 1e-2), (0.3, 1e-3), (0.4, 1e-4), (0.5, 1e-3), (0.7, 1e-2), (0.9, 0.0))
"""Each acceptance once; in the middle drafts hardly pay. The other pairs are deep."""
OTHER_DRAINS = sorted({*itertools.product((0.0, 0.3, 0.4, 0.5, 0.7, 0.9), (0.0, 1e-4, 1e-3, 1e-2))} - {*DRAINS})


@pytest.mark.parametrize(
    ("chance", "reading_s"), [*DRAINS, *(pytest.param(*pair, marks=pytest.mark.deep) for pair in OTHER_DRAINS)]
)
def test_a_draining_batch_is_never_much_slower_than_without_drafts(chance: float, reading_s: float) -> None:
    *_, speed = run_drains(chance, reading_s)
    # A drain is short at each batch size, so a large share of its steps tries lengths. The worst pair has 0.954.
    assert speed > 0.95


def test_expensive_prompts_switch_the_drafter_off() -> None:
    """By the costs of decoding steps alone drafts would pay, since these leave out the prompts that it reads."""
    cost = linear_cost(2e-3, 2e-5, 6e-4, 0.0)
    engine = make_engine(0.6, cost=cost, prompt=2000, reading_s=2e-5, tokens_each=8.0)
    assert find_best_length(0.6, 2, cost) > 0
    engine.run(2, 4000)
    assert engine.drafting.table[2] == OFF


# -- reports, and lengths that are fixed -----------------------------------------------------------------------------


def test_measured_and_predicted_gain_match_the_simulation() -> None:
    engine = make_engine(0.8)
    engine.run(8, 3000)
    report = engine.drafting.build_report()
    expected = expected_speed(0.8, 8, find_best_length(0.8, 8)) / expected_speed(0.8, 8, OFF)
    assert report["measured_gain"] == pytest.approx(expected, rel=0.06)
    assert report["predicted_gain"] == pytest.approx(expected, rel=0.06)


def test_a_fixed_length_is_always_used_and_changes_no_later_decision() -> None:
    engine = make_engine(0.8)
    engine.run(8, 2000)
    before = engine.drafting.build_report()
    for k in (1, 5):
        engine.drafting.fix_length(k)
        assert set(engine.run(8, 50)) == {k}
    engine.drafting.fix_length(None)
    assert engine.drafting.build_report() == before | {"events": []}


@settings(max_examples=50)
@given(st.integers(1, 300), st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_every_batch_size_has_an_allowed_length(largest: int, batches: Sequence[int]) -> None:
    engine = make_engine(0.6, largest)
    for batch in batches:
        engine.run(min(batch, largest), 15)
        assert set(engine.drafting.table[1:]) <= set(LENGTHS)
