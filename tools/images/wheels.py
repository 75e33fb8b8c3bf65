"""Says whether every package of the images' locks has a wheel for an architecture, with a hash that the lock lists.

Images for an architecture can be built on that architecture alone: compiling bytecode of torch under emulation takes
hours. This check needs neither: uv resolves each lock for the platform and lists the files of the registry.
"""

from __future__ import annotations

import re
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from tools.images.command import ROOT, read_output

LOCKS = {"cpu": ("control-runtime", "cpu-runtime", "torch-cuda", "suffix"), "gpu": ("control-runtime", "gpu", "suffix")}
"""Locks that images are made from, by engines. torch-cpu has no files in the package registry."""
FROM_SOURCE = ("arctic-inference",)  # published as source only; the Dockerfile compiles it
GLIBC = (2, 36)  # of Debian bookworm
PYTHON = (3, 12)


@dataclass(frozen=True)
class Resolution:
    """How a package of a lock is installed on a platform: by a wheel, from source, or not at all."""

    lock: str
    package: str
    wheel: str | None
    problem: str = ""


def resolve_locks(engines: str, machine: str) -> list[Resolution]:
    """Find the wheel of every package. machine: `x86_64` or `aarch64`. Raises ImagesFailed if uv fails."""
    supported = platform_tags(machine)
    return [found for lock in LOCKS[engines] for found in _resolve(lock, machine, supported)]


def platform_tags(machine: str) -> frozenset[Tag]:
    """Tags of wheels that CPython of the images' base installs on a machine."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC[1], 16, -1)]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    return frozenset({*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, platforms=platforms)})


def _resolve(lock: str, machine: str, supported: frozenset[Tag]) -> list[Resolution]:
    source = ROOT / "requirements" / f"{lock}.lock"
    hashes = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", source.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "pylock.toml"
        read_output(
            *(ROOT / ".venv" / "bin" / "uv", "pip", "compile", "--quiet", "--no-config", "--no-deps"),
            *("--python-version", ".".join(map(str, PYTHON)), "--format", "pylock.toml"),
            *("--python-platform", f"{machine}-manylinux_{GLIBC[0]}_{GLIBC[1]}", "--output-file", output, source),
        )
        packages = tomllib.loads(output.read_text(encoding="utf-8"))["packages"]
    return [_find_wheel(lock, package, supported, hashes) for package in packages]


def _find_wheel(lock: str, package: dict[str, Any], supported: frozenset[Tag], hashes: set[str]) -> Resolution:
    name = package["name"]
    files = {wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in package.get("wheels", ())}
    fitting = [file for file in files if parse_wheel_filename(file)[3] & supported]
    for file in fitting:
        if files[file] in hashes:
            return Resolution(lock, name, file)
    if fitting:
        return Resolution(lock, name, None, f"the lock has no hash of {fitting[0]}; run `make lock`")
    if name in FROM_SOURCE and package.get("sdist", {}).get("hashes", {}).get("sha256") in hashes:
        return Resolution(lock, name, None)
    return Resolution(lock, name, None, f"no wheel for this platform among {len(files)}")
