"""What an installation of specrl has: the files that come with the package, and perhaps the engines.

`examples/` and `requirements/` are links in a checkout, and folders of the package in a wheel. So every command finds
its files by the same path, whether or not there is a checkout.
"""

from __future__ import annotations

import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from specrl.errors import RunInvalid


def package_folder(name: str) -> Path:
    """A folder of files inside the package."""
    return Path(str(resources.files("specrl") / name))


EXAMPLES = package_folder("examples")
"""Run files; `demo/`: what `specrl demo` runs; `plan/`: scenarios of `specrl simulate`."""

REQUIREMENTS = package_folder("requirements")
"""Locks of the engines for CPUs, which `specrl engines` installs from."""


def require_engines(*modules: str) -> None:
    """Raise RunInvalid unless these engines are installed. Imports none of them, which would take seconds.

    modules: names of packages as Python imports them: torch, megatron, vllm.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise RunInvalid(
            f"the engines must be installed, got no {', no '.join(missing)} in {sys.prefix}; "
            "`specrl engines` prints the commands that install them, and `make setup` does so in a clone"
        )
