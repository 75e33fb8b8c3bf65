"""Writes durations for people. Used by the coordinator's phases and by the terminal."""

from __future__ import annotations


def format_duration(seconds: float) -> str:
    """Format a duration as in `45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
