"""Lists the packages of an image (SBOM, in SPDX) with syft, which is compiled from the Go modules that go.mod pins."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from tools.images.command import ImagesFailed, run, step
from tools.images.layouts import Image, make_view

SYFT = Path(__file__).resolve().parent / "syft"
PACKAGE = "github.com/anchore/syft/cmd/syft"


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
