"""One lock serves Python 3.12 and 3.13 on x86-64 and aarch64: resolved for each, the versions are the same."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.requirements import REGISTRY

ROOT = Path(__file__).resolve().parents[3]
UV = Path(sys.executable).with_name("uv")
RESOLVED_FOR = {
    "cpu": ("3.12", "3.13"),
    "torch-cuda": ("3.12", "3.13"),
    "control": ("3.12", "3.13"),
    "cpu-runtime": ("3.12",),  # images have 3.12
    "control-runtime": ("3.12",),
    # On 3.13 and aarch64 a package that vllm 0.33 names has no wheel for glibc 2.28; images have 3.12.
    "gpu": ("3.12",),
}


@functools.cache
def compile_commands() -> dict[str, list[str]]:
    """What `make lock` runs for each lock, without what it writes."""
    shown = subprocess.run(
        ["make", "--dry-run", "lock", f"BIN={UV.parent}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\s*\\\n\s*", " ", shown).splitlines():
        if "pip compile" in line and "&&" not in line:
            command = shlex.split(line)
            at = command.index("--output-file")
            found[Path(command[at + 1]).stem] = command[:at] + command[at + 2 :]
    return found


def versions(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^\s;\\]+)", text, re.MULTILINE))


def arguments_of(command: list[str], option: str) -> list[str]:
    return [command[at + 1] for at, word in enumerate(command) if word == option]


def requirements_of(files: list[str]) -> dict[str, Requirement]:
    """Requirements of some files; hashes and options of installers are left out."""
    lines = (line.split("#")[0].strip() for file in files for line in (ROOT / file).read_text().splitlines())
    found = (Requirement(line) for line in lines if line and not line.startswith("-"))
    return {canonicalize_name(item.name): item for item in found}


def required(lock: str, environment: dict[str, str]) -> list[Requirement]:
    """All requirements that a lock must fulfil: its inputs, and those that installed metadata of its packages names."""
    command = compile_commands()[lock]
    pinned = versions((ROOT / "requirements" / f"{lock}.lock").read_text())
    extras = arguments_of(command, "--extra")
    inputs = [str(item) for item in requirements_of([word for word in command if word.endswith(".in")]).values()]
    if "pyproject.toml" in command:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        inputs += project["dependencies"] + [line for name in extras for line in project["optional-dependencies"][name]]
    waiting = [Requirement(line) for line in inputs]
    seen = set()
    found = []
    while waiting:
        item = waiting.pop()
        name = canonicalize_name(item.name)
        if str(item) in seen or not applies(item, environment, ()):
            continue
        seen.add(str(item))
        found.append(item)
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.version.partition("+")[0] == pinned.get(name) and not name.startswith(("torch", "vllm")):
            lines = map(Requirement, installed.requires or ())
            waiting += [line for line in lines if applies(line, environment, tuple(item.extras))]
    return found


def applies(item: Requirement, environment: dict[str, str], extras: tuple[str, ...]) -> bool:
    return item.marker is None or any(item.marker.evaluate(environment | {"extra": extra}) for extra in ("", *extras))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("lock", "python"), [(lock, python) for lock, pythons in RESOLVED_FOR.items() for python in pythons]
)
def test_a_lock_holds_what_its_packages_ask_for(lock: str, python: str, machine: str) -> None:
    """For each Python and architecture, as far as the installed metadata says: of torch-cuda, its inputs alone.

    Not seen here is what a registry has: test_a_lock_is_the_same_for_every_python_and_architecture asks it.
    """
    command = compile_commands()[lock]
    pinned = versions((ROOT / "requirements" / f"{lock}.lock").read_text())
    excluded = requirements_of(arguments_of(command, "--excludes")).keys()
    overridden = requirements_of(arguments_of(command, "--overrides")).keys()
    left_out = {*excluded, *arguments_of(command, "--no-emit-package")}
    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    asked = required(lock, {name: str(value) for name, value in default_environment().items()} | environment)
    assert asked
    for item in asked:
        name = canonicalize_name(item.name)
        if name not in left_out:
            assert name in pinned, f"{lock}.lock must pin {item} for Python {python} on {machine}; run `make lock`"
            assert name in overridden or item.specifier.contains(pinned[name], prereleases=True), str(item)


@pytest.mark.deep
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("lock", "python"), [(lock, python) for lock, pythons in RESOLVED_FOR.items() for python in pythons]
)
def test_a_lock_is_the_same_for_every_python_and_architecture(
    lock: str, python: str, machine: str, tmp_path: Path
) -> None:
    """Starts from the committed lock, as `make lock` does: what is pinned stays pinned where it fits."""
    command = [*compile_commands()[lock]]
    command[command.index("--python-version") + 1] = python
    command[command.index("--python-platform") + 1] = f"{machine}-manylinux_2_28"
    output = tmp_path / f"{lock}.lock"
    locked = (ROOT / "requirements" / f"{lock}.lock").read_text()
    output.write_text(locked)
    done = subprocess.run(
        [*command, "--output-file", str(output)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    if re.search(r"[Ff]ailed to fetch|dns error|error sending request", done.stderr):
        REGISTRY.skip(f"{lock}.lock was not resolved for {python} on {machine}")
    assert done.returncode == 0, done.stderr
    assert versions(output.read_text()) == versions(locked)
