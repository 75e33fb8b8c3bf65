"""How far the check of references is, for the terminal: nothing while it is quick, then at a pace that can be read."""

from __future__ import annotations

import time
from collections.abc import Callable

from specrl.launcher.view import View

QUIET_S = 1.0
"""A check that is over by then is not spoken of."""


class CheckProgress:
    """Tells a view, at most once in `view.check_every_s`. Called for every few references."""

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._view, self._clock = view, clock
        self._due: float | None = None

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._due is None:
            self._due = now + QUIET_S
        if now >= self._due:
            self._view.check(done, total)
            self._due = now + self._view.check_every_s
