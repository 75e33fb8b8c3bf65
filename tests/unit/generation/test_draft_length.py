"""The controller of draft lengths against an engine made of formulas: known costs, known acceptance."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.generation.draft_length import (
    DISTURBED_STEPS,
    OFF,
    PRIOR_CHANCE,
    DraftLengths,
    State,
    StepCosts,
    batch_nodes,
    calibrated_lengths,
)

LONGEST = 5
LENGTHS = (OFF, *range(LONGEST + 1))


def a_cost(batch: int, k: int) -> float:
    """Seconds: weights are read once, every verified token and every draft pass costs something."""
    if k == OFF:
        return 0.010 + 0.0002 * batch
    return 0.010 + 0.0002 * batch * (k + 1) + 0.001 * max(1, k)


@dataclass
class FormulaRequest:
    """left: tokens until it has finished. is_whole: a drafter ran in all its steps, so that it can be drafted for."""

    left: float
    context: int = 10
    is_whole: bool = True


@dataclass
class FormulaEngine:
    """Runs a controller as the scheduler does; `chance` is that of each draft token, given the ones before.

    Reading takes `reading_s` a token, a tenth more with the drafter.
    """

    drafting: DraftLengths
    chance: float
    cost: Callable[[int, int], float] = a_cost
    seed: int = 0
    reading_s: float = 0.0
    is_limited: bool = False
    """The longest request that is live ends where it has to, not before."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311 - no secret
        self.seconds = 0.0
        self.tokens = 0
        self.catch_ups = 0
        self.live: list[FormulaRequest] = []

    def calibrate(self) -> None:
        nodes = self.drafting.costs.nodes
        lengths = calibrated_lengths(self.drafting.lengths)
        self.drafting.costs.fill({k: [self.cost(node, k) for node in nodes] for k in lengths})

    def run(self, batch: int, steps: int, tokens: float = 40.0) -> list[int]:
        """So many steps at a load of requests of so many tokens; returns the lengths that were used."""
        used = []
        del self.live[batch:]
        for _ in range(steps):
            while len(self.live) < batch:
                self.begin(tokens * self.random.uniform(0.5, 1.5))
            used.append(self.step())
        return used

    def drain(self, tokens: Sequence[float]) -> list[tuple[int, int]]:
        """A batch of requests of so many tokens, until the last one has finished; then new weights.

        Returns how many were live, and the length, step by step.
        """
        self.live.clear()
        for left in tokens:
            self.begin(left)
        self.read(self.drafting.lookup()[len(self.live)], is_catch_up=False)
        used = []
        while self.live:
            used.append((len(self.live), self.step()))
        self.drafting.weights_changed()
        return used

    def begin(self, tokens: float) -> None:
        self.drafting.saw_request()
        self.live.append(FormulaRequest(tokens))

    def read(self, length: int, is_catch_up: bool) -> None:
        """All that is live, for the first time or again."""
        batch, tokens = len(self.live), sum(request.context for request in self.live)
        seconds = self.cost(batch, length) + tokens * self.reading_s * (1.0 if length == OFF else 1.1)
        self.drafting.saw_reading(batch, length, tokens, seconds, is_catch_up)
        self.seconds += seconds
        for request in self.live:
            request.is_whole = length != OFF

    def step(self) -> int:
        batch = len(self.live)
        k = self.drafting.lookup()[batch]
        is_missed = any(not request.is_whole for request in self.live)
        if is_missed and self.drafting.fixed is None and self.drafting.state is not State.TRIAL:
            left = (round(request.left) if self.is_limited else 1000 for request in self.live)
            if self.drafting.catch_up_is_due(batch, (request.context for request in self.live), left):
                self.read(k, is_catch_up=True)
                self.catch_ups += 1
            else:
                k = OFF
        emitted = 0
        for request in self.live:
            request.is_whole = request.is_whole and (k != OFF or self.drafting.is_probing)
            accepted = 0
            while accepted < k and request.is_whole and self.random.random() < self.chance:
                accepted += 1
            if k > 0:
                self.drafting.saw_draft(k, accepted, request.is_whole)
            request.left -= 1 + accepted
            request.context += 1 + accepted
            emitted += 1 + accepted
        seconds = self.cost(batch, k) * self.random.uniform(0.95, 1.05)
        self.drafting.saw_step(batch, k, emitted, seconds)
        self.seconds += seconds
        self.tokens += emitted
        self.live = [request for request in self.live if request.left > 0]
        return k


