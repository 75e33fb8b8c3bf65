"""Chooses how many tokens to draft for the batch that is live now, 0 and "not at all" included. Pure.

    E(k)          = 1 + d * (a_1 + ... + a_k)   tokens that a request emits per step
    a_i           chance that the first i draft tokens are accepted
    c(B, k)       seconds of a step of B requests that verifies and drafts k tokens each; calibrated, then followed
    d             share of requests that have a draft at all (n-gram look-up may find none); c is mixed accordingly
    gain(B, k)    = kept * E(k) * c(B, OFF) / c(B, k)   how much faster than decoding without a drafter
    kept          how much of what was promised by E and c has come true: they know nothing of what drafters read,
                  and a step after one of another length is dearer than both

`OFF` is a length, too: no drafter runs. Each batch size has its own, so that a batch which drains is decoded plainly
while it is full, and drafted for when it is small. A learned drafter has no KV cache of what it has missed, so that
whoever was decoded without it has to be read again first: all live requests are computed anew, once. That is due when
drafts would have saved, since the batch is small, what the reading costs (who rents skis until the rent has cost a
pair pays twice the least that he could have paid, at worst), unless so few tokens are left at most that they cannot
save as much: `catch_up_is_due`.

What is accepted is seen only of requests that the drafter has read in whole. When none was seen for long, because
drafts pay at no load (OFF) or not at the one that is (DRAFTING), a trial shows whether that is still true:

    DRAFTING --drafts pay at no batch size--> OFF
    DRAFTING, OFF --a request begins, enough steps after the last draft, fewer after new weights--> TRIAL
    TRIAL --enough were seen, or too few for too long--> DRAFTING or OFF

Nothing here changes what is sampled, only how fast.

Called by the engine core's scheduler (vllm_backend/scheduler.py) at every step. Seconds, tokens. B live requests, k
draft tokens.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

OFF = -1
"""Length that means: do not run the drafter at all."""

HORIZON_DRAFTS = 4096  # counts are halved here: acceptance is that of the last few thousand drafts
PRIOR_DRAFTS = 16.0  # weight of what is believed of a position before it was reached
PRIOR_CHANCE = 0.7  # ... and of the first one
ENOUGH_DRAFTS = 192  # with fewer, drafting is not given up, no trial decided, every request taken to have had one
KEPT_SECONDS = 1800.0  # how far back kept promises count, roughly
KEPT_PRIOR_STEPS = 256  # full ones that are believed to have kept what was promised, before any is seen
WINDOW_SECONDS = 30.0  # how far back the gains that are reported look, roughly
TRIAL_STEPS = 192  # a trial ends here in any case, as many as one request needs; with too few it has shown nothing
REST_STEPS = 6000  # without a draft, between trials without new weights: a trial must cost next to nothing
REST_STEPS_AFTER_WEIGHTS = 1500  # ... and with them
LONGEST_BACK_OFF = 8  # each trial in a row that changes nothing doubles the next rest, up to so many times the first
REVISE_STEPS = 32  # the table is computed anew this often
EARLY_STEPS = frozenset({4, 8, 16})  # ... and so soon in a new state: a full batch must not wait for what is plain
SWITCH_GAIN = 1.01  # a length replaces the present one if it is this much faster: no flutter between equals
WORTH_GAIN = 1.01  # drafting must be this much faster than not drafting
# Of the logarithm of a step's time, variances:
STEP_NOISE = 0.01  # of one step
SPEED_UNKNOWN, SPEED_DRIFT = 0.1, 1e-4  # of how fast all of a batch size is: at first; on top with each step
LENGTH_UNKNOWN, LENGTH_DRIFT = 2.5e-3, 1e-7  # of what one length costs beside the others: the same
DOUBTFUL_GAIN = 1.3  # below this, probes also leave the drafter out: an old calibration must not decide that it pays
PROBE_EVERY, PROBE_STEPS = 64, 8  # of so many steps, so few use the next shorter or longer draft, to know their costs
PROBE_SELDOM = 512  # ... and of so many where longer gaps, each twice the one before, have changed nothing
PROBES = 3  # kinds of them: longer, shorter, none
OUTLIER = 3.0  # a step this much slower or faster than expected was disturbed, and teaches nothing
DISTURBED_STEPS = 32  # ... but after so many of them in a row the machine is another one
READING_KEPT = 0.9  # of what earlier steps say of a prompt token's cost, with each that reads some


class State(StrEnum):
    """See the module's drawing."""

    DRAFTING = "drafting"
    OFF = "off"
    TRIAL = "trial"


