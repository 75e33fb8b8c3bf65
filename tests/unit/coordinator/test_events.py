"""The live log: what the coordinator logs, its end alone."""

from __future__ import annotations

import structlog

from specrl.coordinator.events import EVENTS_KEPT, LONGEST_FACT, EventLog
from specrl.telemetry import logs


def test_events_are_numbered_and_asked_for_after_a_number() -> None:
    log = EventLog(clock=lambda: 7.0)
    for name in ("run_paused", "run_resumed", "trainer_lost"):
        log.note("info", name, {"step": 3})
    assert [(it.id, it.name, it.at_s, it.facts) for it in log.after(1, 1)] == [(2, "run_resumed", 7.0, {"step": 3})]


def test_only_the_newest_are_kept_and_long_facts_are_cut() -> None:
    log = EventLog()
    for number in range(EVENTS_KEPT + 5):
        log.note("warning", "transfer_repeated", {"reason": "x" * 1000, "attempt": number})
    kept = log.after(0)
    assert (len(kept), kept[0].id) == (EVENTS_KEPT, 6)
    assert len(str(kept[0].facts["reason"])) == LONGEST_FACT


def test_debug_is_never_kept_and_routine_neither() -> None:
    log = EventLog()
    log.note("debug", "completion", {"text": "secret"})
    log.note("info", "canary_agreed", {"replica": "gen-0"})
    log.note("info", "replica_moved", {"before": "serving", "after": "updating", "reason": ""})
    log.note("warning", "replica_moved", {"before": "updating", "after": "suspect", "reason": "no heartbeat"})
    assert [event.facts["after"] for event in log.after(0)] == ["suspect"]


def test_what_is_logged_is_what_is_shown() -> None:
    log, before = EventLog(), structlog.get_config()
    try:
        logs.configure("info", "coordinator", "demo", log.note)
        structlog.get_logger("x").info("run_scaled", replicas=3, place=("a", 1))
        structlog.get_logger("x").debug("run_unscaled")
    finally:
        structlog.contextvars.clear_contextvars()
        structlog.configure(**before)
    assert [(it.level, it.name, it.facts) for it in log.after(0)] == [
        ("info", "run_scaled", {"replicas": 3, "place": "('a', 1)"})
    ]
