"""The draft length controller on a simulated engine with known costs and known acceptance."""

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
    DraftingState,
    DraftLengthController,
    StepCostModel,
    choose_batch_nodes,
    choose_calibrated_lengths,
)

LONGEST = 5
LENGTHS = (OFF, *range(LONGEST + 1))


def a_cost(batch: int, k: int) -> float:
    """Seconds of a step: a fixed cost for reading the weights, plus a cost per verified token and per draft pass."""
    if k == OFF:
        return 0.010 + 0.0002 * batch
    return 0.010 + 0.0002 * batch * (k + 1) + 0.001 * max(1, k)


@dataclass
class SimulatedRequest:
    """One simulated request.

    left: tokens until it ends. is_whole: the drafter ran in all of its steps, so it can draft for it.
    """

    left: float
    context: int = 10
    is_whole: bool = True


@dataclass
class SimulatedEngine:
    """Runs a controller as the scheduler does.

    chance: acceptance of each draft token, given the ones before. reading_s: seconds per prompt token, and a tenth more
    with the drafter.
    """

    drafting: DraftLengthController
    chance: float
    cost: Callable[[int, int], float] = a_cost
    seed: int = 0
    reading_s: float = 0.0
    is_limited: bool = False
    """Whether `left` is an exact limit for the controller, as if each request ran to its maximum length."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311 - no secret
        self.seconds = 0.0
        self.tokens = 0
        self.catch_ups = 0
        self.live: list[SimulatedRequest] = []

    def calibrate(self) -> None:
        nodes = self.drafting.costs.nodes
        lengths = choose_calibrated_lengths(self.drafting.lengths)
        self.drafting.costs.set_measured_costs({k: [self.cost(node, k) for node in nodes] for k in lengths})

    def run(self, batch: int, steps: int, tokens: float = 40.0) -> list[int]:
        """Run steps at a constant batch size, with requests of about `tokens` tokens; returns the lengths used."""
        used = []
        del self.live[batch:]
        for _ in range(steps):
            while len(self.live) < batch:
                self.begin(tokens * self.random.uniform(0.5, 1.5))
            used.append(self.step())
        return used

    def drain(self, tokens: Sequence[float]) -> list[tuple[int, int]]:
        """Run a batch until its last request has ended, then update the weights. tokens: of each request.

        Returns the number of live requests and the length of each step.
        """
        self.live.clear()
        for left in tokens:
            self.begin(left)
        self.read(self.drafting.next_table()[len(self.live)], is_catch_up=False)
        used = []
        while self.live:
            used.append((len(self.live), self.step()))
        self.drafting.handle_new_weights()
        return used

    def begin(self, tokens: float) -> None:
        self.drafting.record_request()
        self.live.append(SimulatedRequest(tokens))

    def read(self, length: int, is_catch_up: bool) -> None:
        """Compute the contexts of all live requests, for the first time or again."""
        batch = len(self.live)
        tokens = sum(request.context for request in self.live)
        seconds = self.cost(batch, length) + tokens * self.reading_s * (1.0 if length == OFF else 1.1)
        self.drafting.record_prefill_step(batch, length, tokens, seconds, is_catch_up)
        self.seconds += seconds
        for request in self.live:
            request.is_whole = length != OFF

    def step(self) -> int:
        batch = len(self.live)
        k = self.drafting.next_table()[batch]
        is_missed = any(not request.is_whole for request in self.live)
        if is_missed and self.drafting.fixed is None and self.drafting.state is not DraftingState.TRIAL:
            left = (round(request.left) if self.is_limited else 1000 for request in self.live)
            if self.drafting.is_catch_up_due(batch, (request.context for request in self.live), left):
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
                self.drafting.record_verified_draft(k, accepted, request.is_whole)
            request.left -= 1 + accepted
            request.context += 1 + accepted
            emitted += 1 + accepted
        seconds = self.cost(batch, k) * self.random.uniform(0.95, 1.05)
        self.drafting.record_step(batch, k, emitted, seconds)
        self.seconds += seconds
        self.tokens += emitted
        self.live = [request for request in self.live if request.left > 0]
        return k


def an_engine(chance: float, max_batch: int = 64, **rest: int) -> SimulatedEngine:
    engine = SimulatedEngine(DraftLengthController(max_batch, LENGTHS), chance, **rest)
    engine.calibrate()
    return engine


def best_length(chance: float, batch: int) -> int:
    def speed(k: int) -> float:
        return sum(chance**i for i in range(max(k, 0) + 1)) / a_cost(batch, k)

    return max(LENGTHS, key=speed)


def speed_of(chance: float, batch: int, k: int) -> float:
    return sum(chance**i for i in range(max(k, 0) + 1)) / a_cost(batch, k)


def test_a_longer_draft_never_costs_less() -> None:
    costs = StepCostModel((1, 4), (OFF, 0, 1, 2, 3))
    costs.set_measured_costs({OFF: [1.0, 1.0], 0: [2.0, 5.0], 1: [2.2, 3.0], 3: [2.6, 6.0]})
    assert [costs.seconds[k] for k in (OFF, 0, 1, 2, 3)] == [
        [1.0, 1.0],
        [2.0, 4.0],
        [2.2, 4.0],
        [pytest.approx(2.4), 5.0],
        [2.6, 6.0],
    ]


@pytest.mark.parametrize("slower", [0.7, 1.5])
def test_a_slower_machine_does_not_change_relative_costs(slower: float) -> None:
    """From the first step on, and again after a length has been in use for long."""
    costs = StepCostModel((1, 4), (OFF, 0, 1, 2, 3))
    costs.set_measured_costs({k: [k + 3.0, k + 6.0] for k in costs.lengths})
    before = costs.seconds_at(1, 3) / costs.seconds_at(1, 2)
    for speed in (slower, 1.0, slower):
        for _ in range(100):
            costs.correct_by_ratio(1, 3, speed * 6.0 / costs.seconds_at(1, 3))
        assert costs.seconds_at(1, 3) == pytest.approx(speed * 6.0, rel=0.01)
        assert costs.seconds_at(1, 3) / costs.seconds_at(1, 2) == pytest.approx(before, rel=0.03)


def test_a_few_steps_correct_a_wrongly_calibrated_length() -> None:
    costs = StepCostModel((1, 4), (OFF, 0, 1, 2, 3))
    costs.set_measured_costs({k: [k + 3.0, k + 6.0] for k in costs.lengths})
    for _ in range(10):
        for k, true_s, steps in ((2, 5.0, 60), (3, 5.4, 6)):  # 3 was measured to take 6
            for _ in range(steps):
                costs.correct_by_ratio(1, k, true_s / costs.seconds_at(1, k))
    assert costs.seconds_at(1, 3) / costs.seconds_at(1, 2) == pytest.approx(5.4 / 5.0, rel=0.02)
    assert costs.seconds_at(1, 1) / costs.seconds_at(1, 2) == pytest.approx(4.0 / 5.0, rel=0.02)


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_speed_is_within_three_percent_of_the_best_fixed_length(chance: float, batch: int) -> None:
    engine = an_engine(chance)
    engine.run(batch, 400)
    engine.seconds = 0.0
    engine.tokens = 0
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


def test_a_useless_drafter_is_switched_off_and_rarely_tried_again() -> None:
    engine = an_engine(0.0)
    used = engine.run(16, 20_000)
    assert engine.drafting.state in {DraftingState.OFF, DraftingState.TRIAL}
    assert sum(k != OFF for k in used) / len(used) < 0.04
    assert engine.tokens / engine.seconds > 0.97 * 16 * speed_of(0.0, 16, OFF)
    moves = [(event["before"], event["after"]) for event in engine.drafting.events]
    assert moves[0] == ("drafting", "off")
    assert ("off", "trial") in moves
    assert ("trial", "off") in moves
    assert ("trial", "drafting") not in moves


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_a_useless_drafter_is_switched_off_at_any_batch_size(batch: int) -> None:
    """Even if a single draft token seems too expensive to try."""
    engine = SimulatedEngine(DraftLengthController(64, LENGTHS), 0.0, cost=lambda batch, k: 0.01 * (1 + (k + 1) * 0.8))
    engine.calibrate()
    engine.run(batch, 800)
    assert engine.drafting.state is DraftingState.OFF


def test_a_drafter_that_recovers_is_switched_on_after_new_weights() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    assert engine.drafting.state is DraftingState.OFF
    engine.chance = 0.8
    engine.drafting.handle_new_weights()
    engine.run(16, 3000)
    assert engine.drafting.state is DraftingState.DRAFTING
    assert engine.drafting.table[16] == best_length(0.8, 16)
    believed = [engine.drafting.costs.seconds_at(16, k) / a_cost(16, k) for k in LENGTHS]
    assert max(believed) / min(believed) < 1.05, "a trial must not distort the costs of other lengths"


def test_a_trial_waits_for_a_new_request() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    engine.chance = 0.9
    engine.drafting.handle_new_weights()
    engine.live.clear()
    engine.run(16, 5000, tokens=1e9)  # no request begins, and the drafter has read none of these
    assert engine.drafting.state is DraftingState.OFF
    engine.live.clear()
    engine.run(16, 100)
    assert engine.drafting.state is DraftingState.DRAFTING


def test_a_trial_counts_only_requests_that_the_drafter_has_read() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    engine.chance = 0.9
    engine.drafting.handle_new_weights()
    engine.live.clear()
    engine.run(16, 1500, tokens=1e9)
    engine.live.pop()  # the drafter can draft for its successor, and not for the fifteen others
    engine.run(16, 40, tokens=1e9)
    assert engine.drafting.state is DraftingState.TRIAL
    assert max(engine.drafting.acceptance.prefix_probabilities()) > PRIOR_CHANCE


def test_a_trial_with_too_few_drafts_keeps_the_old_estimate() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    engine.drafting.handle_new_weights()
    known = engine.drafting.acceptance.prefix_probabilities()
    engine.live.clear()
    engine.run(16, 1500, tokens=1e9)
    engine.drafting.record_request()
    assert engine.drafting.state is DraftingState.TRIAL
    engine.run(16, 300, tokens=1e9)
    assert engine.drafting.state is DraftingState.OFF
    assert engine.drafting.acceptance.prefix_probabilities() == known


LONG_TAILED = [20 * 1.08**place for place in range(64)]
"""Tokens of each request of a batch of 64: half of them end within 9 % of the longest one's time."""


