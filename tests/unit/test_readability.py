"""The documents have short sentences. Pages with few sentences, such as generated tables, are not measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.readability import measure_page, split_sentences

ROOT = Path(__file__).parents[2]


READ_FIRST = ("README.md", "docs/architecture.md", "docs/failures.md")
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    found = measure_page((ROOT / page).read_text(encoding="utf-8"))
    if found.sentences > 15:
        assert found.mean_words <= 15
        assert found.short_share >= (0.9 if page in READ_FIRST else 0.85)
    else:
        assert page not in READ_FIRST


def test_tables_code_and_headings_are_no_sentences() -> None:
    page = """# A heading

First of two. See [the page](page.md), and `some code here`!

    code in a block

- **Lead.** An item of
  two lines.

| a | table |

```python
print("code")
```
"""
    assert split_sentences(page) == ["First of two.", "See the page, and code!", "An item of two lines."]
