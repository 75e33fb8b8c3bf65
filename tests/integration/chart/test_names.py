"""What the chart's texts and the docs name exists: values, files, dashboards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.chart.rendering import CHART, ROOT

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
TITLES = {json.loads(path.read_text())["title"] for path in (CHART / "files" / "dashboards").glob("*.json")}
TEXTS = [
    *sorted(CHART.glob("values*.yaml")),
    CHART / "README.md",
    *(CHART / "templates" / name for name in ("NOTES.txt", "_validation.tpl")),
]
DOCS = sorted((ROOT / "docs").glob("*.md"))
SET = re.compile(r"(?:--set[ =]|\\\n\s+--set[ =])(?P<settings>[^\s`]+)")
NAMED = re.compile(rf"\b(?P<path>(?:{'|'.join(VALUES)})(?:\.[A-Za-z]+)+)")
"""A path of a value in a text: one of the chart's sections, and at least one key."""


def has_value(path: str) -> bool:
    found: Any = VALUES
    for key in path.split("."):
        if not isinstance(found, Mapping) or (found and key not in found):
            return False
        if not found:  # a map of the user's, such as labels
            return True
        found = found[key]
    return True


def keys_set(text: str) -> Iterator[str]:
    for match in SET.finditer(text):
        for setting in re.sub(r"\{[^}]*\}", "", match["settings"]).split(","):
            yield re.split(r"[=\[\\]", setting.strip("\"'"))[0]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_files_that_the_charts_texts_name_are_there(text: Path) -> None:
    names = re.findall(r"\b(?:docs|deploy|examples)/[\w./-]+\.(?:md|yaml|json)", text.read_text(encoding="utf-8"))
    assert not [name for name in names if not (ROOT / name).exists()]
    inside = re.findall(r"(?<![\w/])(?:files|templates)/[\w./-]+\.(?:tpl|yaml|txt)", text.read_text(encoding="utf-8"))
    assert not [name for name in inside if not (CHART / name).exists()]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_values_that_the_charts_texts_name_are_there(text: Path) -> None:
    found = re.sub(r"\.Values\.", "", text.read_text(encoding="utf-8"))
    paths = {match["path"] for match in NAMED.finditer(found)}
    paths = {path for path in paths if not path.endswith((".md", ".yaml", ".json"))}
    assert not [path for path in paths if not has_value(path)]


@pytest.mark.parametrize("text", DOCS, ids=lambda path: path.stem)
def test_values_that_docs_set_are_there(text: Path) -> None:
    """Options of `specrl run --set` are fields of run files; the chart's are in commands of helm on it."""
    commands = re.split(r"\n(?!\s{4}) | \n\s{4}(?=helm\ )", text.read_text(encoding="utf-8"), flags=re.VERBOSE)
    commands = [command for command in commands if re.search(r"helm \w+ specrl\b", command)]
    assert not [key for command in commands for key in keys_set(command) if not has_value(key)]


def test_dashboards_that_notes_and_docs_name_are_there() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    named = set(re.findall(r"\*(specrl / [A-Z][\w -]*)\*", notes))
    assert named
    assert named <= TITLES
    section = (ROOT / "docs" / "deploy.md").read_text().partition("## Dashboards and alerts")[2].partition("\n## ")[0]
    listed = {f"specrl / {title}" for title in re.findall(r"\*([A-Z][\w -]*)\*", section)}
    assert listed == TITLES


def test_a_name_that_does_not_exist_is_found() -> None:
    assert has_value("images.registry")
    assert has_value("commonLabels.team")
    assert not has_value("images.registri")
    assert list(keys_set("helm upgrade --set images.registri=a,valkey.enabled=true")) == [
        "images.registri",
        "valkey.enabled",
    ]
