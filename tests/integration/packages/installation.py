"""Builds packages of the checkout, and installs them in environments of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
UV = Path(sys.executable).with_name("uv")
COMMAND_S = 300.0


@dataclass(frozen=True)
class Installation:
    """An environment that has specrl from one package, and an empty folder to work in."""

    environment: Path
    work: Path

    def run(self, *command: str, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, in the empty folder and without any trace of the checkout."""
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [self.environment / "bin" / command[0], *command[1:]],
            cwd=self.work,
            env=variables | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def output(self, *command: str, timeout_s: float = COMMAND_S) -> str:
        done = self.run(*command, timeout_s=timeout_s)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def build(source: Path, out: Path, target: str) -> Path:
    """Build one package with the environment's own hatchling."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=source, env=variables, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (package,) = out.iterdir()
    return package


def install(package: Path, folder: Path, left_out: Sequence[str]) -> Installation:
    """A fresh environment with this package of specrl. left_out: modules that it does not borrow."""
    environment = folder / "environment"
    borrowed = folder / "borrowed"
    work = folder / "work"
    venv.create(environment, symlinks=True)
    borrowed.mkdir()
    for place in Path(sysconfig.get_path("purelib")).iterdir():
        # Python ignores .pth files in a folder that another one adds, so the editable install's adds no checkout.
        if place.name.split("-")[0] not in ("specrl", *left_out):
            (borrowed / place.name).symlink_to(place)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")
    command = [UV, "pip", "install", "--offline", "--no-deps", "--no-build-isolation", "--python", python, package]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr
    work.mkdir()
    return Installation(environment, work)
