"""Chooses how many tokens to draft for the batch that is live now, 0 and "not at all" included. Pure.

    E(k)        = 1 + d * (a_1 + ... + a_k)   tokens that a request emits per step
    a_i         chance that the first i draft tokens are accepted
    c(B, k)     seconds of a step of B requests that verifies and drafts k tokens each; calibrated, then followed
    d           share of requests that have a draft at all (n-gram look-up may find none); c is mixed accordingly
    speed(B, k) = B * E(k) / c(B, k)

    DRAFTING --drafts do not pay at the loads of the last versions--> OFF
    OFF --a request begins after enough steps, fewer after new weights--> TRIAL
    TRIAL --they pay--> DRAFTING        TRIAL --they do not, or too few were seen--> OFF

In DRAFTING each batch size has its own k. k = 0 still runs the drafter once a step, so that its KV cache stays whole
and the same requests can be drafted for when the batch has drained; `OFF` runs no drafter at all. A trial counts fresh
requests only, since the drafter has no KV cache of older ones; so it begins with one. Nothing here changes what is
sampled, only how fast.

Whether drafts pay is asked of all loads between two versions of the weights, since a batch drains from the first to the
second: what they cost while it is full is held against what they save when it is nearly empty. And it is asked of all
steps: a drafter reads prompts, too, and a step after one of another length is dearer than both, of which c knows
nothing. So what the formula promises is multiplied by the share of such promises that has been kept so far.

Called by the engine core's scheduler (vllm_backend/scheduler.py) at every step; the simulator may call it as well.
Seconds, tokens. B live requests, k draft tokens.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

OFF = -1
"""Length that means: do not run the drafter at all."""

HORIZON_DRAFTS = 4096  # counts are halved here: acceptance is that of the last few thousand drafts
PRIOR_DRAFTS = 16.0  # weight of what is believed of a position before it was reached
PRIOR_CHANCE = 0.7  # ... and of the first one: high enough that drafting is tried
ENOUGH_DRAFTS = 64.0  # with fewer, drafting is not given up, and every request is taken to have had a draft
LOAD_KEPT = 0.75  # of earlier loads with each new version: about the last four count, whatever part this one is in
HISTORY_SECONDS = 1800.0  # how far back the load counts, roughly, if no new weights come meanwhile
WINDOW_SECONDS = 30.0  # how far back the measured gain looks, roughly
TRIAL_DRAFTS = 192  # of fresh requests, until a trial is decided
TRIAL_STEPS = 192  # a trial ends here in any case, as many as one request needs; what it did not prove is not so
REST_STEPS = 6000  # of OFF between trials without new weights: a trial must cost next to nothing
REST_STEPS_AFTER_WEIGHTS = 1500  # ... and with them
LONGEST_BACK_OFF = 8  # each trial in a row that proves nothing doubles the next rest, up to so many times the first
REVISE_STEPS = 32  # the table is computed anew this often
EARLY_STEPS = frozenset({4, 8, 16})  # ... and so soon in a new state: a full batch must not wait for what is plain
SWITCH_GAIN = 1.01  # a length replaces the present one if it is this much faster: no flutter between equals
WORTH_GAIN = 1.01  # drafting must be this much faster than not drafting
KEPT_PRIOR_STEPS = 256  # full ones that are believed to have kept what was promised, before any is seen
ROW_RATE = 0.1  # how fast the costs of one batch size follow what is seen: the machine gets slower or faster
# ... and one cell by itself. Much slower: a machine that slows down must not look like one length that got dearer, or
# the lengths that are not in use would seem cheap.
CELL_RATE = 0.02
DOUBTFUL_GAIN = 1.3  # below this, probes also leave the drafter out: an old calibration must not decide that it pays
PROBE_EVERY, PROBE_STEPS = 64, 4  # of so many steps, so few use the next shorter or longer draft, to know their costs
OUTLIER = 3.0  # a step this much slower or faster than expected was disturbed, and teaches nothing


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
    """c(B, k): seconds [lengths, nodes], interpolated between nodes, and corrected by every step that is seen."""

    def __init__(self, nodes: Sequence[int], lengths: Sequence[int]) -> None:
        self.nodes, self.lengths = tuple(nodes), tuple(sorted(lengths))
        self.seconds: dict[int, list[float]] = {}

    @property
    def is_known(self) -> bool:
        """Whether every length has a cost at every node."""
        return all(k in self.seconds for k in self.lengths)

    def fill(self, measured: dict[int, list[float]]) -> None:
        """Take measured rows [nodes] by length; lengths between two measured ones are interpolated.

        A longer draft cannot cost less: where it seems so, that was noise, and both move to the middle of it.
        """
        known = sorted(measured)
        by_node = [_never_falling([measured[k][node] for k in known]) for node in range(len(self.nodes))]
        for k in self.lengths:
            self.seconds[k] = [float(np.interp(k, known, costs)) for costs in by_node]

    def at(self, batch: int, k: int) -> float:
        """Seconds of a step; linear between nodes, proportional to the last two beyond them."""
        row = self.seconds[k]
        place, share = self.place(batch)
        return row[place] + share * (row[min(place + 1, len(row) - 1)] - row[place])

    def correct(self, batch: int, k: int, ratio: float) -> None:
        """A step took `ratio` times what was expected: move this cell a little, and its batch size's row more."""
        place, share = self.place(batch)
        for node, weight in ((place, 1 - share), (place + 1, share)):
            if weight > 0 and node < len(self.nodes):
                together = ratio ** (ROW_RATE * weight)
                for row in self.seconds.values():
                    row[node] *= together
                self.seconds[k][node] *= ratio ** (CELL_RATE * weight)

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
    load_s: list[float] = field(init=False)
    """Seconds spent near each node of the costs, fading."""
    window: Window = field(init=False)
    events: list[dict[str, Any]] = field(default_factory=list, init=False)
    predicted_gain: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        self.lengths = tuple(sorted(self.lengths))
        self.costs = StepCosts(batch_nodes(self.max_batch), self.lengths)
        self.acceptance = Acceptance(max(self.lengths))
        self._forget_loads()
        self._calls = self._steps = self._state_steps = self._trial_drafts = 0
        self._rest_steps, self._back_off = REST_STEPS, 1
        self.table = [max(self.lengths)] * (self.max_batch + 1)
        self._probe = self.table

    # -- what happens ---------------------------------------------------------------------------------------------

    def lookup(self) -> list[int]:
        """Length by batch size for the next step; now and then that of a probe."""
        if self.fixed is not None:
            return [self.fixed] * len(self.table)
        self._calls += 1
        phase = self._calls % PROBE_EVERY
        if phase >= PROBE_STEPS or self.state is not State.DRAFTING:
            return self.table
        if phase == 0:
            self._probe = self._next_probe(self._calls // PROBE_EVERY % 3)
        return self._probe

    def _next_probe(self, turn: int) -> list[int]:
        """In turn: one token more, one fewer, and, if it is in doubt whether drafts pay at all, none."""
        if turn == 2:
            is_doubtful = OFF in self.lengths and self.predicted_gain < DOUBTFUL_GAIN
            return [OFF] * len(self.table) if is_doubtful else self.table
        shift = 1 if turn == 1 else -1
        drafting = [k for k in self.lengths if k != OFF]
        return [min(max(k + shift, drafting[0]), drafting[-1]) for k in self.table]

    def saw_request(self) -> bool:
        """A request is about to begin, and with it a trial that is due. True if it is one that the trial judges by."""
        is_rested = self._state_steps >= self._rest_steps * self._back_off
        if self.state is State.OFF and is_rested and self.fixed is None:
            self.acceptance = Acceptance(max(self.lengths))
            self._trial_drafts = 0
            self._move(State.TRIAL)
            self._fill_table()
        return self.state is State.TRIAL

    def saw_draft(self, length: int, accepted: int, is_fresh: bool) -> None:
        """A request's draft was verified. is_fresh: the request is younger than the present state."""
        if self.fixed is not None:
            return
        if self.state is State.TRIAL:
            if not is_fresh:
                return
            self._trial_drafts += 1
        self.acceptance.observe(length, accepted)

    def saw_step(self, batch: int, k: int, tokens: int, seconds: float) -> None:
        """A step of decoding ended: `batch` requests, k tokens drafted and verified each, `tokens` emitted.

        It followed others of its length, so that it took what its length costs.
        """
        if not self._learns(k):
            return
        ratio = seconds / self._cost(batch, k)
        if not 1 / OUTLIER < ratio < OUTLIER:
            return
        self.costs.correct(batch, k, ratio)
        if k > 0:
            self.acceptance.request_steps += batch
        undrafted_s = tokens / batch * self.costs.at(batch, self._undrafted)
        self._count(seconds, undrafted_s, promised_s=seconds)
        self._remember_load(batch, seconds)
        self._steps += 1
        self._state_steps += 1
        if self._steps % REVISE_STEPS == 0 or self._is_due():
            self.revise()

    def saw_other_step(self, batch: int, k: int, tokens: int, seconds: float, begins: bool) -> None:
        """A step ended that says nothing of what lengths cost, but took its time. begins: requests began with it."""
        if not self._learns(k):
            return
        plain = self.costs.at(batch, self._undrafted)
        if begins:  # with a drafter, prompts took a pass of it more, as steps do that draft nothing
            undrafted_s = seconds * plain / self.costs.at(batch, 0) if k != OFF and 0 in self.lengths else seconds
            self._count(seconds, undrafted_s, undrafted_s / self._costed_gain())
        elif seconds < OUTLIER * self.costs.at(batch, max(self.lengths)):
            undrafted_s = tokens / batch * plain
            self._count(seconds, undrafted_s, undrafted_s / self._gain_at(batch))

    def fix(self, length: int | None) -> None:
        """Use this length from now on, and learn nothing; None: go on with what was decided before."""
        self.fixed = length

    def begin_anew(self) -> None:
        """Decide by the loads that are seen from now on. Costs and acceptance stay known."""
        self.fixed = None
        self._forget_loads()
        self.table[:] = [max(self.lengths)] * (self.max_batch + 1)
        self.state, self._state_steps, self._back_off = State.DRAFTING, 0, 1
        self.revise()

    def drafter_replaced(self) -> None:
        """Another drafter serves under the same policy, as after its initialisation: nothing that is known is of it."""
        self.acceptance = Acceptance(max(self.lengths))
        self.begin_anew()

    def weights_changed(self) -> None:
        """A new version of policy and drafter serves: what was accepted before counts half, and a rest is shorter."""
        self.acceptance.fade(0.5)
        self.load_s = [seconds * LOAD_KEPT for seconds in self.load_s]
        self._rest_steps = REST_STEPS_AFTER_WEIGHTS

    # -- what is decided ------------------------------------------------------------------------------------------

    def revise(self) -> None:
        """Decide the state and the table anew. Without costs nothing is decided."""
        if self.fixed is not None or not self.costs.is_known:
            return
        self.predicted_gain = self._gain()
        if self.state is State.TRIAL:
            if self._trial_drafts >= TRIAL_DRAFTS or self._state_steps >= TRIAL_STEPS:
                is_proved = self._trial_drafts >= TRIAL_DRAFTS and self.predicted_gain >= WORTH_GAIN
                self._back_off = 1 if is_proved else min(2 * self._back_off, LONGEST_BACK_OFF)
                self._move(State.DRAFTING if is_proved else State.OFF)
        elif (
            self.state is State.DRAFTING
            and self.predicted_gain < WORTH_GAIN
            and self.acceptance.drafts >= ENOUGH_DRAFTS
            and OFF in self.lengths
        ):
            self._move(State.OFF)
        self._fill_table()

    def _is_due(self) -> bool:
        """Whether a state's end should not wait for the next revision."""
        return self._state_steps in EARLY_STEPS or (self.state is State.TRIAL and self._trial_drafts >= TRIAL_DRAFTS)

    def _move(self, state: State) -> None:
        self.events.append(
            {
                "before": self.state.value,
                "after": state.value,
                "predicted_gain": round(self.predicted_gain, 3),
                "acceptance": [round(chance, 3) for chance in self.acceptance.chances()],
            }
        )
        self.state, self._state_steps = state, 0
        if state is State.OFF:
            self._rest_steps = REST_STEPS

    def _fill_table(self) -> None:
        allowed = [k for k in self.lengths if k != OFF] or [OFF]
        if self.state is State.DRAFTING:
            emitted = self.acceptance.emitted(allowed)
            self.table[1:] = [self._best(batch, emitted) for batch in range(1, self.max_batch + 1)]
        else:
            shortest = min((k for k in allowed if k > 0), default=0)
            self.table[1:] = [OFF if self.state is State.OFF else shortest] * self.max_batch

    def _best(self, batch: int, emitted: dict[int, float]) -> int:
        """Of the lengths with so many tokens emitted per step."""
        speed = {k: tokens / self._cost(batch, k) for k, tokens in emitted.items()}
        best, now = max(speed, key=lambda k: speed[k]), self.table[batch]
        return now if now in speed and speed[best] < SWITCH_GAIN * speed[now] else best

    @property
    def _undrafted(self) -> int:
        """The length that stands for decoding without speculation."""
        return OFF if OFF in self.lengths else min(self.lengths)

    def _learns(self, k: int) -> bool:
        return self.fixed is None and self.costs.is_known and k in self.lengths

    def _count(self, seconds: float, undrafted_s: float, promised_s: float) -> None:
        """A step ended; by what c promises of drafts, what it did had taken so long."""
        self.window.add(seconds, undrafted_s)
        if self.state is State.DRAFTING:
            self._kept.add(seconds, promised_s)

    def _gain(self) -> float:
        """Speed with the best lengths over speed without drafts, over the loads of the last versions of the weights."""
        prior_s = KEPT_PRIOR_STEPS * self.costs.at(self.max_batch, self._undrafted)
        return self._costed_gain() * (self._kept.gain(prior_s) or 1.0)

    def _gain_at(self, batch: int) -> float:
        """What is promised of the length that is used at this load."""
        k = self.table[batch]
        return self.acceptance.emitted([k])[k] * self.costs.at(batch, self._undrafted) / self._cost(batch, k)

    def _costed_gain(self) -> float:
        """What is promised of all loads, if steps are as long as c says."""
        drafted = undrafted = 0.0
        emitted = self.acceptance.emitted(k for k in self.lengths if k != OFF)
        for node, seconds in zip(self.costs.nodes, self.load_s, strict=True):
            # A load is a number of steps without drafts; with drafts there are fewer, and each takes longer.
            plain = self.costs.at(node, self._undrafted)
            steps = seconds / plain
            undrafted += seconds
            drafted += steps * min(self._cost(node, k) / tokens for k, tokens in emitted.items())
        return undrafted / drafted

    def _cost(self, batch: int, k: int) -> float:
        """Seconds of a step in which the usual share of requests has a draft of k tokens."""
        rate = self.acceptance.draft_rate if k > 0 else 1.0
        return rate * self.costs.at(batch, k) + (1 - rate) * self.costs.at(batch, self._undrafted)

    def _forget_loads(self) -> None:
        self.load_s = [1e-3] * len(self.costs.nodes)
        self.window = Window(WINDOW_SECONDS)  # otherwise: without drafts
        self._kept = Window(HISTORY_SECONDS)  # of DRAFTING; otherwise: if all steps were as fast as c promises

    def _remember_load(self, batch: int, seconds: float) -> None:
        fade = math.exp(-seconds / HISTORY_SECONDS)
        place, share = self.costs.place(batch)
        self.load_s = [value * fade for value in self.load_s]
        self.load_s[place] += (1 - share) * seconds
        self.load_s[min(place + 1, len(self.load_s) - 1)] += share * seconds

    # -- what is reported -----------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """State, table by batch size in runs, acceptance, gains, costs, and the events since the last report."""
        events, self.events = self.events, []
        return {
            "state": self.state.value,
            "table": [list(run) for run in _runs(self.table[1:])],
            "acceptance": self.acceptance.chances(),
            "predicted_gain": self.predicted_gain,
            "measured_gain": self.window.gain(),
            "costs": self.costs.as_json(),
            "events": events,
        }


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first batch size, last, length) of equal neighbours; batch sizes start at 1."""
    first = 0
    for place in range(1, len(lengths) + 1):
        if place == len(lengths) or lengths[place] != lengths[first]:
            yield first + 1, place, lengths[first]
            first = place
