"""The content of a report, independent of its rendering: sections with text, tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReportTable:
    """A table. The first column names each row. The others are right-aligned figures, or text with `is_text`."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    accent: int | None = None
    """Index of the row to highlight."""
    is_text: bool = False
    is_folded: bool = False
    """Collapsed until the reader opens it, for example the data of a chart."""


@dataclass(frozen=True)
class ReportChart:
    """A chart.

    svg: inline SVG. alternative: text for screen readers, which Markdown shows in place of the chart.
    key: (style, name) of each part, for the legend.
    """

    caption: str
    svg: str
    alternative: str
    key: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class ReportSection:
    """One section of a report, rendered in the order of its fields."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[ReportTable] = ()
    charts: Sequence[ReportChart] = ()


@dataclass(frozen=True)
class ReportDocument:
    """A whole report.

    headline: the most important figures, as (value, meaning). notices: warnings to read before any figure.
    """

    title: str
    subtitle: str
    headline: Sequence[tuple[str, str]]
    notices: Sequence[str]
    sections: Sequence[ReportSection]
