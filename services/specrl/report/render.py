"""Renders a document as one self-contained HTML file and as Markdown. Both escape all text of the run."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from specrl.errors import RunInvalid
from specrl.report.document import ReportDocument

PAGES = (".html", ".md")
# Characters that may begin code, emphasis, a cell, a tag or a link in Markdown.
_SPECIAL = re.compile(r"([\\`*_|<>\[\]])")


def render_html(document: ReportDocument) -> str:
    """Render a document as one HTML file that needs no other file."""
    return _make_environment().get_template("report.html.j2").render(document=document, style=_render_style())


def render_markdown(document: ReportDocument) -> str:
    """Render a document as Markdown, with the alternative texts in place of charts."""
    text = _make_environment().get_template("report.md.j2").render(document=document)
    # Loops and conditions of the template leave blank lines.
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def write_pages(document: ReportDocument, out: Path, name: str = "report") -> list[Path]:
    """Write both pages and return their paths. Raises RunInvalid.

    out: a folder, which gets NAME.html and NAME.md; or a file that ends in .html or .md, with the other one beside it.
    """
    base = out.with_suffix("") if out.suffix in PAGES else out / name
    # The suffix is appended: the name of a run or file may have dots of its own.
    pages = {Path(f"{base}.html"): render_html(document), Path(f"{base}.md"): render_markdown(document)}
    if out.suffix not in PAGES and out.is_file():
        raise RunInvalid(f"--out must be a folder, or a file that ends in .html or .md, got {out}; choose one of these")
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for path, content in pages.items():
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise RunInvalid(f"--out must be writable, got {out}: {error.strerror}; choose another path") from error
    return list(pages)


@lru_cache
def _make_environment() -> Environment:
    made = Environment(
        loader=PackageLoader("specrl.report"),
        autoescape=select_autoescape([".html.j2"]),  # Markdown is escaped by the filter `plain`
        undefined=StrictUndefined,  # a misspelt name raises instead of leaving a gap
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["drawn"] = Markup  # marks SVG as safe: charts.py escapes all text in it
    made.filters["plain"] = _escape_markdown
    return made


def _escape_markdown(text: str) -> str:
    """Escape text for Markdown and put it on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _render_style() -> Markup:
    return Markup(_make_environment().get_template("report.css").render())  # noqa: S704 - a file of this package, without values of the run
