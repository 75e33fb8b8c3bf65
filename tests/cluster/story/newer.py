"""A newer version of the product: this tree with one more field of the run file, and images of another tag."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.product import LAYOUT
from tests.cluster.story.freshness import ROOT

VERSION = "0.2.0"
TAG = "newer"
SECTION = "schedule"
FIELD = "clusterTier"
DEFAULT = 0
CHANGES = (
    (
        "services/specrl/spec/run.py",
        "(?m)^(    max_policy_lag: NotNegative = 1)$",
        f'    cluster_tier: NotNegative = {DEFAULT}\n    """Nothing. Only a newer version has it."""\n' + r"\1",
    ),
    ("pyproject.toml", '(?m)^version = "[^"]+"$', f'version = "{VERSION}"'),
    ("deploy/helm/Chart.yaml", "(?m)^version: .+$", f"version: {VERSION}"),
    ("deploy/helm/Chart.yaml", "(?m)^appVersion: .+$", f'appVersion: "{VERSION}"'),
)
"""File, pattern and replacement. `_generate_definition` makes what is generated from these files."""
DEFINITION = "deploy/helm/templates/crd/rljobs.yaml"


@dataclass(frozen=True)
class Newer:
    """The newer version. digests: of its images, by role, in the layout of `make images`."""

    folder: Path
    digests: dict[str, str]

    @property
    def chart(self) -> Path:
        return self.folder / "deploy" / "helm"


def build_newer(folder: Path) -> Newer:
    """Copy the files that git knows to an empty folder, change them, and build their images for CPUs.

    Only the layer with the sources is made anew. A second build of an unchanged tree finds that layer, too.
    """
    _run(ROOT, "git", "checkout-index", "--all", f"--prefix={folder}/")
    for name, pattern, replacement in CHANGES:
        file = folder / name
        text, count = re.subn(pattern, replacement, file.read_text(encoding="utf-8"))
        assert count == 1, f"{name} must have one line like {pattern}, got {count}"
        file.write_text(text, encoding="utf-8")
    _run(folder, sys.executable, "-m", "specrl.spec.rljob.crd", DEFINITION)
    _run(folder, sys.executable, "-m", "tools.images", "build", "--engines", "cpu", "--tag", TAG, "--no-sbom")
    record = json.loads((LAYOUT.parent / f"cpu-{TAG}.json").read_text(encoding="utf-8"))
    return Newer(folder, {role: str(image["digest"]) for role, image in record["images"].items()})


def _run(folder: Path, *command: str) -> None:
    """Run a command on a folder's own sources. Fails with its output."""
    sources = os.pathsep.join(str(folder / name) for name in ("", "services", "operators"))
    environment = os.environ | {"PYTHONPATH": sources}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
