"""Probes of `specrl doctor` for what is installed. They read package metadata and import no engine."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from specrl.errors import RunInvalid
from specrl.formats.doctor_report import Finding, FindingState
from specrl.machine import visible_gpus
from specrl.seams.versions import DISTRIBUTIONS, OVERRIDE_VARIABLE, installed_version, supported_versions
from specrl.version import describe_version

_CUDA_LINE = re.compile(r"^cuda\b[^=]*= *'([^']+)'", re.MULTILINE)
"""The line of torch/version.py that names the CUDA runtime of the build. CPU builds have None there."""
_REQUIREMENT = re.compile(r"""^([A-Za-z0-9._-]+).*;.*\bextra *== *['"]([^'"]+)['"]""")
"""Package and extra of a line of a distribution's metadata, such as `redis<7,>=5; extra == "redis"`."""


def probe_installation() -> Iterator[Finding]:
    """Yield the versions of specrl and Python, and the system."""
    python = f"{platform.python_version()} in {sys.prefix}"
    yield Finding(name="specrl", state=FindingState.OK, value=describe_version())
    yield Finding(name="Python", state=FindingState.OK, value=python)
    yield Finding(name="system", state=FindingState.OK, value=platform.platform())


def probe_engines() -> Iterator[Finding]:
    """Yield the versions of torch, vLLM, Megatron-Core and Triton. A run refuses to start with versions not read."""
    for package in DISTRIBUTIONS:
        known = supported_versions()[package]
        try:
            version = installed_version(package)
        except RunInvalid:
            remedy = "`specrl engines` prints the commands that install the engines for CPUs; docs/install.md has GPUs"
            yield Finding(name=package, state=FindingState.PROBLEM, value="not installed", remedy=remedy)
            continue
        if version in known:
            yield Finding(name=package, state=FindingState.OK, value=version)
            continue
        is_tried = os.environ.get(OVERRIDE_VARIABLE) == "warn"
        state = FindingState.WARNING if is_tried else FindingState.PROBLEM
        remedy = f"install {' or '.join(known)}, which specrl supports, or set {OVERRIDE_VARIABLE}=warn to try it"
        yield Finding(name=package, state=state, value=version, remedy=remedy)
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not installed; only GPUs need it"
    yield Finding(name="triton", state=FindingState.OK, value=triton)


def probe_cuda_runtime() -> Iterator[Finding]:
    """Yield the CUDA runtime that torch was built for. It is read from a file: importing torch takes seconds."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    runtime = _CUDA_LINE.search(text)
    if runtime is not None:
        yield Finding(name="CUDA runtime", state=FindingState.OK, value=runtime[1])
    elif visible_gpus():
        remedy = "install the engines for GPUs (docs/install.md); the GPUs would stay unused"
        value = "none: torch is a build for CPUs, on a machine with GPUs"
        yield Finding(name="CUDA runtime", state=FindingState.PROBLEM, value=value, remedy=remedy)
    else:
        yield Finding(name="CUDA runtime", state=FindingState.OK, value="none: torch is a build for CPUs")


def probe_extras() -> Iterator[Finding]:
    """Yield the extras of specrl whose packages are all installed."""
    missing: dict[str, bool] = {}
    for line in metadata.requires("specrl") or ():
        requirement = _REQUIREMENT.match(line)
        if requirement is not None:
            package, extra = requirement.groups()
            missing[extra] = missing.get(extra, False) or not _is_installed(package)
    whole = sorted(extra for extra, is_missing in missing.items() if not is_missing)
    yield Finding(name="extras", state=FindingState.OK, value=", ".join(whole) or "none")


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
