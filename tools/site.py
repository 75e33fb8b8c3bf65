"""Makes the documentation site from README.md, CONTRIBUTING.md, SECURITY.md and docs/: `make docs`.

    python -m tools.site stage    write Zensical's input to build/
    python -m tools.site check    fail if a page of build/site would load anything from another machine

The pages are those that GitHub shows. Staging makes up for what differs between the two:
- README.md becomes index.md, and links are changed accordingly
- a link to a file outside of docs/ leads to a copy of it as text
- a link to a folder leads to its first page, or becomes text where it has none
- every heading gets the anchor that GitHub gives it (`doc_links.make_anchor`)
- api.md lists the names of python-api.md, for mkdocstrings to describe
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from tools import doc_links
from tools.doc_links import ROOT

BUILD = ROOT / "build"
PAGES = BUILD / "docs"
SITE = BUILD / "site"
SOURCES = "files"  # folder of the site for copies of files outside docs/
NAVIGATION = {
    "Start": [
        *("index.md", "install.md", "first-run.md", "coming-from.md", "live-page.md", "report.md", "serving.md"),
        "scripting.md",
    ],
    "Tasks": ["hub.md", "data.md", "rewards.md", "tools.md", "python-api.md", "sandbox.md", "sft.md"],
    "Methods": [
        *("losses.md", "models.md", "speculation.md", "policy-versions.md", "trainer-layouts.md", "simulator.md"),
        "measured.md",
    ],
    "Kubernetes": ["deploy.md", "release.md", "rljob.md", "operator.md", "alerts.md", "cluster-findings.md"],
    "Operation": [
        *("checkpoints.md", "store.md", "traces.md", "runbook.md", "failures.md", "security.md", "attacks.md"),
    ],
    "Reference": ["run-file.md", "api.md", "metrics.md", "logs.md", "errors.md", "commands.md"],
    "Development": [
        *("contributing.md", "architecture.md", "promises.md", "extending.md", "testing.md", "e2e.md"),
        *("cluster-tier.md", "cluster-log.md", "chaos.md"),
        "reported-cases.md",
        "seams.md",
        "gpu.md",
    ],
}
"""Pages of each section. A page that is not listed here follows under Development."""
SETTINGS = """\
[project]
site_name = "specrl"
site_description = "Reinforcement-learning post-training of language models with lossless speculative rollouts"
docs_dir = "docs"
site_dir = "site"
use_directory_urls = false # the pages can be read without a server; search needs one
nav = {navigation}

[project.theme]
font = false # a font would come from Google
features = ["content.code.copy", "navigation.sections", "navigation.top", "search.highlight", "toc.follow"]

[project.markdown_extensions.attr_list]
[project.markdown_extensions.tables]
[project.markdown_extensions.toc]
permalink = true
[project.markdown_extensions.pymdownx.highlight]
[project.markdown_extensions.pymdownx.inlinehilite]
[project.markdown_extensions.pymdownx.superfences]

[project.plugins.search]
[project.plugins.mkdocstrings.handlers.python]
paths = ["../services"]

[project.plugins.mkdocstrings.handlers.python.options]
show_source = false
show_root_heading = true
show_root_full_path = true
show_bases = false
show_signature_annotations = true
separate_signature = true
heading_level = 2
"""
LOADING = {
    "script": "src", "img": "src", "iframe": "src", "audio": "src", "video": "src", "source": "src", "embed": "src",
    "object": "data", "link": "href",
}  # fmt: skip
"""Attributes whose address a browser loads by itself."""
FOLLOWED = {"canonical", "next", "prev", "alternate", "author", "license"}
"""Kinds of <link> that are not loaded."""


def stage_pages() -> None:
    """Write pages, images, copies of linked files and Zensical's settings to build/."""
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "images", PAGES / "images")
    names = {
        ROOT / "README.md": "index.md",
        ROOT / "CONTRIBUTING.md": "contributing.md",
        ROOT / "SECURITY.md": "security.md",
    }
    names |= {page: str(page.relative_to(ROOT / "docs")) for page in sorted((ROOT / "docs").rglob("*.md"))}
    for page, name in names.items():
        target = PAGES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_stage_page(page, name, names), encoding="utf-8")
    (PAGES / "api.md").write_text(_list_names(), encoding="utf-8")
    navigation = list_navigation({str(page.relative_to(PAGES)) for page in PAGES.rglob("*.md")})
    settings = SETTINGS.format(navigation=_write_toml(navigation))
    (BUILD / "zensical.toml").write_text(settings, encoding="utf-8")


