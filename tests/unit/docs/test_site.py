"""The documentation site: its pages are staged with right links and anchors, and a request to another machine is found.

The build itself needs Zensical: `make docs`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tools import doc_links, site


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the staged pages and the settings."""
    folder = tmp_path_factory.mktemp("build")
    with pytest.MonkeyPatch.context() as patch:
        for name, path in (("BUILD", folder), ("PAGES", folder / "docs"), ("SITE", folder / "site")):
            patch.setattr(site, name, path)
        site.stage_pages()
    return folder


def test_every_page_is_staged_and_in_the_navigation_once(staged: Path) -> None:
    settings = tomllib.loads((staged / "zensical.toml").read_text(encoding="utf-8"))["project"]
    listed = [name for section in settings["nav"] for names in section.values() for name in names]
    pages = sorted(str(page.relative_to(staged / "docs")) for page in (staged / "docs").rglob("*.md"))
    assert sorted(listed) == pages
    assert listed[0] == "index.md"
    assert {"api.md", "contributing.md", "sft.md"} <= set(pages)
    assert settings["theme"]["font"] is False, "a font would come from another machine"


def test_every_link_of_a_staged_page_leads_to_a_file_and_an_anchor_of_the_site(staged: Path) -> None:
    wrong = []
    for page in (staged / "docs").rglob("*.md"):
        for link in doc_links.find_links(page):
            if link.is_external:
                continue
            path, _, fragment = link.target.partition("#")
            target = page.parent / path if path else page
            is_right = target.is_file()
            if is_right and fragment:
                is_right = f"{{ #{fragment} }}" in target.read_text(encoding="utf-8")
            if not is_right:
                wrong.append(f"{page.name}: {link.target}")
    assert not wrong


def test_the_api_page_has_the_names_that_users_may_import(staged: Path) -> None:
    assert "\n::: specrl.rewards.Ungraded\n" in (staged / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example.org/a.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example.org/css">'),
        ("a.html", '<link rel="preconnect" href="https://fonts.example.org">'),
        ("a.html", '<img src="http://example.org/a.png">'),
        ("a.html", '<img srcset="a.png 1x, https://example.org/b.png 2x">'),
        ("a.html", '<p style="background: url(https://example.org/b.png)">'),
        ("a.css", '@import "https://example.org/b.css";'),
        ("a.css", "@font-face { src: url(https://example.org/b.woff2) }"),
    ],
)
def test_what_would_be_loaded_from_another_machine_is_found(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (found,) = site.find_requests(tmp_path)
    assert found.startswith(f"{name} loads ")


def test_links_that_a_reader_follows_are_no_requests(tmp_path: Path) -> None:
    text = '<a href="https://example.org">x</a><link rel="canonical" href="https://example.org"><img src="a.png">'
    (tmp_path / "a.html").write_text(text)
    assert list(site.find_requests(tmp_path)) == []


def test_the_lock_of_the_site_is_what_pyproject_asks_for() -> None:
    project = tomllib.loads((site.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = (site.ROOT / "requirements" / "docs.in").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == project["dependency-groups"]["docs"]
