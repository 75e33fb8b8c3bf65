"""Chooses the draft length by batch size, from measured costs and acceptance. Pure.

    k             draft tokens per request and step. OFF: the drafter does not run at all
    B             live requests
    E(k)          = 1 + d * (a_1 + ... + a_k)   tokens that a request emits per step
    a_i           probability that the first i draft tokens are accepted
    d             share of requests that have a draft: n-gram look-up may find none; costs are mixed accordingly
    c(B, k)       seconds of a step; calibrated at the start, then corrected by every step
    gain(B, k)    = kept * E(k) * c(B, OFF) / c(B, k)   speed relative to decoding without the drafter
    kept          realised share of the predicted gain. The prediction omits two costs: prompts that the drafter reads,
                  and the extra time of a step that follows one of another length

Each batch size has a length of its own. So a batch may be decoded without drafts while it is full, and with drafts once
few requests are left.

Catch-up. A learned drafter has no KV cache of tokens that were decoded without it. Before it can draft for such
requests, all live requests are computed again, once. This is a rent-or-buy decision: the catch-up is due when the time
that drafts would have saved reaches its cost. So the total is at most twice the optimum. There is no catch-up if the
tokens that are left cannot save as much. See `is_catch_up_due`.

Trials. Acceptance is observed only on requests that the drafter has read completely. There are none while drafts pay at
no batch size (OFF), or not at the current one (DRAFTING). After a while, a trial finds out whether that is still true:

    DRAFTING --drafts pay at no batch size--> OFF
    DRAFTING, OFF --a request begins, enough steps after the last draft, fewer after new weights--> TRIAL
    TRIAL --enough drafts observed, or too few for too long--> DRAFTING or OFF

Draft lengths change only the speed of sampling, never its distribution.

Called by the engine core's scheduler (vllm_backend/extensions/scheduler.py) at every step. Times are in seconds,
lengths in tokens.
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
"""The draft length at which the drafter does not run at all."""

# Acceptance.
HORIZON_DRAFTS = 4096  # counts are halved here, so the estimate covers the last few thousand drafts
PRIOR_DRAFTS = 16.0  # weight of the prior, in drafts
PRIOR_CHANCE = 0.7  # prior acceptance of the first position; a later one starts from the position before it
ENOUGH_DRAFTS = 192  # fewer neither switch drafting off nor decide a trial; d is 1 until then

# Gains.
REALISED_WINDOW_S = 1800.0  # time constant of the realised share of the predicted gain
REALISED_PRIOR_STEPS = 256  # prior weight, in steps of a full batch, of a realised share of 1
REPORT_WINDOW_S = 30.0  # time constant of the reported gains
SWITCH_GAIN = 1.01  # a length must be this much faster to replace the current one; prevents flapping
WORTH_GAIN = 1.01  # drafting must be this much faster than not drafting

# Trials. A trial must cost almost nothing, so trials are rare.
TRIAL_STEPS = 192  # at most; about as many as one request takes
REST_STEPS = 6000  # steps without a draft before a trial
REST_STEPS_AFTER_WEIGHTS = 1500  # the same after new weights, which may have changed the acceptance
LONGEST_BACK_OFF = 8  # each fruitless trial doubles the next wait, up to this factor

# Revisions of the table.
REVISE_STEPS = 32  # every so many steps
EARLY_STEPS = frozenset({4, 8, 16})  # also after so few steps in a new state: a full batch must not wait longer

# Kalman filter of step costs: variances of the logarithm of a step's time. UNKNOWN: at first. DRIFT: added per step.
STEP_NOISE = 0.01  # measurement noise of one step
SPEED_UNKNOWN = 0.1  # of the machine's speed at a batch size
SPEED_DRIFT = 1e-4
LENGTH_UNKNOWN = 2.5e-3  # of one length's cost relative to the other lengths
LENGTH_DRIFT = 1e-7

# Probes use a neighbouring length for a few steps to keep its cost up to date.
PROBE_EVERY = 64  # steps between two probes
PROBE_STEPS = 8  # length of a probe
PROBE_SELDOM = 512  # the gap doubles up to this while the table does not change
PROBES = 3  # kinds, in turn: shorter, longer, off
DOUBTFUL_GAIN = 1.3  # below this gain, probes also run without the drafter: an old calibration must not decide alone

# Disturbed steps.
OUTLIER = 3.0  # a step this much slower or faster than expected was disturbed and is ignored
DISTURBED_STEPS = 32  # after so many in a row the machine's speed has changed, and all costs are rescaled

PREFILL_DECAY = 0.9  # decay, per step that reads prompts, of the estimated cost of a prompt token


class DraftingState(StrEnum):
    """The controller's state; see the diagram in the module's docstring."""

    DRAFTING = "drafting"
    OFF = "off"
    TRIAL = "trial"


def choose_batch_nodes(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes to calibrate: powers of four and the largest. Costs between them are interpolated."""
    nodes = [1]
    while nodes[-1] * 4 < max_batch:
        nodes.append(nodes[-1] * 4)
    return (*nodes, max_batch) if max_batch > nodes[-1] else tuple(nodes)