def list_navigation(pages: set[str]) -> dict[str, list[str]]:
    """Sort the pages into sections: those of NAVIGATION that exist, all others, and the decisions."""
    sections = {title: [name for name in names if name in pages] for title, names in NAVIGATION.items()}
    rest = sorted(pages - {name for names in sections.values() for name in names})
    sections["Development"] += [name for name in rest if not name.startswith("decisions/")]
    sections["Decisions"] = [name for name in rest if name.startswith("decisions/")]
    return sections


def _write_toml(navigation: dict[str, list[str]]) -> str:
    return (
        "[" + ", ".join(f"{{{json.dumps(title)} = {json.dumps(names)}}}" for title, names in navigation.items()) + "]"
    )


def _stage_page(page: Path, name: str, names: dict[Path, str]) -> str:
    """Return the page's text with links and anchors of the site. name: of the page in the site."""
    text = page.read_text(encoding="utf-8")
    blank = doc_links.blank_code(text)
    up = "../" * name.count("/")
    edits: list[tuple[int, int, str]] = []
    for found in doc_links.LINK.finditer(blank):
        link = doc_links.Link(page, 0, found[1])
        path, _, fragment = link.target.partition("#")
        if link.is_external or not path:
            continue
        target = (page.parent / path).resolve()
        if target.is_dir() and (inside := sorted(other for other in names if target in other.parents)):
            target = inside[0]  # the site has no pages for folders
        if target in names:
            edits.append((found.start(1), found.end(1), up + names[target] + (f"#{fragment}" if fragment else "")))
        elif target.is_relative_to(ROOT / "docs"):
            edits.append((found.start(1), found.end(1), up + str(target.relative_to(ROOT / "docs"))))
        elif target.is_file():
            edits.append((found.start(1), found.end(1), up + _copy_source(target)))
        else:
            label = text[found.start() : found.end()].partition("](")[0].removeprefix("[")
            edits.append((found.start(), found.end(), label))
    anchors = iter(doc_links.list_anchors(text))
    headings = (found.end() for found in doc_links.HEADING.finditer(blank))
    edits += [(end, end, f" {{ #{next(anchors)} }}") for end in headings]
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return _separate_lists(text)


def _copy_source(file: Path) -> str:
    """Copy a file as text, which a browser shows; returns its place in the site."""
    place = f"{SOURCES}/{file.relative_to(ROOT)}.txt"
    (PAGES / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, PAGES / place)
    return place


def _separate_lists(text: str) -> str:
    """Put an empty line before each list. GitHub needs none, Python-Markdown does."""
    return re.sub(r"(?m)^(?![ ]*[-*] |[ ]*\d+\. |#|\||[ ]{2,})(\S.*)\n(?=(?:[-*]|\d+\.) )", r"\1\n\n", text)


def _list_names() -> str:
    """Write api.md: the names that users may import, for mkdocstrings."""
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `(specrl\.[\w.]+)` \|", page, re.MULTILINE)
    head = "# Names that you may import\n\nHow to use them: [Python API](python-api.md).\n\n"
    return head + "\n\n".join(f"::: {name}" for name in names) + "\n"


class _LoadedAddresses(HTMLParser):
    """Collects the addresses that a browser loads when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and FOLLOWED & set(given.get("rel", "").split()):
            return
        self.found += [given[name] for name in (LOADING.get(tag, ""),) if name in given]
        self.found += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        self.found += _list_styled(given.get("style", ""))


def _list_styled(css: str) -> list[str]:
    """List the addresses that a style sheet loads."""
    return re.findall(r"url\(\s*[\"']?([^\"')]+)", css) + re.findall(r"@import\s+[\"']([^\"']+)", css)


def find_requests(site: Path) -> Iterator[str]:
    """Yield a line for everything that a page or style sheet of the site would load from another machine."""
    for file in sorted(site.rglob("*")):
        if file.suffix == ".html":
            parser = _LoadedAddresses()
            parser.feed(file.read_text(encoding="utf-8"))
            found = parser.found
        elif file.suffix == ".css":
            found = _list_styled(file.read_text(encoding="utf-8"))
        else:
            continue
        yield from (f"{file.relative_to(site)} loads {at}" for at in found if re.match(r"(https?:)?//", at.strip()))


def main() -> int:
    if sys.argv[1:] == ["stage"]:
        stage_pages()
        return 0
    if not (SITE / "index.html").is_file():
        print(f"{SITE} has no index.html; run `make docs`", file=sys.stderr)
        return 1
    problems = list(find_requests(SITE))
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    if not problems:
        print("the site is in build/site; `python3 -m http.server -d build/site` serves it, with search")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