def batch_nodes(max_batch: int) -> tuple[int, ...]:
    """Batch sizes at which costs are measured: powers of four, and the largest; between them costs are interpolated."""
    nodes = [1]
    while nodes[-1] * 4 < max_batch:
        nodes.append(nodes[-1] * 4)
    return (*nodes, max_batch) if max_batch > nodes[-1] else tuple(nodes)


def calibrated_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Which of the allowed lengths are measured: the ends, 0, 1 and the middle; those between are interpolated."""
    largest = max(lengths)
    return tuple(k for k in sorted(lengths) if k in {OFF, 0, 1, (largest + 1) // 2, largest})


class StepCosts:
    """c(B, k): seconds [lengths, nodes], interpolated between nodes, and corrected by every step that is seen.

    A step that was not as expected tells of the machine, which is slower or faster for all lengths of a batch size, or
    of its length. Which it is, the uncertainty of each says, as in a Kalman filter with these two for states
    (covariances left out). A machine's speed changes quickly, what lengths cost beside each other hardly; so a length
    that is in use for long tells of the machine, and one that is tried for a few steps beside it, of itself. Otherwise
    lengths that are not in use would seem cheap when the machine slows down, and dear when it recovers.
    """

    def __init__(self, nodes: Sequence[int], lengths: Sequence[int]) -> None:
        self.nodes, self.lengths = tuple(nodes), tuple(sorted(lengths))
        self.seconds: dict[int, list[float]] = {}
        self._places = [self._between(batch) for batch in range(self.nodes[-1] + 1)]
        self._speed_unknown = [SPEED_UNKNOWN] * len(self.nodes)
        self._length_unknown = {k: [LENGTH_UNKNOWN] * len(self.nodes) for k in self.lengths}

    @property
    def is_known(self) -> bool:
        """Whether every length has a cost at every node."""
        return len(self.seconds) == len(self.lengths)

    def fill(self, measured: dict[int, list[float]]) -> None:
        """Take measured rows [nodes] by length; lengths between two measured ones are interpolated.

        A longer draft cannot cost less: where it seems so, that was noise, and both move to the middle of it.
        """
        known = sorted(measured)
        by_node = [_never_falling([measured[k][node] for k in known]) for node in range(len(self.nodes))]
        for k in self.lengths:
            self.seconds[k] = [float(np.interp(k, known, costs)) for costs in by_node]

    def at(self, batch: int, k: int) -> float:
        """Seconds of a step; linear between nodes."""
        row = self.seconds[k]
        place, share = self.place(batch)
        return row[place] + share * (row[place + 1] - row[place]) if share else row[place]

    def row(self, k: int) -> npt.NDArray[np.float64]:
        """Seconds [batch sizes from 1 to the largest]."""
        found: npt.NDArray[np.float64] = np.interp(np.arange(1, self.nodes[-1] + 1), self.nodes, self.seconds[k])
        return found

    def correct(self, batch: int, k: int, ratio: float) -> None:
        """A step took `ratio` times what was expected."""
        place, share = self.place(batch)
        nodes = [(node, weight) for node, weight in ((place, 1 - share), (place + 1, share)) if weight > 0]
        speed, length = self._speed_unknown, self._length_unknown[k]
        unexplained = STEP_NOISE + sum(weight**2 * (speed[node] + length[node]) for node, weight in nodes)
        for node, weight in nodes:
            its_speed, its_length = weight * speed[node] / unexplained, weight * length[node] / unexplained
            together = ratio**its_speed
            for row in self.seconds.values():
                row[node] *= together
            self.seconds[k][node] *= ratio**its_length
            speed[node] += SPEED_DRIFT - weight * its_speed * speed[node]
            length[node] += LENGTH_DRIFT - weight * its_length * length[node]

    def scale(self, ratio: float) -> None:
        """All steps take `ratio` times what they took."""
        self.seconds = {k: [cost * ratio for cost in row] for k, row in self.seconds.items()}

    def as_json(self) -> dict[str, Any]:
        """For the calibration file."""
        return {"nodes": list(self.nodes), "seconds": {str(k): row for k, row in self.seconds.items()}}

    def take_json(self, found: Any) -> bool:
        """Take what `as_json` gave. False, and nothing taken, when it is of other nodes or lengths."""
        try:
            seconds = {int(k): [float(value) for value in row] for k, row in found["seconds"].items()}
            fits = tuple(found["nodes"]) == self.nodes and tuple(sorted(seconds)) == self.lengths
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return False
        if fits and all(len(row) == len(self.nodes) and all(0 < s < math.inf for s in row) for row in seconds.values()):
            self.seconds = seconds
            return True
        return False

    def place(self, batch: int) -> tuple[int, float]:
        """Node at or below `batch`, and how far it is to the next one, 0 to 1."""
        return self._places[min(batch, self.nodes[-1])]

    def _between(self, batch: int) -> tuple[int, float]:
        place = max(0, min(bisect.bisect_right(self.nodes, batch) - 1, len(self.nodes) - 2))
        if len(self.nodes) == 1:
            return 0, 0.0
        low, high = self.nodes[place], self.nodes[place + 1]
        return place, min(1.0, max(0.0, (batch - low) / (high - low)))


def _never_falling(row: Sequence[float]) -> list[float]:
    """The middle of two rows that never fall: the lowest that is nowhere below this one, the highest nowhere above."""
    return [(max(row[: place + 1]) + min(row[place:])) / 2 for place in range(len(row))]


class Acceptance:
    """a_i, from how often a draft token was accepted when all before it were."""

    def __init__(self, longest: int) -> None:
        self.reached = [0.0] * longest
        self.accepted = [0.0] * longest
        self.request_steps = 0.0
        self.drafts = 0.0

    def observe(self, length: int, accepted: int) -> None:
        """One request's draft of `length` tokens, of which the first `accepted` were."""
        for place in range(min(length, accepted + 1, len(self.reached))):
            self.reached[place] += 1
            self.accepted[place] += place < accepted
        self.drafts += 1
        if self.drafts > HORIZON_DRAFTS:
            self.fade(0.5)

    def fade(self, share: float) -> None:
        """Trust the past this much."""
        self.reached = [value * share for value in self.reached]
        self.accepted = [value * share for value in self.accepted]
        self.drafts *= share
        self.request_steps *= share

    @property
    def draft_rate(self) -> float:
        """d: share of a request's steps in which it had a draft at all. 1 for learned drafters."""
        return min(1.0, self.drafts / self.request_steps) if self.request_steps >= ENOUGH_DRAFTS else 1.0

    def chances(self) -> list[float]:
        """a_1 .. a_k. A position that was hardly reached is believed to be like the one before it."""
        found: list[float] = []
        together, belief = 1.0, PRIOR_CHANCE
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            belief = (accepted + PRIOR_DRAFTS * belief) / (reached + PRIOR_DRAFTS)
            together *= belief
            found.append(together)
        return found

    def emitted(self, lengths: Iterable[int]) -> dict[int, float]:
        """E(k) for each length."""
        rate, chances = self.draft_rate, self.chances()
        return {k: 1.0 + (rate * sum(chances[:k]) if k > 0 else 0.0) for k in lengths}


