"""Rounds measured figures for readers. Pure."""

from __future__ import annotations

from typing import overload

DIGITS = 7
"""Significant digits of float32, in which rewards are. Further ones are rounding errors: 0.2 would be 0.200000003."""


@overload
def round_figure(value: float) -> float: ...
@overload
def round_figure(value: float | None) -> float | None: ...
def round_figure(value: float | None) -> float | None:
    """Round to DIGITS significant digits. None stays None."""
    return None if value is None else float(f"{value:.{DIGITS}g}")
