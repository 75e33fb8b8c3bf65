"""Find the files that a run's own functions are made of, and digest them. Nothing is imported or run.

Called when a run starts, to tell whether a reward function or a tool has changed since its last start.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import xxhash

from specrl.files import SMALL_BYTES, read_bytes
from specrl.spec import RunSpec
from specrl.spec.data import PythonVerifier
from specrl.spec.rules.rule import walk_sections


def digest_function_files(spec: RunSpec) -> dict[str, str]:
    """Return a digest of each file by its path.

    With a folder these are the module's file and all files in that folder that it imports. Without one it is the file
    of the installed module alone, since what it imports may be as large as torch. A file that cannot be read has none:
    other checks report it.
    """
    found: dict[str, str] = {}
    for _, section in walk_sections(spec):
        if isinstance(section, PythonVerifier):  # or a tool, which has the same fields
            for path in _find_files(section.function.partition(":")[0], section.folder):
                try:
                    found[str(path)] = xxhash.xxh3_128_hexdigest(read_bytes(path, 16 * SMALL_BYTES))
                except OSError:
                    continue
    return found


def _find_files(module: str, folder: str | None) -> list[Path]:
    if folder is None:
        installed = _find_installed(module)
        return [] if installed is None or installed.origin is None else [Path(installed.origin)]
    finder = _ImportFinder(path=[folder])
    with suppress(ImportError):  # reported when the function is tried
        finder.import_hook(module)  # reads the code for its imports, and runs none of it
    names = [getattr(module, "__file__", None) for module in finder.modules.values()]  # built-in ones have none
    return sorted(Path(name) for name in names if name is not None and Path(name).is_relative_to(folder))


class _ImportFinder(ModuleFinder):
    """Finds imports as Python does. A module that it cannot read counts as not found, so the rest is still searched."""

    def import_module(self, partname: str, fqname: str, parent: Any) -> Any:
        places = self.path if parent is None else parent.__path__
        found = PathFinder.find_spec(partname, list(places)) if places else None
        if found is not None and found.loader is None:
            # A folder without __init__.py. It has no loader, for which ModuleFinder raises AttributeError.
            package: Any = self.add_module(fqname)  # typeshed does not know `__path__`
            package.__path__ = list(found.submodule_search_locations or [])
            return package
        with suppress(Exception):  # the code may be anything: too complex to parse, for example, which is a MemoryError
            return super().import_module(partname, fqname, parent)
        return None


def _find_installed(module: str) -> ModuleSpec | None:
    """Find a module without importing its packages, as `importlib.util.find_spec` would do."""
    found: ModuleSpec | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        places = None if found is None else found.submodule_search_locations
        found = PathFinder.find_spec(".".join(parts[:end]), places)
        if found is None:
            return None
    return found