def costly_drafter_seconds(batch: int, k: int) -> float:
    """Seconds of a step with a drafter that pays below about ten live requests, and costs much with 64."""
    return (0.010 + 0.0004 * batch * (max(k, 0) + 1)) * (1.0 if k == OFF else 1.1)


def run_drains(
    chance: float, reading_s: float = 0.0, tokens: Sequence[float] = LONG_TAILED, *, is_limited: bool = False
) -> tuple[SimulatedEngine, list[tuple[int, int]], float]:
    """Run twelve versions; returns the engine, its last batch, and its speed relative to decoding without drafts.

    The first two versions do not count in the speed.
    """
    engine = SimulatedEngine(
        DraftLengthController(64, LENGTHS), chance, costly_drafter_seconds, reading_s=reading_s, is_limited=is_limited
    )
    engine.calibrate()
    used: list[tuple[int, int]] = []
    for version in range(12):
        if version == 2:
            engine.seconds = 0.0
            engine.tokens = 0
        used = engine.drain(tokens)
    without = SimulatedEngine(
        DraftLengthController(64, LENGTHS, fixed=OFF), 0.0, costly_drafter_seconds, reading_s=reading_s
    )
    without.calibrate()
    without.drain(tokens)
    return engine, used, engine.tokens / engine.seconds / (without.tokens / without.seconds)


