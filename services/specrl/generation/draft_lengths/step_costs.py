"""What a decoding step costs, by batch size (node) and draft length. Pure.

    seconds of a step = speed of the machine at this node * relative cost of the length

The speed follows the last few steps of the length in use. The cost of another length is its seconds in a try over the
speed just before: neighbouring steps are compared. So load that slows everything down for seconds does not make the
lengths that are not in use look cheap. Medians leave out disturbed steps, and disturbed tries.

A table of other runs is a seed. It holds until a try replaces it, length by length. Where a try contradicts it, the
whole node is forgotten. A node without costs borrows those of the nearest one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

SPEED_STEPS = 5  # the median of the last steps is the speed
TRIES = 7  # of a length; the median is its cost
CONTRADICTION = math.log(1.4)  # a try that differs by more shows that a cost is wrong; a seed is of another engine


def choose_batch_nodes(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes that have costs of their own: powers of two. Others belong to the nearest."""
    return tuple(min(1 << place, max_batch) for place in range(round(math.log2(max_batch)) + 1))


class RelativeCost:
    """A length's cost beside the other lengths of its node, as a logarithm. A seed has no tries."""

    def __init__(self, log_s: float) -> None:
        self.log_s = log_s
        self.tries: deque[float] = deque(maxlen=TRIES)

    def add_try(self, log_s: float) -> None:
        """Add the cost that a try found."""
        self.tries.append(log_s)
        self.log_s = statistics.median(self.tries)


class StepCosts:
    """Costs of the steps of one engine. Nodes are counted from 0: node i is batch size 2**i."""

    def __init__(self, max_batch: int, lengths: Sequence[int]) -> None:
        self.nodes = choose_batch_nodes(max_batch)
        self._lengths = tuple(lengths)
        self._node_of = [0, *(round(math.log2(batch)) for batch in range(1, max_batch + 1))]
        self._costs: list[dict[int, RelativeCost]] = [{} for _ in self.nodes]
        self._recent: list[deque[float]] = [deque(maxlen=SPEED_STEPS) for _ in self.nodes]

    def find_node(self, batch: int) -> int:
        """Return the node of a batch size."""
        return self._node_of[min(batch, len(self._node_of) - 1)]

    def count_tries(self, node: int, length: int) -> int:
        """Return the number of tries that a length's cost is known from; -1 if it is unknown at this node."""
        found = self._costs[node].get(length)
        return -1 if found is None else len(found.tries)

    def list_costs(self, node: int) -> dict[int, float]:
        """Return the known relative costs, by length: of this node, or of the nearest one that has any."""
        # Of two nodes that are equally near, the larger one: there, drafts cost more.
        near = min(
            (at for at, own in enumerate(self._costs) if own), key=lambda at: (abs(at - node), -at), default=None
        )
        known = {} if near is None else {k: self._costs[near][k].log_s for k in sorted(self._costs[near])}
        return dict(zip(known, map(math.exp, _make_monotonic(list(known.values()))), strict=True))

    def seconds_at(self, node: int, length: int) -> float | None:
        """Return the seconds of a step at the machine's present speed. None if the speed or the length is unknown."""
        cost = self.list_costs(node).get(length)
        return math.exp(self._speed(node)) * cost if cost is not None and self._recent[node] else None

    def _speed(self, node: int) -> float:
        return statistics.median(self._recent[node])

    def record_step(self, node: int, length: int, log_s: float) -> None:
        """Learn the machine's speed from a step of the length in use."""
        own = self._costs[node]
        if length in own or not own:
            self._recent[node].append(log_s - (own[length].log_s if own else 0.0))

    def record_try(self, node: int, used: int, tried: int, steps: Sequence[float]) -> float:
        """Learn the cost of a length from the logarithms of some steps. used: the length before and after.

        Returns by how much they contradict the known cost, as a logarithm.
        """
        if not self._recent[node]:
            return 0.0
        own = self._costs[node]
        if not own:  # its costs were borrowed
            own[used] = RelativeCost(0.0)
            own[used].add_try(0.0)
        found = statistics.median(steps) - self._speed(node)
        error = abs(found - own[tried].log_s) if tried in own else 0.0
        if error > CONTRADICTION and not own[tried].tries:
            self._costs[node] = own = {k: cost for k, cost in own.items() if cost.tries or k == used}
        own.setdefault(tried, RelativeCost(found)).add_try(found)
        return error

    def to_json(self) -> dict[str, Any]:
        """Serialise the costs, without those that are borrowed. null: unknown."""

        def seconds(node: int, length: int) -> float | None:
            return self.seconds_at(node, length) if length in self._costs[node] else None

        rows = {str(k): [seconds(node, k) for node in range(len(self.nodes))] for k in self._lengths}
        return {"nodes": list(self.nodes), "seconds": rows}

    def load_json(self, found: Any) -> bool:
        """Load what `to_json` returned, as seeds. Returns False, unchanged, if it is not a table of such an engine."""
        seeds: list[dict[int, RelativeCost]] = [{} for _ in self.nodes]
        try:
            fits = tuple(found["nodes"]) == self.nodes and {int(k) for k in found["seconds"]} <= {*self._lengths}
            for k, row in found["seconds"].items():
                for own, seconds in zip(seeds, row, strict=True):
                    if seconds is not None:
                        own[int(k)] = RelativeCost(math.log(seconds))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return False
        if not fits or not any(seeds) or not all(math.isfinite(cost.log_s) for own in seeds for cost in own.values()):
            return False
        self._costs = seeds
        self._recent = [deque([0.0] if own else [], SPEED_STEPS) for own in seeds]
        return True


def _make_monotonic(row: Sequence[float]) -> list[float]:
    """Make costs by ascending length monotonic, since a longer draft cannot cost less; what contradicts is averaged."""
    return [(max(row[: place + 1]) + min(row[place:])) / 2 for place in range(len(row))]
