"""Adds specrl/commit.txt to every wheel and sdist; `specrl --version` reads it.

hatchling runs this hook ([tool.hatch.build.hooks.custom] in pyproject.toml). An editable install gets no such file,
because its commit changes; there `specrl --version` asks git. A wheel that is built from an sdist has the sdist's file.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("services") / "specrl"


class CommitHook(BuildHookInterface):  # type: ignore[type-arg] # the configuration's type, which is not used
    """Writes the file to a temporary folder and includes it in the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root) / PACKAGE
        source = runpy.run_path(str(package / "version.py"))
        name = source["COMMIT_FILE"]
        if version == "editable" or (package / name).exists():
            return
        commit = source["ask_git"](Path(self.root))
        if commit is None:
            return
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / name
        file.write_text(commit + "\n", encoding="ascii")
        # An sdist has the layout of the repository, a wheel that of the installed package.
        place = PACKAGE if self.target_name == "sdist" else Path("specrl")
        build_data["force_include"][str(file)] = str(place / name)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