def an_engine(chance: float, max_batch: int = 64, **rest: int) -> FormulaEngine:
    engine = FormulaEngine(DraftLengths(max_batch, LENGTHS), chance, **rest)
    engine.calibrate()
    return engine


def best_length(chance: float, batch: int) -> int:
    def speed(k: int) -> float:
        return sum(chance**i for i in range(max(k, 0) + 1)) / a_cost(batch, k)

    return max(LENGTHS, key=speed)


def speed_of(chance: float, batch: int, k: int) -> float:
    return sum(chance**i for i in range(max(k, 0) + 1)) / a_cost(batch, k)


def test_a_longer_draft_is_never_believed_to_cost_less() -> None:
    costs = StepCosts((1, 4), (OFF, 0, 1, 2, 3))
    costs.fill({OFF: [1.0, 1.0], 0: [2.0, 5.0], 1: [2.2, 3.0], 3: [2.6, 6.0]})
    assert [costs.seconds[k] for k in (OFF, 0, 1, 2, 3)] == [
        [1.0, 1.0],
        [2.0, 4.0],
        [2.2, 4.0],
        [pytest.approx(2.4), 5.0],
        [2.6, 6.0],
    ]


@pytest.mark.parametrize("slower", [0.7, 1.5])
def test_a_machine_that_changes_is_no_length_that_does(slower: float) -> None:
    """From the very first step, and again when what is in use has long been known."""
    costs = StepCosts((1, 4), (OFF, 0, 1, 2, 3))
    costs.fill({k: [k + 3.0, k + 6.0] for k in costs.lengths})
    before = costs.at(1, 3) / costs.at(1, 2)
    for speed in (slower, 1.0, slower):
        for _ in range(100):
            costs.correct(1, 3, speed * 6.0 / costs.at(1, 3))
        assert costs.at(1, 3) == pytest.approx(speed * 6.0, rel=0.01)
        assert costs.at(1, 3) / costs.at(1, 2) == pytest.approx(before, rel=0.03)


def test_a_length_that_was_measured_wrongly_is_known_after_some_steps_beside_another() -> None:
    costs = StepCosts((1, 4), (OFF, 0, 1, 2, 3))
    costs.fill({k: [k + 3.0, k + 6.0] for k in costs.lengths})
    for _ in range(10):
        for k, true_s, steps in ((2, 5.0, 60), (3, 5.4, 6)):  # 3 was measured to take 6
            for _ in range(steps):
                costs.correct(1, k, true_s / costs.at(1, k))
    assert costs.at(1, 3) / costs.at(1, 2) == pytest.approx(5.4 / 5.0, rel=0.02)
    assert costs.at(1, 1) / costs.at(1, 2) == pytest.approx(4.0 / 5.0, rel=0.02)


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_speed_comes_within_three_per_cent_of_the_best_fixed_length(chance: float, batch: int) -> None:
    engine = an_engine(chance)
    engine.run(batch, 400)
    engine.seconds, engine.tokens = 0.0, 0
    engine.run(batch, 2000)
    best = batch * max(speed_of(chance, batch, k) for k in LENGTHS)
    assert engine.tokens / engine.seconds > 0.97 * best


def test_larger_batches_get_shorter_drafts() -> None:
    engine = an_engine(0.8)
    engine.run(64, 300)
    engine.run(1, 300)
    table = engine.drafting.table[1:]
    assert table[0] > table[-1]
    assert all(earlier >= later - 1 for earlier, later in itertools.pairwise(table))