def choose_calibrated_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths to calibrate: both ends, 0, 1 and the middle. Costs between them are interpolated."""
    largest = max(lengths)
    return tuple(k for k in sorted(lengths) if k in {OFF, 0, 1, (largest + 1) // 2, largest})


class StepCostModel:
    """The costs c(B, k) in seconds, by length and calibrated batch size (node), corrected by every step.

    A step can take longer than expected for two reasons: the machine is slower, or this length is more expensive. A
    Kalman filter with these two states (covariances left out) splits the error by their uncertainties. The machine's
    speed changes quickly, the relative costs of lengths hardly. So a length that has long been in use corrects the
    machine's speed, and a short probe corrects the probed length.

    Without this split, unused lengths would seem cheap when the machine slows down, and expensive when it recovers.
    """

    def __init__(self, nodes: Sequence[int], lengths: Sequence[int]) -> None:
        self.nodes = tuple(nodes)
        self.lengths = tuple(sorted(lengths))
        self.seconds: dict[int, list[float]] = {}
        self._places = [self._compute_place(batch) for batch in range(self.nodes[-1] + 1)]
        self._speed_unknown = [SPEED_UNKNOWN] * len(self.nodes)
        self._length_unknown = {k: [LENGTH_UNKNOWN] * len(self.nodes) for k in self.lengths}

    @property
    def is_known(self) -> bool:
        """Whether every length has a cost at every calibrated batch size."""
        return len(self.seconds) == len(self.lengths)

    def set_measured_costs(self, measured: dict[int, list[float]]) -> None:
        """Set the costs from calibrated rows [nodes] by length; other lengths are interpolated.

        A longer draft cannot cost less. Where it was measured so, that was noise, and both costs are averaged.
        """
        known = sorted(measured)
        by_node = [_make_monotonic([measured[k][node] for k in known]) for node in range(len(self.nodes))]
        for k in self.lengths:
            self.seconds[k] = [float(np.interp(k, known, costs)) for costs in by_node]

    def seconds_at(self, batch: int, k: int) -> float:
        """Return the seconds of a step, interpolated linearly between calibrated batch sizes."""
        row = self.seconds[k]
        place, share = self.locate_batch(batch)
        return row[place] + share * (row[place + 1] - row[place]) if share else row[place]

    def seconds_by_batch(self, k: int) -> npt.NDArray[np.float64]:
        """Return the seconds [batch sizes from 1 to the largest] of one length."""
        found: npt.NDArray[np.float64] = np.interp(np.arange(1, self.nodes[-1] + 1), self.nodes, self.seconds[k])
        return found

    def correct_by_ratio(self, batch: int, k: int, ratio: float) -> None:
        """Correct the costs by a step that took `ratio` times the expected time."""
        # The expectation was interpolated between two nodes; each takes its share of the error.
        place, share = self.locate_batch(batch)
        nodes = [(node, weight) for node, weight in ((place, 1 - share), (place + 1, share)) if weight > 0]
        speed = self._speed_unknown
        length = self._length_unknown[k]
        unexplained = STEP_NOISE + sum(weight**2 * (speed[node] + length[node]) for node, weight in nodes)
        for node, weight in nodes:
            # Kalman gains of the two states.
            its_speed = weight * speed[node] / unexplained
            its_length = weight * length[node] / unexplained
            together = ratio**its_speed
            for row in self.seconds.values():
                row[node] *= together
            self.seconds[k][node] *= ratio**its_length
            # Variance of each state: drift adds, the measurement removes.
            speed[node] += SPEED_DRIFT - weight * its_speed * speed[node]
            length[node] += LENGTH_DRIFT - weight * its_length * length[node]

    def scale_all_costs(self, ratio: float) -> None:
        """Multiply all costs by `ratio`."""
        self.seconds = {k: [cost * ratio for cost in row] for k, row in self.seconds.items()}

    def to_json(self) -> dict[str, Any]:
        """Serialise the costs for the calibration file."""
        return {"nodes": list(self.nodes), "seconds": {str(k): row for k, row in self.seconds.items()}}

    def load_json(self, found: Any) -> bool:
        """Load what `to_json` returned. Returns False, unchanged, if the nodes or lengths differ."""
        try:
            seconds = {int(k): [float(value) for value in row] for k, row in found["seconds"].items()}
            fits = tuple(found["nodes"]) == self.nodes and tuple(sorted(seconds)) == self.lengths
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return False
        if fits and all(len(row) == len(self.nodes) and all(0 < s < math.inf for s in row) for row in seconds.values()):
            self.seconds = seconds
            return True
        return False

    def locate_batch(self, batch: int) -> tuple[int, float]:
        """Return the index of the node at or below `batch`, and the fraction of the way to the next node."""
        return self._places[min(batch, self.nodes[-1])]

    def _compute_place(self, batch: int) -> tuple[int, float]:
        place = max(0, min(bisect.bisect_right(self.nodes, batch) - 1, len(self.nodes) - 2))
        if len(self.nodes) == 1:
            return 0, 0.0
        low = self.nodes[place]
        high = self.nodes[place + 1]
        return place, min(1.0, max(0.0, (batch - low) / (high - low)))


def _make_monotonic(row: Sequence[float]) -> list[float]:
    """Make a row monotonic: the mean of its running maximum and of its running minimum from the right."""
    return [(max(row[: place + 1]) + min(row[place:])) / 2 for place in range(len(row))]


class AcceptanceEstimate:
    """Estimates the a_i from how often a draft token was accepted after all tokens before it were.

    reached, accepted: counts by position, discounted over time. drafts: requests' drafts that were verified.
    request_steps: steps of requests with and without a draft.
    """

    def __init__(self, longest: int) -> None:
        self.reached = [0.0] * longest
        self.accepted = [0.0] * longest
        self.request_steps = 0.0
        self.drafts = 0.0

    def record_draft(self, length: int, accepted: int) -> None:
        """Record one request's draft of `length` tokens, of which the first `accepted` were accepted."""
        for place in range(min(length, accepted + 1, len(self.reached))):
            self.reached[place] += 1
            self.accepted[place] += place < accepted
        self.drafts += 1
        if self.drafts > HORIZON_DRAFTS:
            self.discount_counts(0.5)

    def discount_counts(self, share: float) -> None:
        """Multiply all counts by `share`."""
        self.reached = [value * share for value in self.reached]
        self.accepted = [value * share for value in self.accepted]
        self.drafts *= share
        self.request_steps *= share

    @property
    def draft_rate(self) -> float:
        """d: the share of a request's steps in which it had a draft. 1 for learned drafters."""
        return min(1.0, self.drafts / self.request_steps) if self.request_steps >= ENOUGH_DRAFTS else 1.0

    def prefix_probabilities(self) -> list[float]:
        """Return a_1 .. a_k. The prior of each position is the estimate of the position before it."""
        found: list[float] = []
        together = 1.0
        belief = PRIOR_CHANCE
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            belief = (accepted + PRIOR_DRAFTS * belief) / (reached + PRIOR_DRAFTS)
            together *= belief
            found.append(together)
        return found

    def expected_tokens_by_length(self, lengths: Iterable[int]) -> dict[int, float]:
        """Return E(k) for each length."""
        rate = self.draft_rate
        chances = self.prefix_probabilities()
        return {k: 1.0 + (rate * sum(chances[:k]) if k > 0 else 0.0) for k in lengths}