def test_a_batch_is_decoded_without_drafts_while_full_and_with_drafts_at_its_end() -> None:
    engine, used, speed = run_drains(0.8, reading_s=1e-5)
    assert engine.drafting.state is DraftingState.DRAFTING
    assert {k for batch, k in used if batch == 64} == {OFF}
    assert sum(k > 0 for batch, k in used if batch <= 4) > 0.8 * sum(batch <= 4 for batch, _ in used)
    assert engine.catch_ups == 12, "once a batch"
    assert speed > 1.3


def test_there_is_no_catch_up_if_it_costs_more_than_drafts_save() -> None:
    engine, _, speed = run_drains(0.8, reading_s=0.1)
    assert engine.catch_ups <= 2
    assert speed > 0.98


def test_repeated_useless_catch_ups_end() -> None:
    """The cost of a catch-up lowers the realised gain, so after some of them drafting is switched off."""
    tokens = [100.0] * 60 + [112.0] * 4
    _, _, speed = run_drains(0.8, reading_s=3e-4, tokens=tokens)
    assert speed > 0.97


def test_there_is_no_catch_up_for_a_few_remaining_tokens() -> None:
    tokens = [100.0] * 60 + [112.0] * 4
    engine, *_ = run_drains(0.8, reading_s=3e-4, tokens=tokens, is_limited=True)
    assert engine.catch_ups == 0
    engine, _, speed = run_drains(0.8, reading_s=1e-5, is_limited=True)
    assert engine.catch_ups == 12, "once a batch"
    assert speed > 1.3


