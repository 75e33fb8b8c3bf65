"""Builds Go programs that tests start, each set from one folder of pins, and keeps them in the tests' cache.

A folder's go.mod pins versions and go.sum their content; nothing else is downloaded. The result is kept outside the
repository, in a folder named by what it was built from. So a second call returns at once, and two branches with
different pins do not overwrite each other. Programs are built without C, and are static.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

KUBERNETES = "k8s.io/kubernetes"


@dataclass(frozen=True)
class GoPrograms:
    """The programs of one Go module."""

    name: str
    """Folder in the cache, and what messages call the set."""
    pins: Path
    """Folder with go.mod and go.sum, and a folder for each main that is not upstream's."""
    packages: dict[str, str]
    """Package by name of the program."""
    manifests: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Files of modules that are kept beside the programs: module, and path in it, by name."""

    @cached_property
    def folder(self) -> Path:
        """Where the programs of these pins are, or will be."""
        # Sorted among themselves: the folder must not depend on where the checkout lies.
        sources = [*sorted([*self.pins.glob("go.*"), *self.pins.glob("*/main.go")]), Path(__file__)]
        content = [source.read_bytes() for source in sources]
        content.append(json.dumps([self.packages, self.manifests], sort_keys=True).encode())
        digest = hashlib.sha256(b"\0".join(content)).hexdigest()[:8]
        version = self.version_of(KUBERNETES)
        return cache_folder() / self.name / (f"v{version}-{digest}" if version else digest)

    def version_of(self, module: str) -> str:
        """Return the version that go.mod pins, without the v; empty if it names no such module."""
        return self.versions.get(module, "").removeprefix("v")

    @cached_property
    def versions(self) -> dict[str, str]:
        """The version of each module that go.mod requires."""
        lines = [line.removeprefix("require ").split() for line in (self.pins / "go.mod").read_text().splitlines()]
        return {words[0]: words[1] for words in lines if len(words) >= 2 and words[1].startswith("v")}

    def build(self) -> None:
        """Build unless it is there. Exits with what is wrong."""
        if self.folder.is_dir():
            print(f"built already: {self.folder}")
            return
        if shutil.which("go") is None:
            sys.exit(f"go must be on the PATH to build the {self.name}; install Go")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        # A build that is interrupted leaves nothing that looks whole.
        with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix=".building-") as scratch:
            began, staged = time.monotonic(), Path(scratch) / "whole"
            staged.mkdir()
            print(f"downloading the modules of the {self.name}", flush=True)
            modules = self._download()
            for name, (module, path) in self.manifests.items():
                shutil.copyfile(modules[module] / path, staged / name)
            self._compile(staged)
            staged.rename(self.folder)
        print(f"built {', '.join(self.packages)} in {time.monotonic() - began:.0f} s: {self.folder}")

    def _download(self) -> dict[str, Path]:
        """Every module of go.mod, verified by go.sum: its path, and its folder in Go's module cache."""
        found = subprocess.run(
            ["go", "mod", "download", "-json"],
            cwd=self.pins,
            env=_environment(),
            check=False,
            capture_output=True,
            text=True,
        )
        if found.returncode != 0:
            sys.exit(
                f"the modules must be downloadable, got:\n{found.stderr}{found.stdout[-2000:]}\nsee `go env GOPROXY`"
            )
        decoder, modules, text = json.JSONDecoder(), {}, found.stdout.strip()
        while text:
            module, end = decoder.raw_decode(text)
            modules[module["Path"]] = Path(module["Dir"])
            text = text[end:].lstrip()
        return modules

    def _compile(self, staged: Path) -> None:
        """All programs, package by package, with a line about every 200 packages; Go's own cache keeps what is done."""
        listed = ["go", "list", "-deps", *self.packages.values()]
        found = subprocess.run(
            listed, cwd=self.pins, env=_environment(), check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        for name, package in self.packages.items():
            print(f"compiling {name}", flush=True)
            command = ["go", "build", "-v", "-p", "2", "-trimpath", "-buildvcs=false", "-ldflags", self._link_flags()]
            command += ["-o", str(staged / name), package]
            with subprocess.Popen(
                command, cwd=self.pins, env=_environment(), stderr=subprocess.PIPE, text=True
            ) as process:
                assert process.stderr is not None
                lines: list[str] = []
                for line in process.stderr:
                    lines.append(line)
                    if len(lines) % 200 == 0:
                        print(f"  {len(lines)} packages, of {len(found.split())} in all programs", flush=True)
            if process.returncode != 0:
                sys.exit(f"{name} must compile, got:\n{''.join(lines[-40:])}")

    def _link_flags(self) -> str:
        version = self.version_of(KUBERNETES)
        if not version:
            return "-s -w"
        # Clients parse Kubernetes' version; without the stamp it is v0.0.0-master+$Format:%H$, which helm refuses.
        major, minor, _ = version.split(".")
        stamps = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        return " ".join(
            ["-s -w", *(f"-X k8s.io/component-base/version.{key}={value}" for key, value in stamps.items())]
        )


def cache_folder() -> Path:
    """Where tests keep what they fetch or make."""
    base = os.environ.get("SPECRL_CACHE_DIR")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrl"


def _environment() -> dict[str, str]:
    """The user's, without C: static programs, and no compiler is asked for."""
    return os.environ | {"CGO_ENABLED": "0"}
