"""Internal links of Markdown pages lead somewhere, and a wrong one is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import doc_links

OTHER = "# Title\n\n## A `code` & more\n\n## Twice\n\n## Twice\n\n    ## in code\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(doc_links, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text(OTHER)
    (tmp_path / "code.py").write_text("")
    return tmp_path


def problems(folder: Path, text: str) -> list[str]:
    page = folder / "docs" / "page.md"
    page.write_text(text)
    return list(doc_links.find_problems([page]))


def test_no_internal_link_leads_nowhere() -> None:
    pages = doc_links.list_pages()
    assert len([link for page in pages for link in doc_links.find_links(page)]) > 150
    assert list(doc_links.find_problems(pages)) == []


@pytest.mark.parametrize(
    "link",
    [
        "[a](other.md)", "[a](other.md#a-code--more)", "[a](other.md#twice-1)", "[a](../code.py)", "[a](../docs)",
        "[a](#here)", "![a](other.md)", "[a](https://example.org/missing)", "`[a](missing.md)`", "[a\nb](other.md)",
    ],
)  # fmt: skip
def test_a_right_link_is_accepted(link: str, folder: Path) -> None:
    assert problems(folder, f"# Here\n\n{link}\n\n```\n[a](missing.md)\n```\n") == []


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[a](missing.md)", "missing.md does not exist"),
        ("[a](other.md#in-code)", "has no heading #in-code"),
        ("[a](#there)", "has no heading #there"),
        ("![a](images/missing.png)", "does not exist"),
        ("[a](../../elsewhere)", "leads out of the repository"),
        ("[a](../code.py#part)", "is no page"),
    ],
)
def test_a_wrong_link_is_found_with_its_line(link: str, problem: str, folder: Path) -> None:
    (found,) = problems(folder, f"# Here\n\ntext\n{link}\n")
    assert found.startswith("docs/page.md:4: ")
    assert problem in found