def test_drafts_start_after_the_load_has_fallen_even_for_short_requests() -> None:
    engine = SimulatedEngine(
        DraftLengthController(64, LENGTHS), 0.8, costly_drafter_seconds, reading_s=1e-3, is_limited=True
    )
    engine.calibrate()
    engine.run(64, 300)
    assert engine.drafting.table[64] == OFF
    assert sum(k > 0 for k in engine.run(4, 1000, tokens=20.0)[-500:]) > 400


def test_probes_become_rarer_while_nothing_changes() -> None:
    engine = an_engine(0.7)
    used = engine.run(8, 20_000)
    chosen = engine.drafting.table[8]
    early = used[:2000]
    late = used[-8000:]
    assert sum(k != chosen for k in late) / len(late) < 0.015 < sum(k != chosen for k in early) / len(early)


def test_a_load_that_crosses_the_break_even_batch_size_costs_little() -> None:
    engine = SimulatedEngine(DraftLengthController(64, LENGTHS), 0.6, costly_drafter_seconds, reading_s=1e-4)
    engine.calibrate()
    engine.run(64, 200)
    break_even = next(batch for batch in range(1, 65) if engine.drafting.table[batch] == OFF)
    engine.seconds = 0.0
    engine.tokens = 0
    plain_s = 0.0
    for turn in range(400):
        before = engine.tokens
        batch = break_even + (2 if turn % 2 else -2)
        engine.run(batch, 10, tokens=200.0)
        plain_s += (engine.tokens - before) / batch * costly_drafter_seconds(batch, OFF)
    assert plain_s / engine.seconds > 0.97


def test_an_initialised_drafter_is_used_after_a_useless_untrained_one() -> None:
    engine = an_engine(0.0)
    engine.run(16, 500)
    assert engine.drafting.state is DraftingState.OFF
    engine.chance = 0.8
    engine.drafting.reset_drafter()
    engine.live.clear()
    engine.run(16, 200)
    assert engine.drafting.state is DraftingState.DRAFTING
    assert speed_of(0.8, 16, engine.drafting.table[16]) > 0.98 * speed_of(0.8, 16, best_length(0.8, 16))


@pytest.mark.parametrize("batch", [1, 4])
def test_few_requests_are_enough_for_a_trial(batch: int) -> None:
    engine = an_engine(0.0)
    engine.run(batch, 1000)
    assert engine.drafting.state is DraftingState.OFF
    engine.chance = 0.9
    engine.drafting.handle_new_weights()
    engine.run(batch, 3000)
    assert engine.drafting.state is DraftingState.DRAFTING