def test_useless_drafter_is_switched_off_and_tried_again_rarely() -> None:
    engine = an_engine(0.0)
    used = engine.run(16, 20_000)
    assert engine.drafting.state in {State.OFF, State.TRIAL}
    assert sum(k != OFF for k in used) / len(used) < 0.04
    assert engine.tokens / engine.seconds > 0.97 * 16 * speed_of(0.0, 16, OFF)
    moves = [(event["before"], event["after"]) for event in engine.drafting.events]
    assert moves[0] == ("drafting", "off")
    assert ("off", "trial") in moves
    assert ("trial", "off") in moves
    assert ("trial", "drafting") not in moves


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_useless_drafter_is_found_out_at_any_load(batch: int) -> None:
    """Even where a single token that is never accepted seems too dear to be tried."""
    engine = FormulaEngine(DraftLengths(64, LENGTHS), 0.0, cost=lambda batch, k: 0.01 * (1 + (k + 1) * 0.8))
    engine.calibrate()
    engine.run(batch, 800)
    assert engine.drafting.state is State.OFF


def test_drafter_that_recovers_is_switched_on_again_after_new_weights() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    assert engine.drafting.state is State.OFF
    engine.chance = 0.8
    engine.drafting.weights_changed()
    engine.run(16, 3000)
    assert engine.drafting.state is State.DRAFTING
    assert engine.drafting.table[16] == best_length(0.8, 16)
    believed = [engine.drafting.costs.at(16, k) / a_cost(16, k) for k in LENGTHS]
    assert max(believed) / min(believed) < 1.05, "those that a trial passes over have drafts, too"


def test_trial_waits_for_a_request_that_can_be_drafted_for() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    engine.chance = 0.9
    engine.drafting.weights_changed()
    engine.live.clear()
    engine.run(16, 5000, tokens=1e9)  # the tail of a batch: nothing begins, and the drafter has read none of these
    assert engine.drafting.state is State.OFF
    engine.live.clear()
    engine.run(16, 100)
    assert engine.drafting.state is State.DRAFTING


def test_trial_believes_requests_that_the_drafter_has_read() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    engine.chance = 0.9
    engine.drafting.weights_changed()
    engine.live.clear()
    engine.run(16, 1500, tokens=1e9)
    engine.live.pop()  # the one that follows is drafted for at 0.9, the fifteen others not at all
    engine.run(16, 40, tokens=1e9)
    assert engine.drafting.state is State.TRIAL
    assert max(engine.drafting.acceptance.chances()) > PRIOR_CHANCE


def test_trial_that_saw_too_little_leaves_what_was_known() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    engine.drafting.weights_changed()
    known = engine.drafting.acceptance.chances()
    engine.live.clear()
    engine.run(16, 1500, tokens=1e9)
    engine.drafting.saw_request()
    assert engine.drafting.state is State.TRIAL
    engine.run(16, 300, tokens=1e9)
    assert engine.drafting.state is State.OFF
    assert engine.drafting.acceptance.chances() == known


LONG_TAILED = [20 * 1.08**place for place in range(64)]
"""Tokens of a batch of 64: half of them end within 0.09 of the longest one's time."""


def a_dear_step(batch: int, k: int) -> float:
    """A drafter that costs more than it saves from about ten live on, and much with 64."""
    return (0.010 + 0.0004 * batch * (max(k, 0) + 1)) * (1.0 if k == OFF else 1.1)


def after_drains(
    chance: float, reading_s: float = 0.0, tokens: Sequence[float] = LONG_TAILED, *, is_limited: bool = False
) -> tuple[FormulaEngine, list[tuple[int, int]], float]:
    """After some versions: the engine, its last batch, and its speed relative to that without drafts.

    The first two are left out of the speed.
    """
    engine = FormulaEngine(DraftLengths(64, LENGTHS), chance, a_dear_step, reading_s=reading_s, is_limited=is_limited)
    engine.calibrate()
    used: list[tuple[int, int]] = []
    for version in range(12):
        if version == 2:
            engine.seconds, engine.tokens = 0.0, 0
        used = engine.drain(tokens)
    without = FormulaEngine(DraftLengths(64, LENGTHS, fixed=OFF), 0.0, a_dear_step, reading_s=reading_s)
    without.calibrate()
    without.drain(tokens)
    return engine, used, engine.tokens / engine.seconds / (without.tokens / without.seconds)


