"""What a report consists of, whichever way it is rendered: sections of text, tables and charts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """The first column names the row; the others are right-aligned figures, or text with `is_text`."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    accent: int | None = None
    """Row that the report is about."""
    is_text: bool = False
    is_folded: bool = False
    """Opened by readers who want it: the numbers behind a chart."""


@dataclass(frozen=True)
class Chart:
    """svg: inline, with its own alternative text, which Markdown shows in its place. key: (style, name) of parts."""

    caption: str
    svg: str
    alternative: str
    key: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Section:
    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True)
class Document:
    """headline: the figures to see first, as (value, what it is); notices: what to know before any figure."""

    title: str
    subtitle: str
    headline: tuple[tuple[str, str], ...]
    notices: tuple[str, ...]
    sections: tuple[Section, ...]