DRAINS = ((0.0, 1e-2), (0.3, 1e-3), (0.4, 1e-4), (0.5, 1e-3), (0.7, 1e-2), (0.9, 0.0))
"""Each acceptance once; in the middle drafts hardly pay. The other pairs are deep."""
OTHER_DRAINS = sorted({*itertools.product((0.0, 0.3, 0.4, 0.5, 0.7, 0.9), (0.0, 1e-4, 1e-3, 1e-2))} - {*DRAINS})


@pytest.mark.parametrize(
    ("chance", "reading_s"), [*DRAINS, *(pytest.param(*pair, marks=pytest.mark.deep) for pair in OTHER_DRAINS)]
)
def test_a_draining_batch_is_never_much_slower_than_without_drafts(chance: float, reading_s: float) -> None:
    *_, speed = run_drains(chance, reading_s)
    assert speed > 0.97


def test_expensive_prompts_switch_the_drafter_off() -> None:
    """By step costs alone drafts would pay, since these leave out the prompts that the drafter reads."""
    engine = an_engine(0.5)
    engine.drafting.fix_length(None)
    for number in range(6000):
        engine.run(4, 1, tokens=4.0)
        if engine.drafting.table[4] != OFF:
            engine.drafting.record_prefill_step(4, engine.drafting.table[4], 40, 0.1, is_catch_up=False)
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


def test_later_steps_correct_a_wrong_calibration() -> None:
    engine = an_engine(0.7)
    spoilt = engine.drafting.costs.seconds[3]
    spoilt[:] = [value * 1.3 for value in spoilt]
    engine.run(4, 6000)
    assert engine.drafting.costs.seconds_at(4, 3) == pytest.approx(a_cost(4, 3), rel=0.06)


def test_a_few_probes_correct_a_slightly_wrong_calibration() -> None:
    engine = an_engine(0.7)
    best = best_length(0.7, 4)
    spoilt = engine.drafting.costs.seconds[best]
    spoilt[:] = [value * 1.08 for value in spoilt]
    engine.run(4, 300)
    assert engine.drafting.table[4] != best
    engine.run(4, 3000)
    costs = engine.drafting.costs
    for k in (best - 1, best + 1):
        assert costs.seconds_at(4, best) / costs.seconds_at(4, k) == pytest.approx(
            a_cost(4, best) / a_cost(4, k), rel=0.03
        )


def test_a_useless_drafter_is_switched_off_although_its_calibration_was_too_good() -> None:
    engine = an_engine(0.0)
    spoilt = engine.drafting.costs.seconds[OFF]
    spoilt[:] = [value * 1.3 for value in spoilt]
    engine.run(16, 4000)
    assert engine.drafting.table[16] == OFF


def test_a_slower_machine_does_not_make_drafts_seem_expensive() -> None:
    slow = {"factor": 1.0}
    engine = SimulatedEngine(
        DraftLengthController(64, LENGTHS), 0.7, cost=lambda batch, k: slow["factor"] * a_cost(batch, k)
    )
    engine.calibrate()
    engine.run(4, 500)
    slow["factor"] = 2.0
    engine.run(4, 500)
    assert engine.drafting.state is DraftingState.DRAFTING
    best = max(speed_of(0.7, 4, k) for k in LENGTHS)
    assert speed_of(0.7, 4, engine.drafting.table[4]) > 0.97 * best
    for k in LENGTHS:
        found = engine.drafting.costs.seconds_at(4, k) / engine.drafting.costs.seconds_at(4, OFF)
        assert found == pytest.approx(a_cost(4, k) / a_cost(4, OFF), rel=0.12)


def test_disturbed_steps_are_ignored() -> None:
    engine = an_engine(0.7)
    before = engine.drafting.costs.seconds_at(4, 2)
    for _ in range(DISTURBED_STEPS - 1):
        engine.drafting.record_step(4, 2, 8, 100.0)
    assert engine.drafting.costs.seconds_at(4, 2) == before
    assert engine.drafting.measured.seconds == 0.0


