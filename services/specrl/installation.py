"""Files that are installed with the package, and whether the engines are installed.

`examples/` and `requirements/` are symbolic links in a checkout, and folders of the package in a wheel. So commands
find their files by the same path in both.
"""

from __future__ import annotations

import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from specrl.errors import RunInvalid


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
