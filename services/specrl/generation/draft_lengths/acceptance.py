"""Estimates how many tokens a request emits per step, from the drafts that were verified. Pure.

E(k)    = 1 + d * (a_1 + ... + a_k)   tokens that a request emits per step with k drafts
a_i     probability that the first i draft tokens are accepted
d       share of requests that have a draft: n-gram look-up may find none
"""

from __future__ import annotations

HORIZON_DRAFTS = 4096  # counts are halved here, so the estimate covers the last few thousand drafts
PRIOR_DRAFTS = 16.0  # weight of the prior, in drafts
PRIOR_CHANCE = 0.7  # prior acceptance of the first position; a later one starts from the position before it
ENOUGH_DRAFTS = 192  # fewer neither switch drafting off nor decide a trial; d is 1 until then


class AcceptanceEstimate:
    """Counts by position how often a draft token was accepted after all tokens before it were, discounted over time.

    drafts: requests' drafts that were verified. request_steps: steps of requests with and without a draft.
    """

    def __init__(self, longest: int) -> None:
        self._reached = [0.0] * longest
        self._accepted = [0.0] * longest
        self.request_steps = 0.0
        self.drafts = 0.0

    def record_draft(self, length: int, accepted: int) -> None:
        """Record one request's draft of `length` tokens, of which the first `accepted` were accepted."""
        for place in range(min(length, accepted + 1, len(self._reached))):
            self._reached[place] += 1
            self._accepted[place] += place < accepted
        self.drafts += 1
        if self.drafts > HORIZON_DRAFTS:
            self.discount_counts(0.5)

    def discount_counts(self, share: float) -> None:
        """Multiply all counts by `share`."""
        self._reached = [value * share for value in self._reached]
        self._accepted = [value * share for value in self._accepted]
        self.drafts *= share
        self.request_steps *= share

    def prefix_probabilities(self) -> list[float]:
        """Return a_1 .. a_k. The prior of each position is the estimate of the position before it."""
        found: list[float] = []
        together = 1.0
        belief = PRIOR_CHANCE
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            belief = (accepted + PRIOR_DRAFTS * belief) / (reached + PRIOR_DRAFTS)
            together *= belief
            found.append(together)
        return found

    def emitted_by_length(self) -> list[float]:
        """Return E(k), with k as the index. The last one, which OFF has as its index, is 1."""
        rate = min(1.0, self.drafts / self.request_steps) if self.request_steps >= ENOUGH_DRAFTS else 1.0
        found = [1.0]
        for chance in self.prefix_probabilities():
            found.append(found[-1] + rate * chance)
        return [*found, 1.0]
