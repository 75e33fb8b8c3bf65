"""A document as one HTML file without any request, and as Markdown. Texts of others are escaped in both."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from specrl.errors import RunInvalid
from specrl.report.document import Document

PAGES = (".html", ".md")
_SPECIAL = re.compile(r"([\\`*_|<>\[\]])")


def html(document: Document) -> str:
    return _environment().get_template("report.html.j2").render(document=document, style=_style())


def markdown(document: Document) -> str:
    text = _environment().get_template("report.md.j2").render(document=document)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def write(document: Document, out: Path, name: str = "report") -> list[Path]:
    """Write both pages: into a folder as NAME.html and NAME.md, or beside a file that is named. Raises RunInvalid."""
    base = out.with_suffix("") if out.suffix in PAGES else out / name
    pages = {base.with_suffix(".html"): html(document), base.with_suffix(".md"): markdown(document)}
    if out.suffix not in PAGES and out.is_file():
        raise RunInvalid(f"--out must be a folder, or a file that ends in .html or .md, got {out}; name one of these")
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for path, content in pages.items():
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise RunInvalid(f"--out must be writable, got {out}: {error.strerror}; name another") from error
    return list(pages)


@lru_cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("specrl.report"),
        autoescape=select_autoescape([".html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["drawn"] = Markup  # of charts.py, which escapes what it is given
    made.filters["plain"] = _plain
    return made


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _style() -> Markup:
    return Markup(_environment().get_template("report.css").render())  # noqa: S704 - our own file, without values