@dataclass
class Window:
    """The recent past: seconds, and the seconds that the same would have taken otherwise."""

    horizon_s: float
    seconds: float = 0.0
    otherwise_s: float = 0.0

    def add(self, seconds: float, otherwise_s: float) -> None:
        """One more step; older ones fade."""
        fade = math.exp(-seconds / self.horizon_s)
        self.seconds = self.seconds * fade + seconds
        self.otherwise_s = self.otherwise_s * fade + otherwise_s

    def gain(self, prior_s: float = 0.0) -> float | None:
        """How much faster it was than otherwise, if it was neither for `prior_s` before; None before the first step."""
        return (self.otherwise_s + prior_s) / (self.seconds + prior_s) if self.seconds > 0 else None


@dataclass
class DraftLengths:
    """The controller of one engine. `lengths`: what the mechanism can do, e.g. (OFF, 0, 1, 2, 3)."""

    max_batch: int
    lengths: tuple[int, ...]
    fixed: int | None = None
    """Always this length; nothing is decided. For measurements."""
    costs: StepCosts = field(init=False)
    acceptance: Acceptance = field(init=False)
    state: State = field(default=State.DRAFTING, init=False)
    table: list[int] = field(init=False)
    """Length by batch size; index 0 is not used."""
    measured: Window = field(init=False)
    """Otherwise: without drafts."""
    predicted: Window = field(init=False)
    """Of the same steps, what they had taken by E and c alone; otherwise: without drafts."""
    events: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.lengths = tuple(sorted(self.lengths))
        self.costs = StepCosts(batch_nodes(self.max_batch), self.lengths)
        self._steps = self._place = 0
        self._outliers: list[float] = []
        self._read_s = self._read_tokens = 0.0
        self._catch_ups = 0
        self._know_nothing()

    def _know_nothing(self) -> None:
        """Of the drafter. What steps cost stays known."""
        self.acceptance = self._before_trial = Acceptance(max(self.lengths))
        self.measured, self.predicted = Window(WINDOW_SECONDS), Window(WINDOW_SECONDS)
        self._kept = Window(KEPT_SECONDS)  # of steps with drafts; otherwise: if all were as fast as promised
        self._emitted = self.acceptance.emitted(self.lengths)  # E(k) as of the last revision
        self.table = [max(self.lengths)] * (self.max_batch + 1)
        self._gains = np.ones(self.max_batch + 1)  # of the best length that drafts, by batch size
        self._calls = self._probes = self._probe_ends = 0
        self._probe_gap = self._probe_due = PROBE_EVERY
        self._probe: list[int] | None = None
        self.state = State.DRAFTING
        self._is_tried = False  # whether enough was seen to give drafting up
        self._state_steps = self._idle_steps = self._trial_drafts = 0
        self._last_batch = 1
        self._rest_steps, self._back_off = REST_STEPS, 1
        self._missed_s, self._is_fed = 0.0, False  # since drafts pay for the batch that is live; requests begin

    # -- what happens ---------------------------------------------------------------------------------------------

    def lookup(self) -> list[int]:
        """Length by batch size for the next step; now and then that of a probe."""
        if self.fixed is not None:
            return [self.fixed] * len(self.table)
        self._calls += 1
        if self.state is not State.DRAFTING or self._calls == self._probe_ends:
            self._probe = None
        elif self._calls >= self._probe_due:
            self._probe = self._next_probe(self._probes % PROBES)
            self._probes += 1
            if self._probes % PROBES == 0:
                self._probe_gap = min(2 * self._probe_gap, PROBE_SELDOM)
            self._probe_due, self._probe_ends = self._calls + self._probe_gap, self._calls + PROBE_STEPS
        return self._probe or self.table

    @property
    def is_probing(self) -> bool:
        """Whether the last `lookup` was of a probe: a drafter that misses its few steps goes on all the same."""
        return self._probe is not None

    def _probe_soon(self) -> None:
        """What is known of neighbours' costs may not be true any more: another load, other lengths, other weights."""
        self._probe_gap = PROBE_EVERY
        self._probe_due = min(self._probe_due, self._calls + PROBE_EVERY)

    def _next_probe(self, turn: int) -> list[int]:
        """In turn: one token more, one fewer, and, where it is in doubt whether drafts pay at all, none."""
        if turn == 2:
            can_rest = OFF in self.lengths
            return [
                OFF if can_rest and gain < DOUBTFUL_GAIN else k
                for k, gain in zip(self.table, self._gains.tolist(), strict=True)
            ]
        shift = 1 if turn == 1 else -1
        drafting = [k for k in self.lengths if k != OFF]
        return [k if k == OFF else min(max(k + shift, drafting[0]), drafting[-1]) for k in self.table]

    def catch_up_is_due(self, batch: int, tokens: Iterable[int], left: Iterable[int]) -> bool:
        """Whether to compute `batch` live requests anew, each of so many tokens, now that drafts pay for so few.

        left: tokens that each of them can emit yet, at most; who comes after them would be drafted for, too. Both are
        read only where drafts pay. Asked before each step in which the drafter has missed any. Until it is due, they
        are not drafted for.
        """
        if self.state is not State.DRAFTING or self.table[batch] == OFF or not self.costs.is_known:
            self._missed_s, self._is_fed = 0.0, False
            return False
        plain = self.costs.at(batch, self._undrafted)
        saved_s = plain * (1 - 1 / max(1.0, float(self._gains[batch])))
        self._missed_s += saved_s
        reading_s = sum(tokens) * self._read_s / self._read_tokens if self._read_tokens else 0.0
        most_s = math.inf if self._is_fed else max(left, default=0) * saved_s
        if min(self._missed_s, most_s) < reading_s + plain:  # the step that is under way is lost
            return False
        self._missed_s, self._is_fed = 0.0, False
        self._catch_ups += 1
        return True

    def saw_request(self) -> None:
        """A request is about to begin, and with it a trial that is due."""
        self._is_fed = True
        is_rested = self._idle_steps >= self._rest_steps * self._back_off
        if self.state is not State.TRIAL and is_rested and self.fixed is None:
            self._before_trial, self.acceptance = self.acceptance, Acceptance(max(self.lengths))
            self._trial_drafts = 0
            self._move(State.TRIAL)
            shortest = min((k for k in self.lengths if k > 0), default=0)
            self.table[1:] = [shortest] * self.max_batch

    def saw_draft(self, length: int, accepted: int, is_whole: bool) -> None:
        """A request's draft was verified. is_whole: the drafter has read all of the request."""
        if self.fixed is not None:
            return
        if not is_whole:
            self.acceptance.request_steps -= 1  # it had a draft, of which nothing can be learnt
            return
        self._idle_steps = 0
        self._trial_drafts += 1
        self.acceptance.observe(length, accepted)
        self._is_tried = self._is_tried or self.acceptance.drafts >= ENOUGH_DRAFTS

    def saw_step(self, batch: int, k: int, tokens: int, seconds: float) -> None:
        """A step of decoding ended: `batch` requests, k tokens drafted and verified each, `tokens` emitted.

        It followed others of its length, so that it took what its length costs.
        """
        if not self._learns(k):
            return
        cost, undrafted = self._cost(batch, k), self.costs.at(batch, self._undrafted)
        ratio = seconds / cost
        if not 1 / OUTLIER < ratio < OUTLIER:
            self._outliers.append(ratio)
            if len(self._outliers) == DISTURBED_STEPS:
                self.costs.scale(statistics.median(self._outliers))
                self._outliers.clear()
            return
        self._outliers.clear()
        self.costs.correct(batch, k, ratio)
        if k > 0:
            self.acceptance.request_steps += batch
        undrafted_s = tokens / batch * undrafted
        self._count(k, seconds, undrafted_s, self._emitted[k] * undrafted / cost, promised_s=seconds)
        self._last_batch = batch
        place, _ = self.costs.place(batch)
        if place != self._place:
            self._place = place
            self._probe_soon()
        self._steps += 1
        self._state_steps += 1
        self._idle_steps += 1
        if self._steps % REVISE_STEPS == 0 or self._is_due():
            self.revise()

    def saw_other_step(self, batch: int, k: int, tokens: int, seconds: float) -> None:
        """A step of decoding ended that says nothing of what lengths cost, but took its time."""
        if self._learns(k) and seconds < OUTLIER * self.costs.at(batch, max(self.lengths)):
            undrafted_s, promise = tokens / batch * self.costs.at(batch, self._undrafted), self._promise(batch, k)
            self._count(k, seconds, undrafted_s, promise, undrafted_s / promise)

    def saw_reading(self, batch: int, k: int, read: int, seconds: float, is_catch_up: bool) -> None:
        """A step ended that read `read` tokens of prompts. is_catch_up: without a drafter it had read nothing."""
        if not self._learns(k):
            return
        expected_s, promise = self.costs.at(batch, k), self._promise(batch, k)
        self._read_s = READING_KEPT * self._read_s + max(0.0, seconds - expected_s)
        self._read_tokens = READING_KEPT * self._read_tokens + read
        if is_catch_up:
            self._count(k, seconds, 0.0, promise, promised_s=0.0)
        else:  # with a drafter, prompts took a pass of it more, as steps do that draft nothing
            plain = self.costs.at(batch, self._undrafted)
            undrafted_s = seconds * plain / self.costs.at(batch, 0) if k != OFF and 0 in self.lengths else seconds
            self._count(k, seconds, undrafted_s, promise, undrafted_s / promise)

    def fix(self, length: int | None) -> None:
        """Use this length from now on, and learn nothing; None: go on with what was decided before."""
        self.fixed = length
        self._probe = None

    def drafter_replaced(self) -> None:
        """Another drafter serves under the same policy, as after its initialisation: nothing that is known is of it."""
        self._know_nothing()
        self.revise()

    def weights_changed(self) -> None:
        """A new version of policy and drafter serves: what was accepted before counts half, and a rest is shorter."""
        self.acceptance.fade(0.5)
        self._rest_steps = REST_STEPS_AFTER_WEIGHTS
        self._probe_soon()

    # -- what is decided ------------------------------------------------------------------------------------------

    def revise(self) -> None:
        """Decide the table and the state anew. Without costs nothing is decided."""
        if self.fixed is not None or not self.costs.is_known:
            return
        self._emitted = self.acceptance.emitted(self.lengths)
        if self.state is State.TRIAL:
            if self._trial_drafts >= ENOUGH_DRAFTS or self._state_steps >= TRIAL_STEPS:
                self._end_trial()
        elif self.state is State.DRAFTING:
            self._fill_table()
            if self._rests_always:
                self._move(State.OFF)

    def _end_trial(self) -> None:
        if self._trial_drafts < ENOUGH_DRAFTS // 2:
            self.acceptance = self._before_trial
        self._fill_table()
        self._move(State.OFF if self._rests_always else State.DRAFTING)
        is_changed = self.table[self._last_batch] != OFF
        self._back_off = 1 if is_changed else min(2 * self._back_off, LONGEST_BACK_OFF)
        self._idle_steps = 0

    @property
    def _rests_always(self) -> bool:
        return all(k == OFF for k in self.table[1:])

    def _is_due(self) -> bool:
        """Whether a state's end should not wait for the next revision."""
        return self._state_steps in EARLY_STEPS or (self.state is State.TRIAL and self._trial_drafts >= ENOUGH_DRAFTS)

    def _move(self, state: State) -> None:
        self.events.append(
            {
                "before": self.state.value,
                "after": state.value,
                "best_gain": round(float(self._gains[1:].max()), 3),
                "acceptance": [round(chance, 3) for chance in self.acceptance.chances()],
            }
        )
        self.state, self._state_steps = state, 0
        if state is not State.TRIAL:
            self._rest_steps = REST_STEPS

    def _fill_table(self) -> None:
        """The fastest length of each batch size, and how much faster than none it is."""
        # 0 is slower than none, and shows nothing of what would be accepted.
        drafting = [k for k in self.lengths if k > 0 or OFF not in self.lengths]
        emitted, rate = self.acceptance.emitted(drafting), self.acceptance.draft_rate
        undrafted = self.costs.row(self._undrafted)
        costs = {k: rate * self.costs.row(k) + (1 - rate) * undrafted for k in drafting}
        lengths, gains = np.array(drafting), np.stack([emitted[k] * undrafted / costs[k] for k in drafting])
        now = np.array(self.table[1:])
        best = gains.argmax(axis=0)
        stays = (lengths[:, None] == now) & (gains.max(axis=0) < SWITCH_GAIN * gains)
        best = np.where(stays.any(axis=0), stays.argmax(axis=0), best)
        found = gains[best, np.arange(self.max_batch)] * self._kept_share()
        self._gains[1:] = found
        rests = (found < WORTH_GAIN) & (OFF in self.lengths) & self._is_tried
        table = np.where(rests, OFF, lengths[best]).tolist()
        if table != self.table[1:]:
            self.table[1:] = table
            self._probe_soon()

    @property
    def _undrafted(self) -> int:
        """The length that stands for decoding without speculation."""
        return OFF if OFF in self.lengths else min(self.lengths)

    def _learns(self, k: int) -> bool:
        return self.fixed is None and self.costs.is_known and k in self.lengths

    def _count(self, k: int, seconds: float, undrafted_s: float, promise: float, promised_s: float) -> None:
        """A step ended; by what E and c promise of drafts, what it did had taken so long."""
        self.measured.add(seconds, undrafted_s)
        self.predicted.add(undrafted_s / promise, undrafted_s)
        if k != OFF and self.state is State.DRAFTING:
            self._kept.add(seconds, promised_s)

    def _kept_share(self) -> float:
        return self._kept.gain(KEPT_PRIOR_STEPS * self.costs.at(self.max_batch, self._undrafted)) or 1.0

    def _promise(self, batch: int, k: int) -> float:
        """How much faster than without drafts a length is, by E and c alone."""
        return self._emitted[k] * self.costs.at(batch, self._undrafted) / self._cost(batch, k)

    def _cost(self, batch: int, k: int) -> float:
        """Seconds of a step in which the usual share of requests has a draft of k tokens."""
        rate = self.acceptance.draft_rate if k > 0 else 1.0
        return rate * self.costs.at(batch, k) + (1 - rate) * self.costs.at(batch, self._undrafted)

    # -- what is reported -----------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """State, table by batch size in runs, acceptance, gains, costs; events and catch-ups since the last report."""
        events, self.events = self.events, []
        catch_ups, self._catch_ups = self._catch_ups, 0
        return {
            "state": self.state.value,
            "table": [list(run) for run in _runs(self.table[1:])],
            "acceptance": self.acceptance.chances(),
            "predicted_gain": self.predicted.gain() or 1.0,
            "measured_gain": self.measured.gain(),
            "costs": self.costs.as_json(),
            "events": events,
            "catch_ups": catch_ups,
        }


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first batch size, last, length) of equal neighbours; batch sizes start at 1."""
    first = 0
    for place in range(1, len(lengths) + 1):
        if place == len(lengths) or lengths[place] != lengths[first]:
            yield first + 1, place, lengths[first]
            first = place
