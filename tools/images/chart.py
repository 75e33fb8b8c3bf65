"""Packs the Helm chart into an OCI layout, as registries keep charts (https://helm.sh/docs/topics/registries)."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import yaml
from tools.images.command import ROOT, ImagesFailed, run, say
from tools.images.layouts import Blob, write_artifact

CHART = ROOT / "deploy" / "helm"
CONFIG = "application/vnd.cncf.helm.config.v1+json"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


def pack_chart(folder: Path) -> Path:
    """Return a layout in the folder that has the chart under its version. Raises ImagesFailed without helm."""
    if shutil.which("helm") is None:
        raise ImagesFailed("helm must be on the PATH, got none; `python tests/e2e/binaries.py helm` fetches one")
    folder.mkdir(parents=True, exist_ok=True)
    description = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    layout = folder / "chart"
    with tempfile.TemporaryDirectory() as scratch:
        run("helm", "package", CHART, "--destination", scratch)
        (archive,) = Path(scratch).glob("*.tgz")
        config = Blob(CONFIG, json.dumps(description).encode())
        digest = write_artifact(layout, description["version"], config, Blob(CONTENT, archive.read_bytes()))
    say(f"chart {description['name']} {description['version']}: {layout}, {digest}")
    return layout
