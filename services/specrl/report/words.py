"""Figures in words: so many digits as are meant, and a dash where there is none."""

from __future__ import annotations

NOTHING = "-"


def number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """One digit below ten percent, where it matters."""
    return f"{share * 100:.1f} %" if share < 0.0995 else f"{share * 100:.0f} %"


def seconds(value: float) -> str:
    """Three digits or so, in the unit that people would use."""
    if value >= 7200:
        return f"{value / 3600:.1f} h"
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.0f} s" if value >= 99.5 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def interval(low: float, high: float) -> str:
    return f"{low:.3f} to {high:.3f}"
