"""Makes the base of the images where no registry can be reached: Debian's packages and this machine's CPython.

What is made stands in for the Dockerfile's own base, python:3.12-slim-bookworm, which is Debian bookworm with CPython
below /usr/local as well. `DIFFERENCES` lists in what the two differ. The store's image is the same base with
redis-server, whose name the operator's command for stores knows.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.images.command import ImagesFailed, has_succeeded, read_output, run, say, step
from tools.interpreters import SetupFailed, find_python

PYTHON = (3, 12)  # of the Dockerfile's base
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "netbase", "tzdata")  # those of python:3.12-slim-bookworm
DIFFERENCES = """CPython is {version}, copied from {prefix}, not built from python.org's sources
Debian's packages are today's, installed by debootstrap; pip is there only inside virtual environments
SSL_CERT_FILE is set, so that programs trust the certificates of Debian's folder"""


def python_prefix() -> Path:
    """Where this machine's CPython for the images is installed. Raises ImagesFailed if there is none."""
    try:
        python = find_python([PYTHON])
    except SetupFailed as error:
        raise ImagesFailed(str(error)) from error
    return Path(read_output(python, "-c", "import sys; print(sys.base_prefix)"))


def base_key(prefix: Path) -> str:
    """A hash of all that decides what is in the base."""
    version = read_output(prefix / "bin" / "python3", "-VV")
    recipe = "".join(map(inspect.getsource, (make_root, _copy_python)))
    return hashlib.sha256(f"{version}\n{SUITE} {PACKAGES}\n{recipe}".encode()).hexdigest()[:12]


def make_root(folder: Path, prefix: Path) -> None:
    """Fill a folder with the base's files. Raises ImagesFailed."""
    if shutil.which("debootstrap") is None:
        raise ImagesFailed("debootstrap must be installed, got none; run `apt-get install debootstrap` as root")
    with step("installing Debian's packages"):
        packages = ",".join([*PACKAGES, *_packages_of_libraries(prefix)])
        run("debootstrap", "--variant=minbase", f"--include={packages}", SUITE, folder)
    with step(f"copying CPython from {prefix}"):
        _copy_python(prefix, folder / "usr" / "local")
    for leftover in ("var/cache/apt", "var/lib/apt/lists", "var/log"):
        shutil.rmtree(folder / leftover)
        (folder / leftover).mkdir()
    (folder / "var/lib/apt/lists/partial").mkdir()
    (folder / "var/cache/apt/archives/partial").mkdir(parents=True)


def describe_differences(prefix: Path) -> list[str]:
    """In what this base differs from the Dockerfile's own, a sentence each."""
    version = read_output(prefix / "bin" / "python3", "-V").removeprefix("Python ")
    return DIFFERENCES.format(version=version, prefix=prefix).splitlines()


def _packages_of_libraries(prefix: Path) -> list[str]:
    """Debian's packages with the shared libraries that CPython's modules are linked to."""
    modules = [prefix / "bin" / "python3", *prefix.glob("lib/python3*/lib-dynload/*.so")]
    linked = subprocess.run(["ldd", *modules], check=False, capture_output=True, text=True).stdout
    libraries = sorted(set(re.findall(r"=> (/\S+)", linked)))
    places = {str(Path(library).resolve()) for library in libraries} | set(libraries)
    # A library is listed by the path that its package has, with or without /usr; dpkg fails where one is unknown.
    places |= {place.removeprefix("/usr") for place in places}
    owners = subprocess.run(["dpkg", "-S", *sorted(places)], check=False, capture_output=True, text=True).stdout
    return sorted({line.split(":")[0] for line in owners.splitlines() if not line.startswith("diversion")})


def _copy_python(prefix: Path, target: Path) -> None:
    library = f"lib/python{PYTHON[0]}.{PYTHON[1]}"
    left_out = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "__pycache__", "config-*")
    shutil.copytree(prefix / library, target / library, ignore=left_out, symlinks=True)
    (target / library / "site-packages").mkdir()
    shutil.copytree(prefix / "include", target / "include", symlinks=True, dirs_exist_ok=True)
    for shared in prefix.glob("lib/libpython*.so*"):
        shutil.copy2(shared, target / "lib" / shared.name, follow_symlinks=False)
    name = f"python{PYTHON[0]}.{PYTHON[1]}"
    shutil.copy2((prefix / "bin" / name).resolve(), target / "bin" / name)
    for alias in ("python3", "python"):
        (target / "bin" / alias).symlink_to(name)
    run("chroot", target.parent.parent, "ldconfig")
    run("chroot", target.parent.parent, f"/usr/local/bin/{name}", "-m", "compileall", "-q", f"/usr/local/{library}")


class LocalBases:
    """The two images, made in buildah's store unless they are there."""

    def __init__(self, buildah: Sequence[str]) -> None:
        self._buildah = buildah
        self._prefix = python_prefix()
        key = base_key(self._prefix)
        self.base = f"localhost/specrl-base:{key}"
        self.store = f"localhost/specrl-store:{key}"

    def make_missing(self, scratch: Path) -> None:
        """Make what is missing, with `scratch` for files. Raises ImagesFailed."""
        for line in describe_differences(self._prefix):
            say(f"the base differs from the Dockerfile's: {line}")
        if not self._has(self.base):
            with tempfile.TemporaryDirectory(dir=scratch, prefix="base-") as place:
                root = Path(place) / "root"
                make_root(root, self._prefix)
                self._commit_root(root)
        if not self._has(self.store):
            with step("installing redis-server for the store's image"):
                self._commit_store()

    def _has(self, image: str) -> bool:
        return has_succeeded(*self._buildah, "inspect", "--type", "image", image)

    def _commit_root(self, root: Path) -> None:
        with step("committing the base"), self._container("scratch") as container:
            run(*self._buildah, "add", "--quiet", container, root, "/")
            for setting in (
                "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
                "LANG=C.UTF-8",
                "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt",
            ):
                run(*self._buildah, "config", "--env", setting, container)
            run(*self._buildah, "config", "--cmd", "python3", container)
            run(*self._buildah, "commit", "--quiet", container, self.base)

    def _commit_store(self) -> None:
        install = "apt-get update -q && apt-get install -q -y --no-install-recommends redis-server && apt-get clean"
        with self._container(self.base) as container:
            isolation = ("--isolation", "oci", "--runtime", "runc", "--network", "host")
            clean = "rm -rf /var/lib/apt/lists/*"
            run(*self._buildah, "run", *isolation, container, "--", "sh", "-c", f"{install} && {clean}")
            run(*self._buildah, "config", "--cmd", "redis-server", container)
            run(*self._buildah, "commit", "--quiet", container, self.store)

    @contextmanager
    def _container(self, image: str) -> Iterator[str]:
        """A container from an image, which is removed at the end."""
        container = read_output(*self._buildah, "from", "--quiet", "--pull-never", image)
        try:
            yield container
        finally:
            run(*self._buildah, "rm", container)