def test_a_batch_is_decoded_plainly_while_it_is_full_and_drafted_for_at_its_end() -> None:
    engine, used, speed = after_drains(0.8, reading_s=1e-5)
    assert engine.drafting.state is State.DRAFTING
    assert {k for batch, k in used if batch == 64} == {OFF}
    assert sum(k > 0 for batch, k in used if batch <= 4) > 0.8 * sum(batch <= 4 for batch, _ in used)
    assert engine.catch_ups == 12, "once a batch"
    assert speed > 1.3


def test_requests_are_not_read_again_when_that_costs_more_than_drafts_save() -> None:
    engine, _, speed = after_drains(0.8, reading_s=0.1)
    assert engine.catch_ups <= 2
    assert speed > 0.98


def test_a_batch_that_ends_as_soon_as_it_is_small_is_not_read_again_for_ever() -> None:
    """What a catch-up costs is a promise that was not kept: after some, drafting is given up."""
    tokens = [100.0] * 60 + [112.0] * 4
    _, _, speed = after_drains(0.8, reading_s=3e-4, tokens=tokens)
    assert speed > 0.97


def test_a_batch_is_not_read_again_for_the_few_tokens_that_it_can_have_left() -> None:
    tokens = [100.0] * 60 + [112.0] * 4
    engine, *_ = after_drains(0.8, reading_s=3e-4, tokens=tokens, is_limited=True)
    assert engine.catch_ups == 0
    engine, _, speed = after_drains(0.8, reading_s=1e-5, is_limited=True)
    assert engine.catch_ups == 12, "once a batch"
    assert speed > 1.3


def test_a_load_that_has_fallen_is_drafted_for_although_each_request_is_short() -> None:
    engine = FormulaEngine(DraftLengths(64, LENGTHS), 0.8, a_dear_step, reading_s=1e-3, is_limited=True)
    engine.calibrate()
    engine.run(64, 300)
    assert engine.drafting.table[64] == OFF
    assert sum(k > 0 for k in engine.run(4, 1000, tokens=20.0)[-500:]) > 400


def test_neighbours_are_tried_ever_less_often_while_nothing_changes() -> None:
    engine = an_engine(0.7)
    used = engine.run(8, 20_000)
    chosen = engine.drafting.table[8]
    early, late = used[:2000], used[-8000:]
    assert sum(k != chosen for k in late) / len(late) < 0.015 < sum(k != chosen for k in early) / len(early)


def test_a_load_that_moves_around_the_size_at_which_drafts_begin_to_pay_costs_nothing() -> None:
    engine = FormulaEngine(DraftLengths(64, LENGTHS), 0.6, a_dear_step, reading_s=1e-4)
    engine.calibrate()
    engine.run(64, 200)
    border = next(batch for batch in range(1, 65) if engine.drafting.table[batch] == OFF)
    engine.seconds, engine.tokens, plain_s = 0.0, 0, 0.0
    for turn in range(400):
        before = engine.tokens
        batch = border + (2 if turn % 2 else -2)
        engine.run(batch, 10, tokens=200.0)
        plain_s += (engine.tokens - before) / batch * a_dear_step(batch, OFF)
    assert plain_s / engine.seconds > 0.97


def test_initialised_drafter_is_used_although_the_untrained_one_was_useless() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    assert engine.drafting.state is State.OFF
    engine.chance = 0.8
    engine.drafting.drafter_replaced()
    engine.live.clear()
    engine.run(16, 200)
    assert engine.drafting.state is State.DRAFTING
    assert speed_of(0.8, 16, engine.drafting.table[16]) > 0.98 * speed_of(0.8, 16, best_length(0.8, 16))


@pytest.mark.parametrize("batch", [1, 4])
def test_few_requests_are_enough_for_a_trial(batch: int) -> None:
    engine = an_engine(0.0)
    engine.run(batch, 1000)
    assert engine.drafting.state is State.OFF
    engine.chance = 0.9
    engine.drafting.weights_changed()
    engine.run(batch, 3000)
    assert engine.drafting.state is State.DRAFTING


DRAINS = ((0.0, 1e-2), (0.3, 1e-3), (0.4, 1e-4), (0.5, 1e-3), (0.7, 1e-2), (0.9, 0.0))
"""Each chance once; drafts hardly pay at those in the middle. The other pairs are deep."""
OTHER_DRAINS = sorted({*itertools.product((0.0, 0.3, 0.4, 0.5, 0.7, 0.9), (0.0, 1e-4, 1e-3, 1e-2))} - {*DRAINS})


