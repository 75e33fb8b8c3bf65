"""By which step a group must be trained: the one thing in which the orders differ.

Every group has a deadline: the last step that may train it. The scheduler starts no rollout that its group's deadline
would be too late for, and never takes on more deadlines than steps can keep; so a deadline is kept by construction,
and with it the lag bound. What is left to an order is where deadlines come from:

    InOrder     a group's deadline is its own step, from the beginning. A step trains exactly its own groups.
    Windowed    a group has none until its first rollout starts; then it is the last step that the oldest of its
                rollouts may be trained at. A step takes what is finished, the nearest deadlines first, and waits for
                a group only when it is due. With maxPolicyLag 0 every group is due at once, and both are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol

from specrl.spec.run import Order

NEVER = sys.maxsize
"""The deadline of a group that may be trained at any step."""


class Deadlines(Protocol):
    """Where a group's deadline comes from."""

    def of(self, own_step: int, latest: Iterable[int]) -> int:
        """The last step that may train a group.

        own_step: the step that its place in the stream belongs to.
        latest: for each of its rollouts that is under way or finished, the last step that may train that one.
        """


class InOrder:
    """The deadline is the group's own step, whatever has started."""

    def of(self, own_step: int, latest: Iterable[int]) -> int:
        return own_step


class Windowed:
    """The deadline is that of the oldest rollout."""

    def of(self, own_step: int, latest: Iterable[int]) -> int:
        return min(latest, default=NEVER)


def deadlines(order: Order) -> Deadlines:
    """The deadlines of the order that the run file names."""
    return Windowed() if order is Order.WINDOWED else InOrder()
