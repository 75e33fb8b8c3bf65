"""Adds the commit to every wheel and sdist: specrl/commit.txt, which `specrl --version` reads.

hatchling runs it ([tool.hatch.build.hooks.custom] in pyproject.toml). An editable install gets no such file, since its
commit changes; there `specrl --version` asks git. A wheel that is built from an sdist has the file of the sdist.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("services") / "specrl"


class CommitHook(BuildHookInterface):  # type: ignore[type-arg] # hatchling's own configuration is of no interest here
    """Writes the file to a temporary folder, and has it included under its name in the package."""

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
        place = PACKAGE if self.target_name == "sdist" else Path("specrl")
        build_data["force_include"][str(file)] = str(place / name)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()
