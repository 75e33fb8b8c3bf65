"""The newest events of a run, for the live page: what the coordinator logs, kept in memory and bounded.

The log is the record; this is its end, while the process lives. So an event is shown when it is logged, at `info` and
above and as far as telemetry.logLevel lets it through, and it never holds a prompt or a completion. What happens to
every replica at every step is left out: 64 of them would push all else out within a minute.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from specrl.coordinator.report import Report

EVENTS_KEPT = 500
"""A few hours of an ordinary run, and 200 KB."""
LONGEST_FACT = 300
"""Letters of one fact that are shown; the log has the rest."""
SHOWN_LEVELS = ("info", "warning", "error", "critical")
ROUTINE = ("canary_agreed",)
ROUTINE_MOVES = (("serving", "updating"), ("updating", "serving"))


class Event(Report):
    """Something that happened."""

    id: int
    """Counts up from 1 at each start of the coordinator."""
    at_s: float
    """Unix seconds."""
    level: str
    """info, warning, error or critical."""
    name: str
    """In the past tense, as in the log: replica_moved."""
    facts: dict[str, str | int | float | bool | None]


class EventLog:
    """The last EVENTS_KEPT events. `boot` names this start of the coordinator: ids of another mean nothing here."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._count = 0
        self.boot = secrets.token_hex(4)

    def note(self, level: str, name: str, facts: Mapping[str, Any]) -> None:
        """Keep an event, unless it is below info or routine."""
        if level in SHOWN_LEVELS and not _is_routine(name, facts):
            self._count += 1
            shown = {key: _shown(value) for key, value in facts.items()}
            self._events.append(Event(id=self._count, at_s=self._clock(), level=level, name=name, facts=shown))

    def after(self, event_id: int, limit: int = EVENTS_KEPT) -> list[Event]:
        """The first `limit` kept events with larger ids, ascending."""
        return [event for event in self._events if event.id > event_id][:limit]


def _is_routine(name: str, facts: Mapping[str, Any]) -> bool:
    is_planned = name == "replica_moved" and (facts.get("before"), facts.get("after")) in ROUTINE_MOVES
    return name in ROUTINE or (is_planned and not facts.get("reason"))


def _shown(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= LONGEST_FACT else text[: LONGEST_FACT - 3] + "..."
