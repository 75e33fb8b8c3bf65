"""Formats figures with meaningful digits only. A missing figure is a dash."""

from __future__ import annotations

NOTHING = "-"


def format_number(value: float | None, digits: int) -> str:
    """Format a number with `digits` decimals and thousands separators."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def format_percent(share: float) -> str:
    """Format a share of 0 to 1 as percent, with one decimal below 10 %."""
    # 0.0995 and not 0.1: 9.95 % and above would be rounded to 10.0 %.
    return f"{share * 100:.1f} %" if share < 0.0995 else f"{share * 100:.0f} %"


def format_seconds(value: float) -> str:
    """Format seconds with about three digits, as seconds, minutes or hours."""
    if value >= 7200:
        return f"{value / 3600:.1f} h"
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.0f} s" if value >= 99.5 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def format_times(ratio: float) -> str:
    """Format a ratio: `1.43x`."""
    return f"{ratio:.2f}x"


def format_interval(low: float, high: float) -> str:
    """Format an interval of rewards: `0.250 to 0.750`."""
    return f"{low:.3f} to {high:.3f}"