@dataclass
class GainWindow:
    """Exponentially discounted sums: seconds that steps took, and seconds of an alternative for the same work."""

    horizon_s: float
    seconds: float = 0.0
    alternative_s: float = 0.0

    def add_step(self, seconds: float, otherwise_s: float) -> None:
        """Add a step and discount the older ones."""
        fade = math.exp(-seconds / self.horizon_s)
        self.seconds = self.seconds * fade + seconds
        self.alternative_s = self.alternative_s * fade + otherwise_s

    def compute_gain(self, prior_s: float = 0.0) -> float | None:
        """Return the alternative's time over the actual time; None before the first step.

        prior_s: weight, in seconds, of a prior gain of 1.
        """
        return (self.alternative_s + prior_s) / (self.seconds + prior_s) if self.seconds > 0 else None


@dataclass
class DraftLengthController:
    """The controller of one engine.

    max_batch: live requests at most. lengths: those that the mechanism supports, such as (OFF, 0, 1, 2, 3).
    """

    max_batch: int
    lengths: tuple[int, ...]
    fixed: int | None = None
    """A length to use always, for measurements. The controller decides and learns nothing then."""
    costs: StepCostModel = field(init=False)
    acceptance: AcceptanceEstimate = field(init=False)
    state: DraftingState = field(default=DraftingState.DRAFTING, init=False)
    table: list[int] = field(init=False)
    """Draft length by batch size; index 0 is unused."""
    measured: GainWindow = field(init=False)
    """Actual seconds; the alternative is decoding without drafts."""
    predicted: GainWindow = field(init=False)
    """Seconds of the same steps as predicted by E and c; the alternative is decoding without drafts."""
    events: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.lengths = tuple(sorted(self.lengths))
        self.costs = StepCostModel(choose_batch_nodes(self.max_batch), self.lengths)
        self._steps = self._place = 0
        self._outliers: list[float] = []
        self._read_s = self._read_tokens = 0.0
        self._catch_ups = 0
        self._reset_drafter_knowledge()

    def _reset_drafter_knowledge(self) -> None:
        """Forget everything about the drafter. Step costs are kept: they do not depend on its weights."""
        self.acceptance = self._before_trial = AcceptanceEstimate(max(self.lengths))
        self.measured = GainWindow(REPORT_WINDOW_S)
        self.predicted = GainWindow(REPORT_WINDOW_S)
        self._kept = GainWindow(REALISED_WINDOW_S)  # steps with drafts; the alternative is the predicted speed
        self._emitted = self.acceptance.expected_tokens_by_length(self.lengths)  # E(k) as of the last revision
        self.table = [max(self.lengths)] * (self.max_batch + 1)
        self._gains = np.ones(self.max_batch + 1)  # of the best length other than OFF, by batch size
        self._calls = self._probes = self._probe_ends = 0
        self._probe_gap = self._probe_due = PROBE_EVERY
        self._probe: list[int] | None = None
        self.state = DraftingState.DRAFTING
        self._is_tried = False  # whether enough drafts were observed to switch drafting off
        self._state_steps = self._idle_steps = self._trial_drafts = 0
        self._last_batch = 1
        self._rest_steps = REST_STEPS
        self._back_off = 1
        # Since drafts pay at the current batch size: time that they would have saved, and whether requests arrived.
        self._missed_s = 0.0
        self._is_fed = False

    # -- calls of the scheduler -----------------------------------------------------------------------------------

    def next_table(self) -> list[int]:
        """Return the length by batch size for the next step: the table's, or now and then a probe's."""
        if self.fixed is not None:
            return [self.fixed] * len(self.table)
        self._calls += 1
        if self.state is not DraftingState.DRAFTING or self._calls == self._probe_ends:
            self._probe = None
        elif self._calls >= self._probe_due:
            self._probe = self._choose_probe(self._probes % PROBES)
            self._probes += 1
            if self._probes % PROBES == 0:
                self._probe_gap = min(2 * self._probe_gap, PROBE_SELDOM)
            self._probe_due = self._calls + self._probe_gap
            self._probe_ends = self._calls + PROBE_STEPS
        return self._probe or self.table

    @property
    def is_probing(self) -> bool:
        """Whether the last `next_table` was a probe's. The drafter can afford to miss its few steps."""
        return self._probe is not None

    def _probe_soon(self) -> None:
        """Probe sooner: after a change of load, lengths or weights the costs of neighbouring lengths may be stale."""
        self._probe_gap = PROBE_EVERY
        self._probe_due = min(self._probe_due, self._calls + PROBE_EVERY)

    def _choose_probe(self, turn: int) -> list[int]:
        """Return the table of a probe: in turn one token fewer, one more, and OFF where the gain is doubtful."""
        if turn == 2:
            can_rest = OFF in self.lengths
            return [
                OFF if can_rest and gain < DOUBTFUL_GAIN else k
                for k, gain in zip(self.table, self._gains.tolist(), strict=True)
            ]
        shift = 1 if turn == 1 else -1
        drafting = [k for k in self.lengths if k != OFF]
        return [k if k == OFF else min(max(k + shift, drafting[0]), drafting[-1]) for k in self.table]

    def is_catch_up_due(self, batch: int, tokens: Iterable[int], left: Iterable[int]) -> bool:
        """Whether to compute all live requests again now, so that the drafter can draft for them.

        batch: number of live requests. tokens: computed tokens of each. left: tokens that each can still emit at most.
        Both iterables are consumed only if drafts pay at this batch size.

        Called before each step while the drafter has missed tokens of live requests. Until this returns True the
        scheduler decodes without drafts.
        """
        if self.state is not DraftingState.DRAFTING or self.table[batch] == OFF or not self.costs.is_known:
            self._missed_s = 0.0
            self._is_fed = False
            return False
        plain = self.costs.seconds_at(batch, self._baseline_length)
        # Rent: what one more step without drafts loses. Price: computing the prompts, and the step under way.
        saved_s = plain * (1 - 1 / max(1.0, float(self._gains[batch])))
        self._missed_s += saved_s
        reading_s = sum(tokens) * self._read_s / self._read_tokens if self._read_tokens else 0.0
        # With new requests arriving, the savings have no bound: these would profit from drafts, too.
        most_s = math.inf if self._is_fed else max(left, default=0) * saved_s
        if min(self._missed_s, most_s) < reading_s + plain:  # `plain`: the step under way is discarded
            return False
        self._missed_s = 0.0
        self._is_fed = False
        self._catch_ups += 1
        return True

    def record_request(self) -> None:
        """Record that a request is about to begin, and start a trial if one is due.

        A trial starts only here, because the drafter must read a request from its first token.
        """
        self._is_fed = True
        is_rested = self._idle_steps >= self._rest_steps * self._back_off
        if self.state is not DraftingState.TRIAL and is_rested and self.fixed is None:
            self._before_trial = self.acceptance
            self.acceptance = AcceptanceEstimate(max(self.lengths))
            self._trial_drafts = 0
            self._enter_state(DraftingState.TRIAL)
            shortest = min((k for k in self.lengths if k > 0), default=0)
            self.table[1:] = [shortest] * self.max_batch

    def record_verified_draft(self, length: int, accepted: int, is_whole: bool) -> None:
        """Record a verified draft of one request. is_whole: the drafter has read the whole request."""
        if self.fixed is not None:
            return
        if not is_whole:
            # A draft on incomplete context says nothing about acceptance. `record_step` will count the request's
            # step; this takes it out again.
            self.acceptance.request_steps -= 1
            return
        self._idle_steps = 0
        self._trial_drafts += 1
        self.acceptance.record_draft(length, accepted)
        self._is_tried = self._is_tried or self.acceptance.drafts >= ENOUGH_DRAFTS

    def record_step(self, batch: int, k: int, tokens: int, seconds: float) -> None:
        """Record a pure decoding step whose time is the cost of its length (`Step.is_measured`).

        batch: requests. k: tokens drafted and verified for each. tokens: emitted by all.
        """
        if not self._is_learning_from(k):
            return
        cost = self._expected_cost(batch, k)
        undrafted = self.costs.seconds_at(batch, self._baseline_length)
        ratio = seconds / cost
        if not 1 / OUTLIER < ratio < OUTLIER:
            self._outliers.append(ratio)
            if len(self._outliers) == DISTURBED_STEPS:
                self.costs.scale_all_costs(statistics.median(self._outliers))
                self._outliers.clear()
            return
        self._outliers.clear()
        self.costs.correct_by_ratio(batch, k, ratio)
        if k > 0:
            self.acceptance.request_steps += batch
        undrafted_s = tokens / batch * undrafted
        self._add_to_windows(k, seconds, undrafted_s, self._emitted[k] * undrafted / cost, promised_s=seconds)
        self._last_batch = batch
        place, _ = self.costs.locate_batch(batch)
        if place != self._place:
            self._place = place
            self._probe_soon()
        self._steps += 1
        self._state_steps += 1
        self._idle_steps += 1
        if self._steps % REVISE_STEPS == 0 or self._must_revise_early():
            self.revise_table()

    def record_unmeasured_step(self, batch: int, k: int, tokens: int, seconds: float) -> None:
        """Record a decoding step whose time is not the cost of its length. It counts in the gains only."""
        if self._is_learning_from(k) and seconds < OUTLIER * self.costs.seconds_at(batch, max(self.lengths)):
            undrafted_s = tokens / batch * self.costs.seconds_at(batch, self._baseline_length)
            promise = self._predict_gain(batch, k)
            self._add_to_windows(k, seconds, undrafted_s, promise, undrafted_s / promise)

    def record_prefill_step(self, batch: int, k: int, read: int, seconds: float, is_catch_up: bool) -> None:
        """Record a step that computed `read` prompt tokens. is_catch_up: these were computed again for the drafter."""
        if not self._is_learning_from(k):
            return
        expected_s = self.costs.seconds_at(batch, k)
        promise = self._predict_gain(batch, k)
        self._read_s = PREFILL_DECAY * self._read_s + max(0.0, seconds - expected_s)
        self._read_tokens = PREFILL_DECAY * self._read_tokens + read
        if is_catch_up:
            # Pure overhead of drafting: without a drafter the step would not have happened.
            self._add_to_windows(k, seconds, 0.0, promise, promised_s=0.0)
        else:
            # The drafter reads prompts, too. Its share is estimated from steps of length 0, which run one pass of it.
            plain = self.costs.seconds_at(batch, self._baseline_length)
            undrafted_s = (
                seconds * plain / self.costs.seconds_at(batch, 0) if k != OFF and 0 in self.lengths else seconds
            )
            self._add_to_windows(k, seconds, undrafted_s, promise, undrafted_s / promise)

    def fix_length(self, length: int | None) -> None:
        """Use this length from now on and learn nothing. None returns to the table."""
        self.fixed = length
        self._probe = None

    def reset_drafter(self) -> None:
        """Forget the previous drafter: a new one serves the same policy version, as after its initialisation."""
        self._reset_drafter_knowledge()
        self.revise_table()

    def handle_new_weights(self) -> None:
        """Discount past acceptance by half and try drafts sooner: new weights of policy and drafter serve."""
        self.acceptance.discount_counts(0.5)
        self._rest_steps = REST_STEPS_AFTER_WEIGHTS
        self._probe_soon()

    # -- decisions ------------------------------------------------------------------------------------------------

    def revise_table(self) -> None:
        """Recompute the table and the state. Does nothing while costs are unknown or the length is fixed."""
        if self.fixed is not None or not self.costs.is_known:
            return
        self._emitted = self.acceptance.expected_tokens_by_length(self.lengths)
        if self.state is DraftingState.TRIAL:
            if self._trial_drafts >= ENOUGH_DRAFTS or self._state_steps >= TRIAL_STEPS:
                self._end_trial()
        elif self.state is DraftingState.DRAFTING:
            self._fill_table()
            if self._is_always_off:
                self._enter_state(DraftingState.OFF)

    def _end_trial(self) -> None:
        if self._trial_drafts < ENOUGH_DRAFTS // 2:
            self.acceptance = self._before_trial  # too few drafts to replace the old estimate
        self._fill_table()
        self._enter_state(DraftingState.OFF if self._is_always_off else DraftingState.DRAFTING)
        is_changed = self.table[self._last_batch] != OFF
        self._back_off = 1 if is_changed else min(2 * self._back_off, LONGEST_BACK_OFF)
        self._idle_steps = 0

    @property
    def _is_always_off(self) -> bool:
        return all(k == OFF for k in self.table[1:])

    def _must_revise_early(self) -> bool:
        """Whether the table must be revised before the next regular revision."""
        return self._state_steps in EARLY_STEPS or (
            self.state is DraftingState.TRIAL and self._trial_drafts >= ENOUGH_DRAFTS
        )

    def _enter_state(self, state: DraftingState) -> None:
        self.events.append(
            {
                "before": self.state.value,
                "after": state.value,
                "best_gain": round(float(self._gains[1:].max()), 3),
                "acceptance": [round(chance, 3) for chance in self.acceptance.prefix_probabilities()],
            }
        )
        self.state = state
        self._state_steps = 0
        if state is not DraftingState.TRIAL:
            self._rest_steps = REST_STEPS

    def _fill_table(self) -> None:
        """Set the fastest length of each batch size, and its gain over OFF."""
        # Length 0 is slower than OFF, and yields no drafts to observe acceptance from.
        drafting = [k for k in self.lengths if k > 0 or OFF not in self.lengths]
        emitted = self.acceptance.expected_tokens_by_length(drafting)
        rate = self.acceptance.draft_rate
        undrafted = self.costs.seconds_by_batch(self._baseline_length)
        costs = {k: rate * self.costs.seconds_by_batch(k) + (1 - rate) * undrafted for k in drafting}
        lengths = np.array(drafting)
        gains = np.stack([emitted[k] * undrafted / costs[k] for k in drafting])
        now = np.array(self.table[1:])
        best = gains.argmax(axis=0)
        # Hysteresis: keep the current length unless another one is faster by SWITCH_GAIN.
        stays = (lengths[:, None] == now) & (gains.max(axis=0) < SWITCH_GAIN * gains)
        best = np.where(stays.any(axis=0), stays.argmax(axis=0), best)
        found = gains[best, np.arange(self.max_batch)] * self._realised_share()
        self._gains[1:] = found
        rests = (found < WORTH_GAIN) & (OFF in self.lengths) & self._is_tried
        table = np.where(rests, OFF, lengths[best]).tolist()
        if table != self.table[1:]:
            self.table[1:] = table
            self._probe_soon()

    @property
    def _baseline_length(self) -> int:
        """The length that stands for decoding without drafts: OFF where it is supported."""
        return OFF if OFF in self.lengths else min(self.lengths)

    def _is_learning_from(self, k: int) -> bool:
        return self.fixed is None and self.costs.is_known and k in self.lengths

    def _add_to_windows(self, k: int, seconds: float, undrafted_s: float, promise: float, promised_s: float) -> None:
        """Add a step to the gain windows.

        undrafted_s: seconds of the same work without drafts. promise: predicted gain over that.
        promised_s: predicted seconds of the same work.
        """
        self.measured.add_step(seconds, undrafted_s)
        self.predicted.add_step(undrafted_s / promise, undrafted_s)
        if k != OFF and self.state is DraftingState.DRAFTING:
            self._kept.add_step(seconds, promised_s)

    def _realised_share(self) -> float:
        return (
            self._kept.compute_gain(REALISED_PRIOR_STEPS * self.costs.seconds_at(self.max_batch, self._baseline_length))
            or 1.0
        )

    def _predict_gain(self, batch: int, k: int) -> float:
        """The gain of a length over decoding without drafts, as predicted by E and c alone."""
        return self._emitted[k] * self.costs.seconds_at(batch, self._baseline_length) / self._expected_cost(batch, k)

    def _expected_cost(self, batch: int, k: int) -> float:
        """Expected seconds of a step in which the usual share of requests has a draft of k tokens."""
        rate = self.acceptance.draft_rate if k > 0 else 1.0
        return rate * self.costs.seconds_at(batch, k) + (1 - rate) * self.costs.seconds_at(batch, self._baseline_length)

    # -- report ---------------------------------------------------------------------------------------------------

    def build_report(self) -> dict[str, Any]:
        """Return the state, the table as runs of equal lengths, acceptance, gains and costs.

        Events and catch-ups are those since the last report.
        """
        events = self.events
        self.events = []
        catch_ups = self._catch_ups
        self._catch_ups = 0
        return {
            "state": self.state.value,
            "table": [list(run) for run in _merge_equal_lengths(self.table[1:])],
            "acceptance": self.acceptance.prefix_probabilities(),
            "predicted_gain": self.predicted.compute_gain() or 1.0,
            "measured_gain": self.measured.compute_gain(),
            "costs": self.costs.to_json(),
            "events": events,
            "catch_ups": catch_ups,
        }


def _merge_equal_lengths(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first batch size, last, length) for each run of equal lengths; batch sizes start at 1."""
    first = 0
    for place in range(1, len(lengths) + 1):
        if place == len(lengths) or lengths[place] != lengths[first]:
            yield first + 1, place, lengths[first]
            first = place