@pytest.mark.parametrize(
    ("chance", "reading_s"), [*DRAINS, *(pytest.param(*pair, marks=pytest.mark.deep) for pair in OTHER_DRAINS)]
)
def test_draining_batch_is_never_much_slower_than_without_drafts(chance: float, reading_s: float) -> None:
    *_, speed = after_drains(chance, reading_s)
    assert speed > 0.97


def test_prompts_that_the_drafter_reads_in_vain_switch_it_off() -> None:
    """The costs of lengths say that drafts pay; they do not know what prompts cost."""
    engine = an_engine(0.5)
    engine.drafting.fix(None)
    for number in range(6000):
        engine.run(4, 1, tokens=4.0)
        if engine.drafting.table[4] != OFF:
            engine.drafting.saw_reading(4, engine.drafting.table[4], 40, 0.1, is_catch_up=False)
        if number == 200:
            assert engine.drafting.table[4] > 0
    assert engine.drafting.table[4] == OFF


def test_falling_acceptance_shortens_drafts() -> None:
    engine = an_engine(0.95)
    engine.run(4, 1000)
    before = engine.drafting.table[4]
    engine.chance = 0.4
    engine.run(4, 3000)
    assert engine.drafting.table[4] < before
    assert engine.drafting.table[4] == best_length(0.4, 4)


def test_wrong_calibration_is_corrected_by_what_is_seen() -> None:
    engine = an_engine(0.7)
    spoilt = engine.drafting.costs.seconds[3]
    spoilt[:] = [value * 1.3 for value in spoilt]
    engine.run(4, 6000)
    assert engine.drafting.costs.at(4, 3) == pytest.approx(a_cost(4, 3), rel=0.06)


def test_a_few_probes_put_a_length_right_that_was_calibrated_a_little_wrong() -> None:
    engine = an_engine(0.7)
    best = best_length(0.7, 4)
    spoilt = engine.drafting.costs.seconds[best]
    spoilt[:] = [value * 1.08 for value in spoilt]
    engine.run(4, 300)
    assert engine.drafting.table[4] != best
    engine.run(4, 3000)
    costs = engine.drafting.costs
    for k in (best - 1, best + 1):
        assert costs.at(4, best) / costs.at(4, k) == pytest.approx(a_cost(4, best) / a_cost(4, k), rel=0.03)


def test_useless_drafter_is_found_out_although_calibration_favoured_it() -> None:
    engine = an_engine(0.0)
    spoilt = engine.drafting.costs.seconds[OFF]
    spoilt[:] = [value * 1.3 for value in spoilt]
    engine.run(16, 4000)
    assert engine.drafting.table[16] == OFF


def test_slower_machine_does_not_look_like_dearer_drafts() -> None:
    slow = {"factor": 1.0}
    engine = FormulaEngine(DraftLengths(64, LENGTHS), 0.7, cost=lambda batch, k: slow["factor"] * a_cost(batch, k))
    engine.calibrate()
    engine.run(4, 500)
    slow["factor"] = 2.0
    engine.run(4, 500)
    assert engine.drafting.state is State.DRAFTING
    best = max(speed_of(0.7, 4, k) for k in LENGTHS)
    assert speed_of(0.7, 4, engine.drafting.table[4]) > 0.97 * best
    for k in LENGTHS:
        found = engine.drafting.costs.at(4, k) / engine.drafting.costs.at(4, OFF)
        assert found == pytest.approx(a_cost(4, k) / a_cost(4, OFF), rel=0.12)


def test_disturbed_steps_teach_nothing() -> None:
    engine = an_engine(0.7)
    before = engine.drafting.costs.at(4, 2)
    for _ in range(DISTURBED_STEPS - 1):
        engine.drafting.saw_step(4, 2, 8, 100.0)
    assert engine.drafting.costs.at(4, 2) == before
    assert engine.drafting.measured.seconds == 0.0


