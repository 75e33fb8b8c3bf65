"""An engine with known costs and known acceptance, for tests of the draft length controller.

It steps as vLLM's does: a step verifies the drafts of the step before, prompts are read in between, and other load
slows the machine down for seconds at a time. `seconds` and `tokens` are those of a quiet machine, so that speeds can be
compared; the controller sees the disturbed ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specrl.generation.draft_lengths.controller import DraftingState, DraftLengthController
from specrl.generation.draft_lengths.decoding_step import OFF, Step

LONGEST = 5
LENGTHS = (OFF, *range(1, LONGEST + 1))

Cost = Callable[[int, int, int], float]
"""Seconds of a step: batch size, drafts verified for each request, drafts made for each (OFF: the drafter rests)."""


def linear_cost(fixed: float, per_token: float, per_pass: float, per_draft: float) -> Cost:
    """Make a cost of a fixed part, verified tokens, passes of the drafter, and drafts. In seconds."""

    def cost(batch: int, verified: int, drafted: int) -> float:
        passes = 0 if drafted == OFF else max(1, drafted)
        return fixed + per_token * batch * (max(0, verified) + 1) + passes * (per_pass + per_draft * batch)

    return cost


SMALL_POLICY = linear_cost(2e-3, 2e-5, 2.5e-4, 4e-6)  # like the demo's: long drafts pay alone, short ones at 64 live
GPU = linear_cost(8e-3, 4e-6, 5e-4, 0.0)  # verification is almost free
PROPORTIONAL = linear_cost(1e-3, 1e-3, 0.0, 1e-4)  # a model on CPUs: a step costs as many tokens as it verifies


@dataclass
class SimulatedRequest:
    """One request. left: tokens until it ends. is_whole: the drafter has read all of it."""

    left: float
    context: int
    unread: int
    is_whole: bool = True


@dataclass
class SimulatedEngine:
    """Runs a controller as the scheduler does.

    chance: acceptance of each draft token, given the ones before. reading_s: seconds per prompt token, and a tenth more
    with the drafter. noise: of each step, as the deviation of a logarithm. load: share of the time in which other load
    slows the machine down by 1.3 to 2, for 0.3 to 3 seconds at a time.
    """

    drafting: DraftLengthController
    chance: float
    cost: Cost = SMALL_POLICY
    seed: int = 0
    tokens_each: float = 40.0
    prompt: int = 10
    reading_s: float = 0.0
    noise: float = 0.05
    load: float = 0.3
    is_limited: bool = False  # whether `left` is an exact limit for the controller, as if each ran to its maximum
    disturb: Callable[[float], float] = lambda seconds: seconds  # what the clock makes of a step's seconds
    seconds: float = 0.0
    tokens: int = 0
    catch_ups: int = 0
    live: list[SimulatedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311 - no secret
        self._machine = random.Random(self.seed + 1)  # noqa: S311 - no secret
        self._now = self._changes_at = 0.0
        self._slowness = 1.0
        self._recent: list[Step] = []

    @property
    def speed(self) -> float:
        """Tokens per second of a quiet machine since the last `forget`."""
        return self.tokens / self.seconds

    def forget(self) -> None:
        """Count from here on."""
        self.seconds = 0.0
        self.tokens = 0

    def run(self, batch: int, steps: int) -> list[int]:
        """Run steps at a constant batch size; returns the lengths used."""
        used = []
        del self.live[batch:]
        for _ in range(steps):
            while len(self.live) < batch:
                self.begin(self.tokens_each * self.random.uniform(0.5, 1.5))
            used.append(self.step())
        return used

    def drain(self, tokens: Sequence[float]) -> list[tuple[int, int]]:
        """Run a batch until its last request has ended, then update the weights. tokens: of each request.

        Returns the number of live requests and the length of each step.
        """
        self.live.clear()
        for left in tokens:
            self.begin(left)
        used = []
        while self.live:
            used.append((len(self.live), self.step()))
        self.drafting.handle_new_weights()
        return used

    def begin(self, tokens: float) -> None:
        self.drafting.record_request()
        self.live.append(SimulatedRequest(tokens, self.prompt, self.prompt))

    def step(self) -> int:
        drafting = self.drafting
        batch = len(self.live)
        k = drafting.next_table()[batch]
        is_missed = any(not request.is_whole for request in self.live)
        is_free = drafting.fixed is not None or drafting.state is DraftingState.TRIAL or drafting.is_trying
        is_catch_up = False
        if is_missed and not is_free:
            left = (round(request.left) if self.is_limited else 1000 for request in self.live)
            if drafting.is_catch_up_due(batch, (request.context for request in self.live), left):
                is_catch_up = True
                self.catch_ups += 1
                for request in self.live:
                    request.unread = request.context
                    request.is_whole = True
            else:
                k = OFF
        verified = self._recent[-1].length if self._recent else OFF
        emitted = sum(self._decode(request, k, verified) for request in self.live)
        read = sum(request.unread for request in self.live)
        for request in self.live:
            request.unread = 0
        seconds = self.cost(batch, verified, k) + read * self.reading_s * (1.0 if k == OFF else 1.1)
        self.seconds += seconds
        self.tokens += emitted
        self._recent = [*self._recent[-2:], Step(0.0, batch, k, read, is_catch_up)]
        drafting.record_step(self._recent, emitted, self.disturb(self._slow_down(seconds)))
        self.live = [request for request in self.live if request.left > 0]
        return k

    def _decode(self, request: SimulatedRequest, k: int, verified: int) -> int:
        if k == OFF and not self.drafting.is_trying:
            request.is_whole = False
        accepted = 0
        while accepted < verified and request.is_whole and self.random.random() < self.chance:
            accepted += 1
        if verified > 0:
            self.drafting.record_verified_draft(verified, accepted, request.is_whole)
        request.left -= 1 + accepted
        request.context += 1 + accepted
        return 1 + accepted

    def _slow_down(self, seconds: float) -> float:
        """Return what a step takes on the machine with its other load."""
        left = seconds * math.exp(self._machine.gauss(0.0, self.noise))
        began = self._now
        while True:
            if self._now >= self._changes_at:
                self._slowness = self._machine.uniform(1.3, 2.0) if self._machine.random() < self.load else 1.0
                self._changes_at = self._now + self._machine.uniform(0.3, 3.0)
            if (self._changes_at - self._now) / self._slowness >= left:
                self._now += left * self._slowness
                return self._now - began
            left -= (self._changes_at - self._now) / self._slowness
            self._now = self._changes_at


def make_engine(chance: float, max_batch: int = 64, **rest: object) -> SimulatedEngine:
    """Make an engine whose controller knows nothing."""
    return SimulatedEngine(DraftLengthController(max_batch, LENGTHS), chance, **rest)  # type: ignore[arg-type]


def expected_speed(chance: float, batch: int, k: int, cost: Cost = SMALL_POLICY) -> float:
    """Return the tokens per second with a fixed length, without prompts."""
    return batch * sum(chance**i for i in range(max(k, 0) + 1)) / cost(batch, k, k)


def find_best_length(chance: float, batch: int, cost: Cost = SMALL_POLICY) -> int:
    """Return the fixed length with the highest speed."""
    return max(LENGTHS, key=lambda k: expected_speed(chance, batch, k, cost))
