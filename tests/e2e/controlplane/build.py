"""Builds the control plane that the e2e tests start: etcd, three Kubernetes programs, JobSet and LeaderWorkerSet.

    python -m tests.e2e.controlplane.build        what `make controlplane` runs

go.mod pins the versions and go.sum their content; nothing else is downloaded. The result is kept outside the
repository, in a folder named by what it was built from, so a second call returns at once and two branches with
different pins do not overwrite each other. JobSet's and LeaderWorkerSet's CRDs and webhook configurations are taken
from the same modules as their controllers.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = {
    "etcd": "./etcd",
    "kube-apiserver": "./kube-apiserver",
    "kube-controller-manager": "./kube-controller-manager",
    "kube-scheduler": "./kube-scheduler",
    "jobset": "sigs.k8s.io/jobset",
    "lws": "sigs.k8s.io/lws/cmd",
}
MANIFESTS = {
    "jobset-crd.yaml": ("sigs.k8s.io/jobset", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"),
    "jobset-webhooks.yaml": ("sigs.k8s.io/jobset", "config/components/webhook/manifests.yaml"),
    "lws-crd.yaml": ("sigs.k8s.io/lws", "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"),
    "lws-disaggregated-crd.yaml": (
        "sigs.k8s.io/lws",
        "config/crd/bases/disaggregatedset.x-k8s.io_disaggregatedsets.yaml",
    ),
    "lws-webhooks.yaml": ("sigs.k8s.io/lws", "config/webhook/manifests.yaml"),
}


def cache_folder() -> Path:
    """Where this pin's programs are, or will be."""
    base = os.environ.get("SPECRL_CACHE_DIR")
    if not base:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrl"
    sources = sorted([*HERE.glob("go.*"), *HERE.glob("*/main.go"), Path(__file__)])
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:8]
    return Path(base) / "controlplane" / f"v{kubernetes_version()}-{digest}"


def kubernetes_version() -> str:
    """What go.mod pins, without the v."""
    line = next(line for line in (HERE / "go.mod").read_text().splitlines() if "k8s.io/kubernetes v" in line)
    return line.split()[-1].removeprefix("v")


def build(folder: Path) -> None:
    """Download, compile and move into place; a build that is interrupted leaves nothing that looks whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        began, staged = time.monotonic(), Path(scratch) / "whole"
        staged.mkdir()
        print(f"downloading the modules of Kubernetes {kubernetes_version()}", flush=True)
        modules = _download()
        for name, (module, path) in MANIFESTS.items():
            shutil.copyfile(modules[module] / path, staged / name)
        _compile(staged)
        staged.rename(folder)
    print(f"built {', '.join(PROGRAMS)} in {time.monotonic() - began:.0f} s: {folder}")


def _download() -> dict[str, Path]:
    """Every module of go.mod, verified by go.sum: its path, and its folder in Go's module cache."""
    found = subprocess.run(
        ["go", "mod", "download", "-json"], cwd=HERE, env=_environment(), check=False, capture_output=True, text=True
    )
    if found.returncode != 0:
        sys.exit(f"the modules must be downloadable, got:\n{found.stderr}{found.stdout[-2000:]}\nsee `go env GOPROXY`")
    decoder, modules, text = json.JSONDecoder(), {}, found.stdout.strip()
    while text:
        module, end = decoder.raw_decode(text)
        modules[module["Path"]] = Path(module["Dir"])
        text = text[end:].lstrip()
    return modules


def _compile(staged: Path) -> None:
    """All programs, package by package, with a line about every 200 packages; Go's own cache keeps what is done."""
    total = len(_go("list", "-deps", *PROGRAMS.values()).split())
    version = kubernetes_version()
    major, minor, _ = version.split(".")
    stamps = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    # Clients parse the server's version; without the stamp it is v0.0.0-master+$Format:%H$, which helm refuses.
    flags = " ".join(["-s -w", *(f"-X k8s.io/component-base/version.{key}={value}" for key, value in stamps.items())])
    for name, package in PROGRAMS.items():
        print(f"compiling {name}", flush=True)
        command = [
            "go",
            "build",
            "-v",
            "-p",
            "2",
            "-trimpath",
            "-buildvcs=false",
            "-ldflags",
            flags,
            "-o",
            str(staged / name),
            package,
        ]
        with subprocess.Popen(command, cwd=HERE, env=_environment(), stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if len(lines) % 200 == 0:
                    print(f"  {len(lines)} packages, of {total} in all programs", flush=True)
        if process.returncode != 0:
            sys.exit(f"{name} must compile, got:\n{''.join(lines[-40:])}")


def _go(*arguments: str) -> str:
    return subprocess.run(
        ["go", *arguments], cwd=HERE, env=_environment(), check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _environment() -> dict[str, str]:
    """The user's, without C: static programs, and no compiler is asked for."""
    return os.environ | {"CGO_ENABLED": "0"}


def main() -> None:
    """Build unless it is there."""
    folder = cache_folder()
    if folder.is_dir():
        print(f"built already: {folder}")
        return
    if shutil.which("go") is None:
        sys.exit(
            "go must be on the PATH to build the control plane; install Go, or name binaries in KUBEBUILDER_ASSETS"
        )
    build(folder)


if __name__ == "__main__":
    main()
