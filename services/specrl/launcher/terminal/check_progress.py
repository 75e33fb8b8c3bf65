"""Shows in a view how far fetching is, and the check of references, once that takes longer than a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specrl.hub.fetching import FetchDisplay
from specrl.launcher.terminal.view import View

# A check that ends sooner is not shown.
FIRST_UPDATE_S = 1.0


class CheckProgress:
    """Callback for the reference check. It updates the view at most once per `view.check_every_s` seconds."""

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._clock = clock
        self._due: float | None = None

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._due is None:
            self._due = now + FIRST_UPDATE_S
        if now >= self._due:
            self._view.show_check_progress(done, total)
            self._due = now + self._view.check_every_s


@contextmanager
def open_fetch_display(view: View) -> Iterator[FetchDisplay]:
    """Yield a display of fetching in a view, and close the view at the end."""
    try:
        yield FetchDisplay(view.show_fetch_progress, view.check_every_s)
    finally:
        view.close()
