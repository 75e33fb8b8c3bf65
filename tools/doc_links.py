"""Checks every internal link and anchor of the Markdown pages: `python -m tools.doc_links`.

A link's path must be a file or folder of the repository, and its fragment an anchor of that page, by GitHub's rule for
headings. Links to other sites are not followed. `make check` runs it; `tools/site.py` uses the same rules for the
documentation site.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+)[^\n]*\n.*?^(?P=indent)(?P=fence)[`~]*[ ]*$", re.M | re.S)
INDENTED = re.compile(r"(?:\A|\n\n)((?: {4}[^\n]*(?:\n|\Z)|\n(?= {4}))+)")
CODE = re.compile(r"(`+).*?(?<!`)\1(?!`)", re.S)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^(#{1,6}) +(.+?)(?: +#+)?$", re.M)
ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Link:
    """A link to another place. line: counted from 1."""

    page: Path
    line: int
    target: str

    @property
    def is_external(self) -> bool:
        return re.match(r"[a-z][a-z0-9+.-]*:", self.target) is not None


def find_links(page: Path) -> Iterator[Link]:
    """Yield the links of a page, without what looks like one in code."""
    text = blank_code(page.read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        yield Link(page, text.count("\n", 0, found.start()) + 1, found[1])


def blank_code(text: str) -> str:
    """Replace code blocks and code in sentences with spaces. Places of everything else stay."""

    def blank_match(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    text = FENCE.sub(blank_match, text)
    text = INDENTED.sub(blank_match, text)
    return CODE.sub(blank_match, text)


def list_anchors(text: str) -> list[str]:
    """List the anchors of a page's headings, in order, as GitHub names them."""
    text = INDENTED.sub("", FENCE.sub("", text))
    counts: dict[str, int] = {}
    anchors: list[str] = []
    for _, title in HEADING.findall(text):
        anchor = make_anchor(title)
        number = counts.get(anchor, 0)
        counts[anchor] = number + 1
        anchors.append(f"{anchor}-{number}" if number else anchor)
    return anchors


def make_anchor(title: str) -> str:
    """Name a heading's anchor: lower case, without punctuation, with hyphens for spaces."""
    title = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title)  # of a link, its text
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def find_problem(link: Link) -> str:
    """Say what is wrong with an internal link; "" if nothing is."""
    path, _, fragment = link.target.partition("#")
    target = (link.page.parent / unquote(path)).resolve() if path else link.page
    if not target.is_relative_to(ROOT):
        return "leads out of the repository"
    if not target.exists():
        return "does not exist"
    if not fragment:
        return ""
    if target.suffix != ".md":
        return "" if target.is_file() and re.fullmatch(r"L\d+(-L\d+)?", fragment) else "has an anchor, but is no page"
    text = target.read_text(encoding="utf-8")
    return "" if fragment in {*list_anchors(text), *ANCHOR.findall(text)} else f"has no heading #{fragment}"


def list_pages() -> list[Path]:
    """List the Markdown files that git knows, or would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    return [path for name in found.split("\0") if name and (path := ROOT / name).is_file()]


def find_problems(pages: Iterable[Path]) -> Iterator[str]:
    """Yield a line for every internal link that leads nowhere."""
    for page in pages:
        for link in find_links(page):
            problem = "" if link.is_external else find_problem(link)
            if problem:
                yield f"{page.relative_to(ROOT)}:{link.line}: {link.target} {problem}"


def main() -> int:
    problems = list(find_problems(list_pages()))
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
