"""Files that are installed with the package, and whether the engines and the driver that they need are installed.

`examples/` and `requirements/` are symbolic links in a checkout, and folders of the package in a wheel. So commands
find their files by the same path in both.
"""

from __future__ import annotations

import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from specrl.errors import RunInvalid
from specrl.machine import OLDEST_DRIVER, is_old_driver, read_driver_version, visible_gpus


def package_folder(name: str) -> Path:
    """Return the path of a folder inside the package."""
    return Path(str(resources.files("specrl") / name))


EXAMPLES = package_folder("examples")
"""Run files. `demo/` is what `specrl demo` runs, and `plan/` has scenarios of `specrl simulate`."""

REQUIREMENTS = package_folder("requirements")
"""Lock files of the CPU engines, from which `specrl engines` installs."""


def require_engines(*modules: str) -> None:
    """Raise RunInvalid unless these engines are installed. Imports none of them, because that takes seconds.

    modules: importable names: torch, megatron, vllm.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise RunInvalid(
            f"the engines must be installed, got no {', no '.join(missing)} in {sys.prefix}; "
            "`specrl engines` prints the commands that install them, and `make setup` does so in a clone"
        )


def require_driver() -> None:
    """Raise RunInvalid if this process has GPUs and the driver is too old. torch would say so only after minutes."""
    version = read_driver_version() if visible_gpus() else ""
    if version and is_old_driver(version):
        raise RunInvalid(
            f"NVIDIA's driver must be {OLDEST_DRIVER} or newer for CUDA 13, which torch and vLLM of specrl[gpu] are "
            f"built for, got {version}; install a newer one on this node"
        )