@pytest.mark.parametrize("factor", [5.0, 0.1])
def test_a_lasting_change_of_the_machines_speed_rescales_the_costs(factor: float) -> None:
    now = {"factor": 1.0}
    engine = SimulatedEngine(
        DraftLengthController(64, LENGTHS), 0.7, cost=lambda batch, k: now["factor"] * a_cost(batch, k)
    )
    engine.calibrate()
    now["factor"] = factor
    engine.run(4, 600)
    assert engine.drafting.costs.seconds_at(4, OFF) == pytest.approx(factor * a_cost(4, OFF), rel=0.15)
    assert speed_of(0.7, 4, engine.drafting.table[4]) > 0.97 * max(speed_of(0.7, 4, k) for k in LENGTHS)


def test_measured_and_predicted_gain_match_the_simulation() -> None:
    engine = an_engine(0.8)
    engine.run(8, 3000)
    report = engine.drafting.build_report()
    expected = max(speed_of(0.8, 8, k) for k in LENGTHS) / speed_of(0.8, 8, OFF)
    assert report["measured_gain"] == pytest.approx(expected, rel=0.04)
    assert report["predicted_gain"] == pytest.approx(expected, rel=0.06)


def test_a_fixed_length_is_always_used() -> None:
    engine = an_engine(0.0)
    engine.drafting.fix_length(3)
    assert set(engine.run(16, 500)) == {3}
    engine.drafting.fix_length(None)
    engine.run(16, 500)
    assert engine.drafting.state is DraftingState.OFF


def test_a_fixed_length_does_not_change_later_decisions() -> None:
    engine = an_engine(0.8)
    engine.run(8, 2000)
    before = engine.drafting.build_report()
    for k in (1, 5):
        engine.drafting.fix_length(k)
        assert set(engine.run(8, 50)) == {k}
    engine.drafting.fix_length(None)
    after = engine.drafting.build_report()
    assert after == before | {"events": []}


def test_each_batch_size_has_its_own_decision() -> None:
    """Drafts pay with one live request and not with 64."""
    engine = an_engine(0.3)
    engine.run(1, 4000)
    assert engine.drafting.table[1] > 0
    assert sum(k != OFF for k in engine.run(64, 2000)) < 20
    assert sum(k > 0 for k in engine.run(1, 200)) > 150


def test_the_draft_rate_of_a_lookup_is_estimated() -> None:
    drafting = DraftLengthController(16, (OFF, 1, 2, 3))
    engine = SimulatedEngine(drafting, 0.9)
    engine.calibrate()
    for number in range(2000):
        k = drafting.next_table()[8]
        found = number % 10 == 0  # all eight requests find a draft in one step of ten
        for _ in range(8 if found and k > 0 else 0):
            drafting.record_verified_draft(k, k, True)
        drafting.record_step(8, k, 8 + (8 * k if found and k > 0 else 0), a_cost(8, k if found else OFF))
    assert drafting.acceptance.draft_rate == pytest.approx(0.1, abs=0.03)


def test_without_costs_drafts_have_full_length() -> None:
    drafting = DraftLengthController(8, LENGTHS)
    drafting.record_step(4, LONGEST, 8, 0.01)
    drafting.revise_table()
    assert drafting.next_table()[4] == LONGEST


def test_costs_of_a_file_are_loaded_only_if_they_fit() -> None:
    costs = an_engine(0.5).drafting.costs
    other = StepCostModel(costs.nodes, costs.lengths)
    assert other.load_json(costs.to_json())
    assert other.seconds_at(9, 2) == costs.seconds_at(9, 2)
    for wrong in ({}, {"nodes": [1], "seconds": {}}, [], {"nodes": list(costs.nodes), "seconds": {"1": "x"}}, None):
        assert not StepCostModel(costs.nodes, costs.lengths).load_json(wrong)


@given(st.integers(1, 3000))
def test_nodes_ascend_from_one_to_the_largest_batch(largest: int) -> None:
    nodes = choose_batch_nodes(largest)
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
