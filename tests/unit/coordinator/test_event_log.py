"""The live page's events: the newest log events, without routine ones."""

from __future__ import annotations

import structlog

from specrl.coordinator.observe.event_log import EVENTS_KEPT, LONGEST_FACT, EventLog
from specrl.telemetry import logs


def test_events_are_numbered_and_listed_after_a_given_number() -> None:
    log = EventLog(clock=lambda: 7.0)
    for name in ("run_paused", "run_resumed", "trainer_lost"):
        log.add_event("info", name, {"step": 3})
    assert [(it.id, it.name, it.at_s, it.facts) for it in log.list_after(1, 1)] == [
        (2, "run_resumed", 7.0, {"step": 3})
    ]


def test_only_the_newest_events_are_kept_and_long_values_are_cut() -> None:
    log = EventLog()
    for number in range(EVENTS_KEPT + 5):
        log.add_event("warning", "transfer_repeated", {"reason": "x" * 1000, "attempt": number})
    kept = log.list_after(0)
    assert (len(kept), kept[0].id) == (EVENTS_KEPT, 6)
    assert len(str(kept[0].facts["reason"])) == LONGEST_FACT


def test_debug_and_routine_events_are_not_kept() -> None:
    log = EventLog()
    log.add_event("debug", "completion", {"text": "secret"})
    log.add_event("info", "canary_agreed", {"replica": "gen-0"})
    log.add_event("info", "replica_state_changed", {"before": "serving", "after": "updating", "reason": ""})
    log.add_event(
        "warning", "replica_state_changed", {"before": "updating", "after": "suspect", "reason": "no heartbeat"}
    )
    assert [event.facts["after"] for event in log.list_after(0)] == ["suspect"]


def test_every_logged_event_is_shown() -> None:
    log = EventLog()
    before = structlog.get_config()
    try:
        logs.configure_logging("info", "coordinator", "demo", log.add_event)
        structlog.get_logger("x").info("run_scaled", replicas=3, place=("a", 1))
        structlog.get_logger("x").debug("run_unscaled")
    finally:
        structlog.contextvars.clear_contextvars()
        structlog.configure(**before)
    assert [(it.level, it.name, it.facts) for it in log.list_after(0)] == [
        ("info", "run_scaled", {"replicas": 3, "place": "('a', 1)"})
    ]
