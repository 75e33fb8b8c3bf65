"""Every package of every lock has hashes, and locks agree where they share packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "requirements"
LOCKS = sorted(path.stem for path in REQUIREMENTS.glob("*.lock"))
ADDED = ("suffix", "sinks", "s3")
"""Locks that `make` targets add to .venv."""


def packages(lock: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package in a lock."""
    found: dict[str, tuple[str, int]] = {}
    name = ""
    for line in (REQUIREMENTS / f"{lock}.lock").read_text().splitlines():
        if pinned := re.match(r"([a-z0-9][a-z0-9._-]*)==([^\s;]+)", line):
            name = pinned[1]
            found[name] = (pinned[2], 0)
        elif re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line):
            found[name] = (found[name][0], found[name][1] + 1)
        else:
            assert not line.partition("#")[0].strip(), f"{lock}.lock has a line that pins nothing: {line}"
    return found


def project() -> dict[str, list[str]]:
    """Extras of pyproject.toml."""
    extras: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return extras


def inputs(name: str) -> set[str]:
    """Requirements of an .in file."""
    lines = (line.partition("#")[0].strip() for line in (REQUIREMENTS / f"{name}.in").read_text().splitlines())
    return {line for line in lines if line}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_has_hashes(lock: str) -> None:
    found = packages(lock)
    assert found
    assert not [name for name, (_, hashes) in found.items() if hashes == 0]


def test_both_builds_of_torch_are_one_version_everywhere() -> None:
    (cpu,) = (version for name, (version, _) in packages("torch-cpu").items() if name == "torch")
    version = cpu.removesuffix("+cpu")
    assert cpu != version
    assert packages("torch-cpu")["torch"][1] == 4  # two versions of Python on two architectures
    assert packages("torch-cuda")["torch"][0] == version
    assert "torch" not in packages("cpu")
    assert f"torch=={version}" in project()["cpu"]
    assert f"torch=={version}" in inputs("torch-cuda")
    assert f"\ntorch=={version}\n" in (REQUIREMENTS / "overrides.txt").read_text()
    assert f'version = "{version}"' in (REQUIREMENTS / "uv.toml").read_text()


@pytest.mark.parametrize("lock", ["control", "torch-cuda", *ADDED])
def test_locks_that_share_an_environment_pin_the_same_versions(lock: str) -> None:
    tested = packages("cpu")
    found = packages(lock)
    assert not {name for name in tested.keys() & found.keys() if tested[name][0] != found[name][0]}, "run `make lock`"


def test_what_make_adds_is_what_the_extras_ask_for() -> None:
    extras = project()
    assert set(extras["suffix"]) <= inputs("suffix")
    assert {*extras["tensorboard"], *extras["wandb"], *extras["mlflow"]} == inputs("sinks")


@pytest.mark.parametrize("lock", ["control-runtime", "cpu-runtime", "gpu"])
def test_images_read_and_write_s3(lock: str) -> None:
    assert "s3fs" in packages(lock)


def test_the_makefile_installs_nothing_without_hashes() -> None:
    makefile = (ROOT / "Makefile").read_text()
    installs = [line for line in makefile.splitlines() if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line and "--no-deps" in line for line in installs)
    assert len(re.findall(r"\d{4}-\d{2}-\d{2}", makefile)) == 1  # LOCKED_ON, written once
