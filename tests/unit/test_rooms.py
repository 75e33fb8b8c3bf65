"""Folders stay small, and imports between the folders of a package point one way."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tools.import_graph import PackageGraph, measure_roots

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAME = re.compile(r"`([^`]+)`")
MAX_MODULES = 12


def read_contracts() -> list[dict[str, Any]]:
    """The contracts of import-linter."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return contracts


@pytest.fixture(scope="module")
def packages() -> list[PackageGraph]:
    return list(measure_roots([ROOT / "services", ROOT / "operators"]))


def test_no_folder_holds_more_than_twelve_modules(packages: list[PackageGraph]) -> None:
    assert [package.name for package in packages if package.fullest > MAX_MODULES] == []


def test_contributing_lists_the_layers_that_are_enforced() -> None:
    (enforced,) = (contract["layers"] for contract in read_contracts() if contract.get("containers") == ["specrl"])
    _, _, after = CONTRIBUTING.partition("Imports point down this list")
    listed = re.search(r"\n\n((?:    .+\n)+)", after)
    assert listed is not None
    assert listed[1].split("\n")[:-1] == [f"    {layer}" for layer in enforced]


def test_contributing_lists_who_may_import_which_library() -> None:
    enforced = {
        tuple(contract["protected_modules"]): contract["allowed_importers"]
        for contract in read_contracts()
        if contract["type"] == "protected" and "as_packages" not in contract  # that one is about a room of our own
    }
    _, _, table = CONTRIBUTING.partition("| library | imported by |\n|---|---|\n")
    listed = {}
    for row in table.partition("\n\n")[0].splitlines():
        libraries, importers = row.strip("| ").split(" | ")
        listed[tuple(NAME.findall(libraries))] = NAME.findall(importers)
    assert listed == enforced


def test_no_import_points_up_and_no_modules_import_one_another(packages: list[PackageGraph]) -> None:
    assert len(packages) > 15
    assert [package.name for package in packages if package.arrows_up or package.circles] == []


def test_an_import_cycle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports under TYPE_CHECKING count, too."""
    package = tmp_path / "services" / "circled" / "room"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "first.py").write_text("from circled.room import second\n")
    (package / "second.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from circled.room import first\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "services")
    monkeypatch.setattr("tools.import_graph.ROOTS", {"services": "circled"})
    (found,) = measure_roots([tmp_path / "services"])
    assert (found.name, found.arrows, found.arrows_up, found.circles) == ("circled.room", 2, 1, 1)
