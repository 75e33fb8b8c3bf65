"""The programs that tests build from Go modules: their pins, and where they are kept."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cluster.programs.build import ADDONS, NODE, RUNTIME
from tests.e2e.controllers.build import CERT_MANAGER, KUEUE
from tests.e2e.controlplane.build import CONTROL_PLANE
from tests.e2e.go_programs import KUBERNETES


def test_node_and_control_plane_are_of_one_version() -> None:
    assert NODE.version_of(KUBERNETES) == CONTROL_PLANE.version_of(KUBERNETES) != ""


def test_node_and_control_plane_share_what_go_has_compiled() -> None:
    """A module of another version is compiled anew, with all that imports it: minutes."""
    differing = {
        module: (version, NODE.versions[module])
        for module, version in CONTROL_PLANE.versions.items()
        if NODE.versions.get(module, version) != version
    }
    assert differing == {}


@pytest.mark.parametrize(
    "programs", [CONTROL_PLANE, NODE, ADDONS, RUNTIME, KUEUE, CERT_MANAGER], ids=lambda each: each.name
)
def test_every_main_of_ours_is_built(programs: object) -> None:
    assert isinstance(programs, type(NODE))
    mains = {f"./{main.parent.name}" for main in programs.pins.glob("*/main.go")}
    assert mains == {package for package in programs.packages.values() if package.startswith("./")}


def test_another_pin_is_kept_in_another_folder(tmp_path: Path) -> None:
    shutil.copytree(ADDONS.pins, tmp_path / "pins")
    copied = replace(ADDONS, pins=tmp_path / "pins")
    assert copied.folder == ADDONS.folder
    sums = tmp_path / "pins" / "go.sum"
    sums.write_text(sums.read_text() + "\n")
    assert replace(copied).folder != ADDONS.folder
    assert replace(ADDONS, packages={"registry": "./registry"}).folder != ADDONS.folder
