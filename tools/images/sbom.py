"""Lists the packages of an image (SBOM, in SPDX) with syft, which is compiled from the Go modules that go.mod pins."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name
from tools.images.command import ROOT, ImagesFailed, run, say, step
from tools.images.layouts import Image, make_view

SYFT = Path(__file__).resolve().parent / "syft"
PACKAGE = "github.com/anchore/syft/cmd/syft"
PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;+]+)", re.MULTILINE)
REMOVED = {"hatchling", "pip", "uv"}
"""Installers, which no image keeps."""


def find_syft(folder: Path) -> Path:
    """Return syft's program, compiled unless it is in the folder: 10 minutes of CPU. Raises ImagesFailed."""
    pins = b"\0".join((SYFT / name).read_bytes() for name in ("go.mod", "go.sum"))
    program = folder / f"syft-{hashlib.sha256(pins).hexdigest()[:8]}"
    if program.is_file():
        return program
    if shutil.which("go") is None:
        raise ImagesFailed("go must be on the PATH to build syft, got none; install Go, or pass --no-sbom")
    with step("compiling syft"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        staged = Path(scratch) / "syft"
        flags = ("-trimpath", "-buildvcs=false", "-ldflags", "-s -w")
        run("go", "build", *flags, "-o", staged, PACKAGE, cwd=SYFT, env=os.environ | {"CGO_ENABLED": "0"})
        staged.replace(program)  # an atomic last step: an interrupted build leaves no half program
    return program


def write_sbom(syft: Path, layout: Path, image: Image, output: Path) -> None:
    """Write the SBOM of an image of a layout. Raises ImagesFailed."""
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        view = Path(scratch) / "view"
        make_view(layout, image, view)
        staged = Path(scratch) / output.name
        quiet = os.environ | {"SYFT_CHECK_FOR_APP_UPDATE": "false", "TMPDIR": scratch}
        run(syft, "scan", "--quiet", f"oci-dir:{view}", "--output", f"spdx-json={staged}", env=quiet)
        staged.replace(output)


def check_sbom(sbom: Path, pins: Mapping[str, str]) -> None:
    """Check that an SBOM has every package of the image's locks. Raises ImagesFailed.

    pins: versions by package, without the part after `+`, which names a build.
    """
    listed = read_python_packages(sbom)
    if missing := [f"{name} {version}" for name, version in pins.items() if listed.get(name) != version]:
        raise ImagesFailed(
            f"{sbom} must list every package of the image's locks, got none of {', '.join(missing[:5])}"
            f"{' and others' if len(missing) > 5 else ''}; look whether syft reads the image's .venv"
        )
    say(f"  {len(listed)} packages of Python, with all {len(pins)} of the locks")


def read_python_packages(sbom: Path) -> dict[str, str]:
    """Return the versions of Python's packages in an SBOM, by name."""
    packages = json.loads(sbom.read_text(encoding="utf-8"))["packages"]
    return {
        canonicalize_name(package["name"]): package["versionInfo"].partition("+")[0]
        for package in packages
        if any(each["referenceLocator"].startswith("pkg:pypi/") for each in package.get("externalRefs", ()))
    }


def read_pins(target: str, engines: str) -> dict[str, str]:
    """Return what an image must have of its locks: versions by package. Of the store nothing is locked."""
    if target == "store":
        return {}
    if target == "control":
        return _read_lock("control-runtime")
    pins = _read_lock("gpu" if engines == "gpu" else "cpu-runtime")
    if engines == "cpu":  # which build of torch is installed depends on the sources that can be reached
        pins["torch"] = _read_lock("torch-cpu")["torch"]
    return pins | {"arctic-inference": _read_lock("suffix")["arctic-inference"]}


def _read_lock(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{lock}.lock").read_text(encoding="utf-8")
    return {canonicalize_name(name): version for name, version in PIN.findall(text) if name not in REMOVED}