@pytest.mark.parametrize("factor", [5.0, 0.1])
def test_a_machine_that_is_no_longer_what_was_calibrated_is_learnt_anew(factor: float) -> None:
    now = {"factor": 1.0}
    engine = FormulaEngine(DraftLengths(64, LENGTHS), 0.7, cost=lambda batch, k: now["factor"] * a_cost(batch, k))
    engine.calibrate()
    now["factor"] = factor
    engine.run(4, 600)
    assert engine.drafting.costs.at(4, OFF) == pytest.approx(factor * a_cost(4, OFF), rel=0.15)
    assert speed_of(0.7, 4, engine.drafting.table[4]) > 0.97 * max(speed_of(0.7, 4, k) for k in LENGTHS)


def test_measured_gain_is_that_of_the_formulas() -> None:
    engine = an_engine(0.8)
    engine.run(8, 3000)
    report = engine.drafting.report()
    expected = max(speed_of(0.8, 8, k) for k in LENGTHS) / speed_of(0.8, 8, OFF)
    assert report["measured_gain"] == pytest.approx(expected, rel=0.04)
    assert report["predicted_gain"] == pytest.approx(expected, rel=0.06)


def test_fixed_length_is_kept_whatever_happens() -> None:
    engine = an_engine(0.0)
    engine.drafting.fix(3)
    assert set(engine.run(16, 500)) == {3}
    engine.drafting.fix(None)
    engine.run(16, 500)
    assert engine.drafting.state is State.OFF


def test_what_was_decided_before_a_length_was_fixed_is_decided_after_it() -> None:
    engine = an_engine(0.8)
    engine.run(8, 2000)
    before = engine.drafting.report()
    for k in (1, 5):
        engine.drafting.fix(k)
        assert set(engine.run(8, 50)) == {k}
    engine.drafting.fix(None)
    after = engine.drafting.report()
    assert after == before | {"events": []}


def test_each_load_is_decided_by_itself() -> None:
    """Drafts pay with one live and not with 64."""
    engine = an_engine(0.3)
    engine.run(1, 4000)
    assert engine.drafting.table[1] > 0
    assert sum(k != OFF for k in engine.run(64, 2000)) < 20
    assert sum(k > 0 for k in engine.run(1, 200)) > 150


def test_lookup_that_seldom_finds_something_is_costed_by_its_share() -> None:
    drafting = DraftLengths(16, (OFF, 1, 2, 3))
    engine = FormulaEngine(drafting, 0.9)
    engine.calibrate()
    for number in range(2000):
        k = drafting.lookup()[8]
        found = number % 10 == 0  # all eight requests find a draft in one step of ten
        for _ in range(8 if found and k > 0 else 0):
            drafting.saw_draft(k, k, True)
        drafting.saw_step(8, k, 8 + (8 * k if found and k > 0 else 0), a_cost(8, k if found else OFF))
    assert drafting.acceptance.draft_rate == pytest.approx(0.1, abs=0.03)


def test_without_costs_drafts_have_full_length() -> None:
    drafting = DraftLengths(8, LENGTHS)
    drafting.saw_step(4, LONGEST, 8, 0.01)
    drafting.revise()
    assert drafting.lookup()[4] == LONGEST


def test_costs_of_a_file_are_taken_only_if_they_fit() -> None:
    costs = an_engine(0.5).drafting.costs
    other = StepCosts(costs.nodes, costs.lengths)
    assert other.take_json(costs.as_json())
    assert other.at(9, 2) == costs.at(9, 2)
    for wrong in ({}, {"nodes": [1], "seconds": {}}, [], {"nodes": list(costs.nodes), "seconds": {"1": "x"}}, None):
        assert not StepCosts(costs.nodes, costs.lengths).take_json(wrong)


@given(st.integers(1, 3000))
def test_nodes_ascend_from_one_to_the_largest_batch(largest: int) -> None:
    nodes = batch_nodes(largest)
    assert nodes[0] == 1
    assert nodes[-1] == largest
    assert list(nodes) == sorted(set(nodes))


@settings(max_examples=50)
@given(st.integers(1, 300), st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_every_batch_size_has_an_allowed_length(largest: int, batches: Sequence[int]) -> None:
    engine = an_engine(0.6, largest)
    for batch in batches:
        engine.run(min(batch, largest), 5)
        assert set(engine.drafting.table[1:]) <= set(LENGTHS)
