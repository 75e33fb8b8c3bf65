"""Finds a Python that specrl's environment can be built on. tools/setup.py calls it.

Runs under Python 3.8 or later, with the standard library alone: it is started by whatever python3 a machine has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PYTHON_VERSIONS = ((3, 12), (3, 13))  # in order of preference; requires-python of pyproject.toml
NEEDED_MODULES = ("venv", "ensurepip", "ssl", "sqlite3", "ctypes")  # left out where CPython was built without a library
INTERPRETER_TIMEOUT_S = 60

PROBE = f"""
import json, sys, sysconfig
missing = []
for name in {NEEDED_MODULES!r}:
    try:
        __import__(name)
    except Exception:
        missing.append(name)
print(json.dumps({{
    "version": sys.version_info[:2],
    "implementation": sys.implementation.name,
    "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    "missing": missing,
}}))
"""

INSTALL_PYTHON = """Install one of them, then run `make setup` again:
  Ubuntu 22.04      sudo add-apt-repository ppa:deadsnakes/ppa && sudo apt install python3.12 python3.12-venv
  Ubuntu 24.04      sudo apt install python3.12 python3.12-venv
  Debian 12         has Python 3.11 only: uv python install 3.12   (uv: https://docs.astral.sh/uv)
  Debian 13         sudo apt install python3.13 python3.13-venv
  Fedora            sudo dnf install python3.12
  anywhere          uv python install 3.12, pyenv install 3.12, or conda create -n specrl python=3.12"""


class SetupFailed(Exception):
    """Setup cannot go on; the message says what to do."""


def find_python(versions: Sequence[tuple[int, int]]) -> str:
    """An interpreter of the first of these versions that this machine has. Raises SetupFailed if there is none.

    Interpreters of these versions that lack a module are passed over, and said to be.
    """
    passed_over: dict[str, str] = {}
    for version in versions:
        for python in candidates(version):
            if python in passed_over:
                continue
            found = probe_interpreter(python)
            if isinstance(found, str):
                passed_over[python] = found
                continue
            reason = unsuitable(found, versions)
            if reason is not None:
                passed_over[python] = reason
            elif tuple(found["version"]) == version:
                for other, why in passed_over.items():
                    if not re.match(r"is \d", why):  # another version is no surprise
                        say(f"passing over {other}: it {why}")
                return python
    tried = "".join(f"\n  {python}: {reason}" for python, reason in passed_over.items())
    wanted = " or ".join(as_text(version) for version in versions)
    raise SetupFailed(
        f"specrl needs CPython {wanted}, and this machine has none that is suitable."
        + (f"\nFound, and passed over:{tried}" if tried else "")
        + f"\n{INSTALL_PYTHON}"
    )


def candidates(version: tuple[int, int]) -> Iterator[str]:
    """Interpreters that may be of this version, each path once: on PATH, of uv, of pyenv, of conda."""
    name = f"python{as_text(version)}"
    seen = set()
    for python in _places(name, as_text(version)):
        path = str(python)
        if path not in seen and os.access(path, os.X_OK):
            seen.add(path)
            yield path


def _places(name: str, version: str) -> Iterator[str | Path]:
    for command in (name, "python3", "python"):
        found = shutil.which(command)
        if found is not None:
            yield found
    yield sys.executable
    home = Path.home()
    uv = shutil.which("uv") or shutil.which(str(home / ".local" / "bin" / "uv"))
    if uv is not None:
        # --system: an environment that happens to be active is not what a new one is built on.
        found = prints(uv, "python", "find", "--system", "--no-python-downloads", "--no-project", version).strip()
        if found:
            yield found
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    yield from _newest_first(pyenv.glob(f"versions/{version}*/bin/{name}"))
    for root in _conda_roots(home):
        yield root / "bin" / name
        yield from sorted(root.glob(f"envs/*/bin/{name}"))


def _conda_roots(home: Path) -> Iterator[Path]:
    executable = os.environ.get("CONDA_EXE") or shutil.which("conda")
    if executable:
        yield Path(executable).resolve().parent.parent
    if os.environ.get("CONDA_PREFIX"):
        yield Path(os.environ["CONDA_PREFIX"])
    for parent in (home, Path("/opt")):
        for name in ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "conda", ".conda"):
            yield parent / name


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: [int(part) for part in re.findall(r"\d+", str(path))], reverse=True)


def probe_interpreter(python: str) -> dict[str, Any] | str:
    """What an interpreter says of itself (see PROBE), or why it says nothing. A name on PATH may be a dead shim."""
    try:
        done = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=INTERPRETER_TIMEOUT_S, check=True
        )
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return "does not run"


def unsuitable(found: dict[str, Any], versions: Sequence[tuple[int, int]]) -> str | None:
    """Why an interpreter cannot be used, to follow its name; None if it can be."""
    if tuple(found["version"]) not in versions:
        return f"is {as_text(found['version'])}"
    if found["implementation"] != "cpython":
        return f"runs {found['implementation']}, for which the engines have no wheels"
    if found["free_threaded"]:
        return "is built without the GIL, for which the engines have no wheels"
    if found["missing"]:
        return f"lacks {', '.join(found['missing'])}"
    return None


def as_text(version: Iterable[int]) -> str:
    """A version with its dots: 3.12."""
    return ".".join(str(part) for part in version)


def prints(*command: str) -> str:
    """What a command prints; nothing if it fails or does not exist."""
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout
    except OSError:
        return ""


def say(text: str) -> None:
    """Print a line of our own among the installers' output."""
    print(f"setup: {text}", flush=True)
