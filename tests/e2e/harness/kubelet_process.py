"""Run the kubelet of our nodes (tests/e2e/kubelet) as a process. This checkout's programs stand in for images."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.programs import Program

STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "folder", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "specrl.dev/folder",
}
ENTRYPOINTS = {
    "specrl-generation": ["specrl-generation"],
    "specrl-trainer": ["specrl-trainer"],
    "specrl-control": ["specrl-coordinator"],
    "valkey": ["redis-server"],
    "redis": ["redis-server"],
}
"""Entrypoints of images: part of the image's name to a command."""


class KubeletProcess:
    """The kubelet's process, and its folder of logs."""

    def __init__(self, plane: ControlPlane, folder: Path, root: Path) -> None:
        self._plane = plane
        self.folder = folder
        assert plane.network is not None
        command: list[str | Path | int] = [
            sys.executable,
            "-m",
            "tests.e2e.kubelet",
            "--kubeconfig",
            plane.kubeconfig,
            "--folder",
            folder,
        ]
        scripts = _scripts(folder, root)
        command += ["--network", plane.network.number, "--entrypoints", json.dumps(ENTRYPOINTS)]
        for path in (scripts, root, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()):
            command += ["--keep", path]
        self._program = Program(
            "kubelet",
            command,
            folder / "kubelet.log",
            PYTHONPATH=os.pathsep.join(map(str, (root, root / "services", root / "operators"))),
            PATH=os.pathsep.join([str(scripts), str(Path(sys.executable).parent), os.environ["PATH"]]),
        )

    def start(self) -> None:
        """Start the kubelet, and create the storage class for claims. Returns when it watches."""
        self._plane.admin.apply(STORAGE_CLASS)
        self._program.start()
        self._program.wait_until((self.folder / "ready").exists, "readiness")

    def stop(self) -> None:
        """Stop the kubelet and every pod. Fails if the kubelet reported errors."""
        self._program.stop()
        said = self._program.log.read_text()
        assert not said, said

    def log(self, namespace: str, pod: str, container: str, restart: int = 0) -> str:
        """Return the output of one run of a container."""
        file = self.folder / "logs" / namespace / pod / f"{container}.{restart}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def logs_of(self, namespace: str, prefix: str) -> dict[str, str]:
        """Return the output of all pods with this name, by pod and file."""
        files = sorted((self.folder / "logs" / namespace).glob(f"{prefix}*/*.log"))
        return {f"{file.parent.name}/{file.name}": file.read_text(errors="replace") for file in files}


def _scripts(folder: Path, root: Path) -> Path:
    """Write the console scripts of this checkout, independent of the installed package."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    place = folder / "bin"
    place.mkdir()
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        file = place / name
        # The guard is needed because spawned workers import the main module again.
        lines = [
            "import sys",
            f"from {module} import {function}",
            'if __name__ == "__main__":',
            f"    sys.exit({function}())",
        ]
        file.write_text("\n".join([f"#!{sys.executable}", *lines, ""]))
        file.chmod(0o755)
    return place
