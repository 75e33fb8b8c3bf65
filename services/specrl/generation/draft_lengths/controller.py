"""Chooses the draft length by batch size, from the costs of steps and the acceptance of drafts. Pure.

    k               draft tokens per request and step. OFF: the drafter does not run at all
    speed(k)        E(k) / relative cost of k at this batch size; see `acceptance` and `step_costs`
    drafts pay      if the best speed(k) exceeds speed(OFF) by more than the overhead; see `gains`

Each batch size has a length of its own: the fastest of those that were tried there twice, or are in a table of other
runs. Without either an engine begins as at the nearest batch size that is known, or else with short drafts.

Tries. A try uses another length for a few steps, between steps of the length in use. OFF is the first, then lengths
near the best one. Tries take at most half of the first EARLY_STEPS steps of a batch size and a tenth later, and each
length that is known to be slower at most LOSS_SHARE of the time. So drafts that do not pay are used for about 20 steps
at a new batch size, and a cost that has become wrong for about TRY_EVERY steps.

Catch-up. A learned drafter has no KV cache of tokens that were decoded without it. Before it can draft for such
requests, all live requests are computed again, once. This is a rent-or-buy decision: the catch-up is due when the time
that drafts would have saved reaches its cost. So the total is at most twice the optimum. There is no catch-up if the
tokens that are left cannot save as much.

Trials. Acceptance is observed only on requests that the drafter has read completely. There are none while drafts pay at
no batch size (OFF), or not at the current one (DRAFTING). After a while, a trial finds out whether that is still true:

    DRAFTING --drafts pay at no batch size--> OFF --costs have changed, so that they do--> DRAFTING
    DRAFTING, OFF --a request begins, TRIAL_SHARE times a trial's steps after the last draft--> TRIAL
    TRIAL --enough drafts observed, or too few for too long--> DRAFTING or OFF

Draft lengths change only the speed of sampling, never its distribution. Called by the engine core's scheduler
(vllm_backend/extensions/scheduler.py) at every step. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any

from specrl.generation.draft_lengths.acceptance import ENOUGH_DRAFTS, AcceptanceEstimate
from specrl.generation.draft_lengths.decoding_step import COMPARED_AFTER, OFF, Step
from specrl.generation.draft_lengths.gains import Gains, PromptCost
from specrl.generation.draft_lengths.step_costs import CONTRADICTION, StepCosts

SWITCH_GAIN = 1.02  # a length must be this much faster to replace the current one; prevents flapping
REVISE_STEPS = 16  # between two revisions of the table; a finished try revises it, too
MOST_READING = 0.4  # share of a step's time: a step that spends more on prompts is not compared
DISTURBED = 5.0  # a step that takes so many times the expected time does not count in the gains

# Tries.
TRY_STEPS = 5  # steps of a try that count; two more have drafts of other lengths
LONGEST_TRY = 48  # steps of a try at most: some read too many prompts to count
EARLY_STEPS = 256  # a batch size is new for so many steps
EARLY_TRY_EVERY = 10  # counted steps from one try to the next at a new batch size
TRY_EVERY = 64  # the same at others
FEW_TRIES = 4  # a length that was tried less often is tried again at once, unless it is HOPELESS
HOPELESS = 0.85  # share of the speed of the length in use: a slower length is not worth another try soon
LOSS_SHARE = 0.002  # of the time may be lost by tries of a length that is known to be slower

TRIAL_STEPS = 192  # of a trial at most; about as many as one request takes
SHORTEST_TRIAL = 64  # for the rest after it
TRIAL_SHARE = 64  # steps of rest per step of the last trial


class DraftingState(StrEnum):
    """The controller's state; see the diagram in the module's docstring."""

    DRAFTING = "drafting"
    OFF = "off"
    TRIAL = "trial"


class DraftLengthController:
    """The controller of one engine.

    max_batch: live requests at most. lengths: those that the mechanism supports, such as (OFF, 1, 2, 3).
    table: draft length by batch size; index 0 is unused. fixed: a length to use always, for measurements; the
    controller decides and learns nothing then. events: what has happened since the last report.
    """

    def __init__(self, max_batch: int, lengths: Sequence[int]) -> None:
        self.max_batch = max_batch
        self.lengths = tuple(sorted(lengths))
        self.costs = StepCosts(max_batch, self.lengths)
        self.fixed: int | None = None
        self.events: list[dict[str, Any]] = []
        self._everywhere = {k: [k] * (max_batch + 1) for k in self.lengths}  # tables of tries and trials
        self._prompt = PromptCost()
        self._catch_ups = 0
        self._steps = [0 for _ in self.costs.nodes]  # that counted
        self._next_try = [EARLY_TRY_EVERY // 2 for _ in self.costs.nodes]
        self._tried_at: dict[tuple[int, int], int] = {}  # by node and length
        self._node = 0  # of the last step
        self._tried: int | None = None  # the length of the try, if there is one
        self._try_left = -1  # its steps, at most
        self._found: list[float] = []  # logarithms of the seconds of those that count
        self.reset_drafter()

    def reset_drafter(self) -> None:
        """Forget the previous drafter: a new one serves. Step costs are kept, since they do not depend on weights."""
        longest = self.lengths[-1]
        self.acceptance = self._before_trial = AcceptanceEstimate(longest)
        # Half of the longest length with one request, and half of that with each four times as many.
        self._chosen = [max(1, (longest + 1) // 2 >> node // 2) for node in range(len(self.costs.nodes))]
        self._gain_of = [1.0 for _ in self.costs.nodes]
        self.state = DraftingState.DRAFTING
        self._gains = Gains()
        self._is_tried = False  # whether enough drafts were observed to switch drafting off
        self._trial_steps = self._idle_steps = 0
        self._rest_steps = TRIAL_SHARE * TRIAL_STEPS
        self._forget_missed()
        self.revise_table()

    # -- calls of the scheduler -----------------------------------------------------------------------------------

    def next_table(self) -> list[int]:
        """Return the length by batch size for the next step: the table's, or now and then a try's."""
        if self.fixed is not None:
            return [self.fixed] * (self.max_batch + 1)
        if self._tried is None and self._steps[self._node] >= self._next_try[self._node]:
            self._begin_try()
        elif self._try_left == 0:
            self._end_try()
        self._try_left -= 1
        return self.table if self._tried is None else self._everywhere[self._tried]

    @property
    def is_trying(self) -> bool:
        """Whether the last `next_table` was a try's. The drafter can afford to miss its few steps."""
        return self._tried is not None

    def is_catch_up_due(self, batch: int, tokens: Iterable[int], left: Iterable[int]) -> bool:
        """Whether to compute all live requests again now, so that the drafter can draft for them.

        batch: number of live requests. tokens: computed tokens of each. left: tokens that each can still emit at most.
        Both iterables are consumed only if drafts pay at this batch size.

        Called before each step while the drafter has missed tokens of live requests. Until this returns True the
        scheduler decodes without drafts.
        """
        node = self.costs.find_node(batch)
        plain = self.costs.seconds_at(node, OFF)
        if self.state is not DraftingState.DRAFTING or self.table[batch] == OFF or plain is None:
            self._forget_missed()
            return False
        # Rent: what one more step without drafts loses. Price: computing the prompts, and the step under way.
        saved_s = plain * (1 - 1 / max(1.0, self._gain_of[node]))
        self._missed_s += saved_s
        price_s = sum(tokens) * self._prompt.seconds + plain
        # With new requests arriving, the savings have no bound: these would profit from drafts, too.
        most_s = math.inf if self._is_fed else max(left, default=0) * saved_s
        if min(self._missed_s, most_s) < price_s:
            return False
        self._forget_missed()
        self._catch_ups += 1
        return True

    def _forget_missed(self) -> None:
        # Both count from when drafts began to pay at the current batch size: the time that they would have saved, and
        # whether requests have arrived.
        self._missed_s = 0.0
        self._is_fed = False

    def record_request(self) -> None:
        """Record that a request is about to begin, and start a trial if one is due.

        A trial starts only here, because the drafter must read a request from its first token.
        """
        self._is_fed = True
        is_resting = self._idle_steps < self._rest_steps
        if self.state is DraftingState.TRIAL or is_resting or self.fixed is not None:
            return
        self._before_trial = self.acceptance
        self.acceptance = AcceptanceEstimate(self.lengths[-1])
        self._trial_steps = 0
        self._gains.discount_overhead()
        self._end_try()
        self._enter_state(DraftingState.TRIAL)
        self.table = self._everywhere[min(k for k in self.lengths if k > 0)]

    def record_verified_draft(self, length: int, accepted: int, is_whole: bool) -> None:
        """Record a verified draft of one request. is_whole: the drafter has read the whole request."""
        if self.fixed is not None:
            return
        if not is_whole:
            # A draft on incomplete context says nothing about acceptance. `record_step` will count the request's
            # step; this takes it out again.
            self.acceptance.request_steps -= 1
            return
        self.acceptance.record_draft(length, accepted)
        if not self._is_tried and self.acceptance.drafts >= ENOUGH_DRAFTS:
            self._is_tried = True
            self._rest_steps = TRIAL_SHARE * max(SHORTEST_TRIAL, self._trial_steps)

    def record_step(self, recent: Iterable[Step], tokens: int, seconds: float) -> None:
        """Record the last of these steps, which has ended. tokens: emitted by all requests. recent: at most three."""
        *before, step = recent
        last_two = [*before[-1:], step]
        batch = step.batch
        k = step.length
        if self.fixed is not None or k not in self.lengths or batch < 1 or not 0 < seconds < math.inf:
            return
        # Of the time of this step and of the one before; see `decoding_step`.
        prompt_tokens = statistics.fmean(each.read for each in last_two)
        is_catch_up = any(each.is_catch_up for each in last_two)
        node = self.costs.find_node(batch)
        if node != self._node:
            self._node = node
            self._end_try()
        reading_s = prompt_tokens * self._prompt.seconds
        expected_s = self.costs.seconds_at(node, k)
        if expected_s is not None:
            if prompt_tokens > 0:
                self._prompt.record_step(prompt_tokens, seconds - expected_s, expected_s)
            if k != OFF:
                self._gains.add_drafted_step(expected_s, reading_s, is_catch_up)
            plain_s = self.costs.seconds_at(node, OFF)
            if plain_s is not None and (is_catch_up or seconds - reading_s < DISTURBED * expected_s):
                undrafted_s = 0.0 if is_catch_up else tokens / batch * plain_s + reading_s
                self._gains.add_step(seconds, undrafted_s, self._emitted[k] * plain_s / expected_s)
        is_decoding = reading_s < MOST_READING * seconds
        if is_decoding and len(before) == COMPARED_AFTER and step.is_comparable(*before):
            if k > 0:
                self.acceptance.request_steps += batch
            self._steps[node] += 1
            # A try observes too few drafts to replace a trial.
            self._idle_steps = 0 if 0 < k == self._chosen[node] else self._idle_steps + 1
            self._trial_steps += 1
            self._learn_cost(node, k, math.log(seconds - reading_s))

    def fix_length(self, length: int | None) -> None:
        """Use this length from now on and learn nothing. None returns to the table."""
        self.fixed = length
        self._end_try()

    def handle_new_weights(self) -> None:
        """Discount past acceptance by half, and try drafts sooner: new weights of policy and drafter serve."""
        self.acceptance.discount_counts(0.5)
        self._idle_steps += self._rest_steps // 4

    # -- tries ----------------------------------------------------------------------------------------------------

    def _begin_try(self) -> None:
        node = self._node
        used = self._chosen[node]
        steps = self._steps[node]
        self._next_try[node] = steps + (EARLY_TRY_EVERY if steps < EARLY_STEPS else TRY_EVERY)
        if self.state is DraftingState.TRIAL:
            return
        speeds = self._compute_speeds(node)
        due = [k for k in self._list_candidates(speeds, used) if self._is_try_due(node, k, speeds, used)]
        if due:
            self._tried = min(due, key=lambda k: self.costs.count_tries(node, k))  # the first one of these
            self._tried_at[node, self._tried] = steps
            self._try_left = LONGEST_TRY

    def _list_candidates(self, speeds: dict[int, float], used: int) -> list[int]:
        """Return OFF, and lengths near the best one that drafts."""
        best = used if used != OFF else max((k for k in speeds if k != OFF), key=speeds.__getitem__, default=1)
        longer = (best + 1, 2 * best) if used != OFF else ()
        return [k for k in dict.fromkeys((OFF, best, best // 2, best - 1, *longer)) if k in self.lengths and k != used]

    def _is_try_due(self, node: int, k: int, speeds: dict[int, float], used: int) -> bool:
        if k != OFF and self._is_tried and self._emitted[k] < SWITCH_GAIN:
            return False  # whatever it costs, it cannot pay
        tries = self.costs.count_tries(node, k)
        if tries <= 0 or used not in speeds or (tries < FEW_TRIES and speeds[k] > HOPELESS * speeds[used]):
            return True
        # While the drafter rests, it has read none of the live requests, so a try emits no accepted drafts.
        speed = speeds[k] / (self._emitted[k] if used == OFF else 1.0)
        rest = TRY_STEPS * 2 * max(0.0, speeds[used] / speed - 1) / LOSS_SHARE
        # What is known from few tries is soon tried again.
        return self._steps[node] >= self._tried_at.get((node, k), -math.inf) + min(rest, TRY_EVERY << tries)

    def _learn_cost(self, node: int, k: int, log_s: float) -> None:
        """Learn from the logarithm of a step's seconds, and revise the table now and then."""
        used = self._chosen[node]
        is_over = self.state is DraftingState.TRIAL and self.acceptance.drafts >= ENOUGH_DRAFTS
        if k == used:
            self.costs.record_step(node, k, log_s)
        elif k == self._tried:
            self._found.append(log_s)
            if len(self._found) == TRY_STEPS:
                is_seed = self.costs.count_tries(node, k) == 0
                if self.costs.record_try(node, used, k, self._found) > CONTRADICTION:
                    self._tried_at.pop((node, k), None)  # try it again at once
                    if is_seed:
                        self.events.append({"kind": "costs_contradicted", "batch": self.costs.nodes[node], "length": k})
                self._end_try()
                is_over = True
        if is_over or self._steps[node] % REVISE_STEPS == 0:
            self.revise_table()

    def _end_try(self) -> None:
        self._tried = None
        self._try_left = -1
        self._found = []

    # -- decisions ------------------------------------------------------------------------------------------------

    def revise_table(self) -> None:
        """Recompute the table and the state. Does nothing while the length is fixed."""
        if self.fixed is not None:
            return
        is_trial = self.state is DraftingState.TRIAL
        if is_trial:
            if self.acceptance.drafts < ENOUGH_DRAFTS and self._trial_steps < TRIAL_STEPS:
                return
            if self.acceptance.drafts < ENOUGH_DRAFTS // 2:
                self.acceptance = self._before_trial  # too few drafts to replace the old estimate
            self._rest_steps = TRIAL_SHARE * max(SHORTEST_TRIAL, self._trial_steps)
            self._idle_steps = 0
        self._emitted = self.acceptance.emitted_by_length()
        for node in range(len(self.costs.nodes)):
            before = self._chosen[node]
            self._chosen[node] = self._choose_length(node)
            if self._chosen[node] != before:  # compare with it, and with OFF, at once
                self._next_try[node] = self._steps[node] + EARLY_TRY_EVERY // 2
                self._tried_at.pop((node, before), None)
                self._tried_at.pop((node, OFF), None)
        self.table = [self._chosen[self.costs.find_node(batch)] for batch in range(self.max_batch + 1)]
        state = DraftingState.OFF if all(k == OFF for k in self._chosen) else DraftingState.DRAFTING
        if state is not self.state:
            self._enter_state(state)

    def _choose_length(self, node: int) -> int:
        """Return the fastest known length of a node, and set the node's gain over OFF."""
        speeds = self._compute_speeds(node)
        now = self._chosen[node]
        drafting = {k: speed for k, speed in speeds.items() if k == now or self.costs.count_tries(node, k) != 1}
        drafting.pop(OFF, None)
        if not drafting:
            return now
        best = max(drafting, key=drafting.__getitem__)
        if now in drafting and drafting[best] < SWITCH_GAIN * drafting[now]:
            best = now
        if OFF not in speeds:
            return best
        self._gain_of[node] = drafting[best] / speeds[OFF] / (1 + self._gains.overhead)
        return OFF if self._is_tried and self._gain_of[node] < (SWITCH_GAIN if now == OFF else 1.0) else best

    def _compute_speeds(self, node: int) -> dict[int, float]:
        return {k: self._emitted[k] / cost for k, cost in self.costs.list_costs(node).items()}

    def _enter_state(self, state: DraftingState) -> None:
        self.events.append(
            {
                "kind": "state_changed",
                "before": self.state.value,
                "after": state.value,
                "best_gain": round(max(self._gain_of), 3),
                "acceptance": [round(chance, 3) for chance in self.acceptance.prefix_probabilities()],
            }
        )
        self.state = state

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
            "predicted_gain": self._gains.predicted,
            "measured_gain": self._gains.measured,
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
