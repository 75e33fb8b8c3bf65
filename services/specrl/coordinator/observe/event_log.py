"""Keeps the newest events of the coordinator's log in memory, for the live page.

The log itself is the complete record. An event appears here when it is logged at `info` or above and
`telemetry.logLevel` lets it through. Like the log, it never holds a prompt or a completion. Events that every replica
causes at every step are left out: 64 replicas would push out all others within a minute.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from specrl.formats.reports import ReportModel

EVENTS_KEPT = 500
"""A few hours of an ordinary run, in 200 KB."""
LONGEST_FACT = 300
"""Most characters of one field that are shown. The log has the full value."""
SHOWN_LEVELS = ("info", "warning", "error", "critical")
# These happen to every replica at every step. Transitions with a reason are not routine.
ROUTINE = ("canary_agreed",)
ROUTINE_MOVES = (("serving", "updating"), ("updating", "serving"))


class LoggedEvent(ReportModel):
    """One logged event."""

    id: int
    """Counts from 1 at each start of the coordinator."""
    at_s: float
    """Unix seconds."""
    level: str
    """info, warning, error or critical."""
    name: str
    """As in the log, for example replica_state_changed."""
    facts: dict[str, str | int | float | bool | None]
    """The fields of the log event."""


class EventLog:
    """The newest EVENTS_KEPT events.

    boot: identifies this start of the coordinator. Event ids are comparable only within one start.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[LoggedEvent] = deque(maxlen=EVENTS_KEPT)
        self._count = 0
        self.boot = secrets.token_hex(4)

    def add_event(self, level: str, name: str, facts: Mapping[str, Any]) -> None:
        """Add an event, unless it is below `info` or routine."""
        if level in SHOWN_LEVELS and not _is_routine(name, facts):
            self._count += 1
            shown = {key: _shorten_value(value) for key, value in facts.items()}
            self._events.append(LoggedEvent(id=self._count, at_s=self._clock(), level=level, name=name, facts=shown))

    def list_after(self, event_id: int, limit: int = EVENTS_KEPT) -> list[LoggedEvent]:
        """Return the first `limit` kept events with ids > `event_id`, ascending."""
        return [event for event in self._events if event.id > event_id][:limit]


def _is_routine(name: str, facts: Mapping[str, Any]) -> bool:
    # A transition with a reason was not planned, so it is shown.
    is_planned = name == "replica_state_changed" and (facts.get("before"), facts.get("after")) in ROUTINE_MOVES
    return name in ROUTINE or (is_planned and not facts.get("reason"))


def _shorten_value(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= LONGEST_FACT else text[: LONGEST_FACT - 3] + "..."
